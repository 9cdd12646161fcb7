"""Conversations that are kept: turns, the database, search, transcripts."""
