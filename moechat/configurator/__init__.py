"""Computes cache plans from hardware profile, geometry and routing statistics; pure functions without I/O."""
