"""Benchmarks: compares systems on this machine, with real models or synthetic ones of the same shape."""
