"""Turns prompts into token ids, and checks that they fit into the context."""

from __future__ import annotations

import inspect
import operator
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from moechat.budget.memory_plan import MemoryPlan
from moechat.confined.process import SHARED, RefusedError
from moechat.confined.templates import render_messages
from moechat.confined.tokenising import panics_reported, tokenise
from moechat.engine.messages import check_messages
from moechat.engine.template_variables import template_variables
from moechat.errors import SHORTEN, PromptTooLongError, UsageError, require_room
from moechat.validation import require_whole, shown

Message = Mapping[str, Any]
Prompt = str | Sequence[Message] | Sequence[int]

# Characters that are tokenised in one call, which takes about 0.1 s.
_PIECE_CHARACTERS = 1 << 16
# Tokens that splitting a text into pieces may add at a boundary.
BOUNDARY_TOKEN_SLACK = 16


class PromptEncoder:
    """Tokenises the prompts of one model.

    Args:
        name: Of the model, for messages.
        tokenizer: A transformers tokenizer, or ``None``.
        plan: Of the model's memory; gives the context length.
        vocabulary: Rows of the embedding.
        on_gpu: The model computes on a GPU; for hints.
    """

    def __init__(self, name: str, tokenizer: Any, plan: MemoryPlan, *, vocabulary: int, on_gpu: bool) -> None:
        self.tokenizer = tokenizer
        self._name = name
        self._plan = plan
        self._vocabulary = vocabulary
        self._on_gpu = on_gpu
        if self.has_chat_template:
            SHARED.start()  # so that the first message finds it ready

    @property
    def has_chat_template(self) -> bool:
        """Whether chat messages can be encoded."""
        return bool(getattr(self.tokenizer, "chat_template", None))

    def chat_template(self, *, tools: bool = False) -> str:
        """The text of the chat template, of that for tools where a model has two; empty without one."""
        if not self.has_chat_template:
            return ""
        return str(self.tokenizer.get_chat_template(tools=[{}] if tools else None))

    @property
    def template_variables(self) -> frozenset[str] | None:
        """The variables that the chat template reads, beside those that all get; see the function."""
        return template_variables(self._template_text()) if self.has_chat_template else frozenset()

    @property
    def special_tokens(self) -> tuple[str, ...]:
        """Texts of the tokens that the tokenizer adds to its vocabulary, such as marks of turns."""
        return tuple(getattr(self.tokenizer, "added_tokens_encoder", {}))

    def encode(
        self,
        prompt: str | Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        template_options: Mapping[str, Any] | None = None,
    ) -> list[int]:
        """Tokens of a text, or of chat messages; see :meth:`Engine.encode`.

        Raises:
            ModelRulesError: Also: the chat template or the tokenizer exceeds a limit.
        """
        _require_prompt(prompt)
        if self.tokenizer is None:
            raise UsageError(
                f"{self._name} has no tokenizer", hint="put the model's tokenizer files beside its weights"
            )
        if isinstance(prompt, str):
            self._require_plausible_length(prompt)
            tokens = self._tokenise(prompt)
        else:
            tokens = self._apply_template(prompt, tools, template_options or {})
        if not tokens:
            raise UsageError("the prompt is empty")
        return tokens

    def to_ids(self, prompt: Any, room: int) -> torch.Tensor:
        """Token ids of a text, of chat messages or of token ids; otherwise as :meth:`check_ids`.

        Raises:
            UsageError: Also as :meth:`encode`.
        """
        _require_prompt(prompt)
        messages = not isinstance(prompt, str | torch.Tensor) and any(
            isinstance(item, Mapping) for item in prompt
        )
        ids: Any = self.encode(prompt) if messages or isinstance(prompt, str) else prompt
        return self.check_ids(ids, room)

    def check_ids(self, ids: Sequence[int], room: int) -> torch.Tensor:
        """Token ids as a tensor.

        Args:
            ids: A sequence or a tensor of any shape.
            room: Tokens of the context that must remain for the answer.

        Returns:
            int64 ``[1, tokens]``.

        Raises:
            UsageError: There is no token, or an id is not an integer or outside the vocabulary.
            PromptTooLongError: The prompt leaves less room than ``room``.
        """
        if isinstance(ids, torch.Tensor):
            ids = ids.flatten().tolist()
        try:
            tokens = [operator.index(token) for token in ids]
        except TypeError as error:
            raise UsageError(f"token ids must be integers: {error}") from error
        if not tokens:
            raise UsageError("the prompt is empty")
        require_room(len(tokens), self._plan.context, room, self._more_context())
        if min(tokens) < 0 or max(tokens) >= self._vocabulary:
            raise UsageError(f"token ids must lie between 0 and {self._vocabulary - 1}")
        return torch.tensor([tokens], dtype=torch.int64)

    def token_text(self, token: int) -> str:
        """One token as text; see :meth:`Engine.token_text`."""
        token = require_whole("token", token, 0, self._vocabulary - 1)
        if self.tokenizer is None:
            return ""
        with panics_reported(self._name):
            return str(self.tokenizer.decode([token], skip_special_tokens=False))

    def _tokenise(self, text: str, **arguments: Any) -> list[int]:
        try:
            return tokenise(self.tokenizer, text, self._name, **arguments)
        except (TypeError, UnicodeError) as error:
            raise UsageError(f"the prompt is not Unicode text: {error}") from error

    def _apply_template(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] | None,
        options: Mapping[str, Any],
    ) -> list[int]:
        if not self.has_chat_template:
            raise UsageError(
                f"{self._name} has no chat template", hint="give a plain text to continue instead"
            )
        taken = inspect.signature(self.tokenizer.apply_chat_template).parameters
        for name in options:
            if not name.isidentifier() or name in taken or name == "messages":
                raise UsageError(f"{shown(name)} cannot be set for a chat template")
        checked = check_messages(messages, self._template_text())
        for message in checked:
            self._require_plausible_length(message.get("content") or "")
        try:
            text = render_messages(self.tokenizer, checked, self._name, tools=tools, options=options)
        except RefusedError as error:
            raise UsageError(f"the chat template of {self._name} refuses these messages: {error}") from error
        if len(text) > 2 * sum(len(message.get("content") or "") for message in checked):
            self._require_plausible_length(text)  # the template may have written most of it
        return self._tokenise(text, add_special_tokens=False)

    def _template_text(self) -> str:
        """The chat template; all of them where the tokenizer has several by name."""
        template = self.tokenizer.chat_template
        return "\n".join(map(str, template.values())) if isinstance(template, Mapping) else str(template)

    def beginning(self, text: str) -> list[int]:
        """Tokens of a text without those of a template, of a long text as many as the context holds.

        Raises:
            UsageError: The model has no tokenizer, or the text is no Unicode.
            UnsupportedModelError: The tokenizer fails on this text.
        """
        if self.tokenizer is None:
            raise UsageError(f"{self._name} has no tokenizer")
        tokens: list[int] = []
        for begin in range(0, len(text), _PIECE_CHARACTERS):
            tokens += self._tokenise(text[begin : begin + _PIECE_CHARACTERS], add_special_tokens=False)
            if len(tokens) > self._plan.context:
                break
        return tokens[: self._plan.context]

    def _require_plausible_length(self, text: str) -> None:
        """Tokenises a long text in pieces, and stops at the first that exceeds the context."""
        if len(text) <= _PIECE_CHARACTERS:
            return
        tokens = 0
        for begin in range(0, len(text), _PIECE_CHARACTERS):
            end = begin + _PIECE_CHARACTERS
            piece = self._tokenise(text[begin:end], add_special_tokens=False)
            tokens += max(0, len(piece) - BOUNDARY_TOKEN_SLACK)
            if tokens > self._plan.context:
                raise PromptTooLongError(
                    f"the prompt has {len(text):,} characters, the first {end:,} of them more than "
                    f"{tokens:,} tokens; the context holds {self._plan.context}",
                    hint=SHORTEN,
                )

    def _more_context(self) -> str:
        if not self._plan.context_limited:
            return SHORTEN
        return (
            "memory made the context shorter than the model allows: give more with "
            f"{'--vram' if self._on_gpu else '--ram'}, or set the tokens with --ctx, which leaves less room "
            "for experts"
        )


def _require_prompt(prompt: object) -> None:
    # Bytes would pass for token ids.
    if isinstance(prompt, bytes | bytearray | Mapping) or not hasattr(prompt, "__len__"):
        raise UsageError(
            f"the prompt is of type {type(prompt).__name__}",
            hint="give a text, a list of messages or token ids",
        )
