"""Fine-tunes a model so that each sequence uses few experts (MELINOE, Raje, Nayak and Joshi)."""
