"""Output of the commands: consoles, pages of results, progress, and statistics."""
