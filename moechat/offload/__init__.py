"""Execution of expert layers over stored blocks."""
