"""Finds the outline of a model: from the package, from the user's cache, else counted, which needs torch."""
