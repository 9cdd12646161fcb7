"""moechat: Mixture-of-Experts language models that are far larger than the GPU's memory, on the PC you own."""

__version__ = "0.1.0"
