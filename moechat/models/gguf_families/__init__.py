"""llama.cpp's architectures, by family: configurations from metadata, and names of tensors."""
