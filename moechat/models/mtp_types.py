"""Model types whose heads for multi-token prediction moechat uses."""

from __future__ import annotations

# They are built as moechat.models.mtp describes, and named in one of the ways that it knows.
MTP_TYPES = frozenset(
    {
        *("qwen3_next", "qwen3_5_moe", "qwen3_5_moe_text"),
        *("glm4_moe", "glm4_moe_lite", "deepseek_v3"),
    }
)
