"""Pictures, documents and sound in requests: models here take text."""

from __future__ import annotations

# By the type of a part, in the protocols of Anthropic and OpenAI.
_KINDS = {
    "image": "pictures",
    "input_image": "pictures",
    "document": "documents",
    "input_file": "documents",
    "audio": "sound",
    "input_audio": "sound",
}


def named(kind: str) -> str:
    """What a part of this type is, for messages; the type itself if it is not known."""
    return _KINDS.get(kind, kind)


def instead(kind: str) -> str | None:
    """A text in the place of such a part in the result of a tool; ``None``: the type is not known.

    An agent cannot take such a result back: to refuse it would end the conversation.
    """
    return f"[{_KINDS[kind]} left out: this model reads text only]" if kind in _KINDS else None
