"""Conversations that are kept: the database, search, transcripts."""
