"""Quantised safetensors checkpoints, read as plain tensors: one module for each scheme."""
