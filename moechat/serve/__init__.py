"""The HTTP server: other programs talk to a model in the protocols of OpenAI and Anthropic."""
