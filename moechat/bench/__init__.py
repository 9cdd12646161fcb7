"""Measuring: systems side by side on this machine, with real models or shapes with random weights."""
