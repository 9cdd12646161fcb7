"""What every chat template gets from the program."""

from __future__ import annotations

TEMPLATE_INPUTS = frozenset(
    ("messages", "tools", "documents", "add_generation_prompt", "continue_final_message")
)
