"""Measures a model's activations on a text while its experts are quantised, so that bits go where they count."""
