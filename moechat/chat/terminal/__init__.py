"""The chat on a terminal: line editor, streamed markdown, held keys."""
