"""Family adapters: what transformers knows about a model, in the terms of the block store."""
