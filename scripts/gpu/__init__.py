"""The stages of ``scripts/gpu_check``."""
