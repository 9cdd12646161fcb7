"""The chat on a terminal: reading, commands, streamed rendering, and conversations that are kept.

Only this room and ``cli`` print. Nothing here imports torch; prompt_toolkit, rich and sqlite3 are imported
when they are used.
"""
