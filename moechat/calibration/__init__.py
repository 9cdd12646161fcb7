"""Quantises experts by what their inputs are on a text, while the model runs over it."""
