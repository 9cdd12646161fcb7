"""Runs what a model's files bring (chat templates, rules of tokenizers) in a small process under limits."""
