"""What a client asks of a model in a chat, in whichever protocol, and its job for the worker."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from moechat.engine import Grammar
from moechat.errors import UsageError
from moechat.reply_formats import (
    FORMATS,
    ReplyFormat,
    Tool,
    call_grammar,
    detect,
    grammar_tokens,
    to_template_messages,
)
from moechat.reply_formats.thinking import answer_begin, opens_thought
from moechat.serve.jobs import Job

if TYPE_CHECKING:
    from moechat import Engine

Choice = Literal["auto", "none", "required"]


@dataclass(frozen=True)
class AnswerDefaults:
    """What a model's answers have where a client asks for nothing else.

    Attributes:
        system: The system prompt.
        options: Keyword arguments of ``Engine.generate``.
        template_options: Makes values for a chat template of the variables that it reads, if known.
    """

    system: str | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    template_options: Callable[[frozenset[str] | None], Mapping[str, Any]] = lambda _variables: {}


_NO_DEFAULTS = AnswerDefaults()
# Roles of messages that take the place of a system prompt.
_SYSTEM_ROLES = ("system", "developer")


@dataclass
class Conversation:
    """A request for the next message of a conversation.

    Attributes:
        model: As the client named it.
        messages: In OpenAI's form.
        options: Keyword arguments of ``Engine.generate``.
        tools: Tools that the model may call.
        choice: Whether it must call one.
        named: The tool that it must call, with the choice ``required``; empty: any.
        parallel: It may call several.
        schema: JSON schema of the answer; ``None``: free text.
        template_options: Values for the chat template.
        format: How the model writes; known once the prompt is encoded.
    """

    model: str
    messages: Sequence[Mapping[str, Any]]
    options: dict[str, Any]
    tools: tuple[Tool, ...] = ()
    choice: Choice = "auto"
    named: str = ""
    parallel: bool = True
    schema: Mapping[str, Any] | None = None
    template_options: dict[str, Any] = field(default_factory=dict)
    format: ReplyFormat = field(default_factory=lambda: FORMATS["plain"])

    def __post_init__(self) -> None:
        self._defaults = _NO_DEFAULTS
        # Wrong messages are refused before the request waits; which form the template wants is known later.
        to_template_messages(self.messages)

    def adopt(self, defaults: AnswerDefaults) -> None:
        """Take what the client has not asked for from the defaults of the model."""
        self._defaults = defaults
        asked = {name: value for name, value in self.options.items() if value is not None}
        self.options = {**defaults.options, **asked}
        if defaults.system is not None and not any(one.get("role") in _SYSTEM_ROLES for one in self.messages):
            self.messages = [{"role": "system", "content": defaults.system}, *self.messages]

    @property
    def offered(self) -> tuple[Tool, ...]:
        """Tools that the model is told of."""
        if self.choice == "none":
            return ()
        return tuple(tool for tool in self.tools if self.named in ("", tool.name))

    def job(self, *, counts_only: bool = False) -> Job:
        """The job; made in the task that waits for it."""
        job = Job(self.model, self._encode, dict(self.options), counts_only=counts_only)
        if self.schema is not None or self._must_call:
            job.options["grammar"] = self._grammar
        return job

    @property
    def _must_call(self) -> bool:
        return bool(self.offered) and self.choice == "required"

    def _encode(self, engine: Engine) -> list[int]:
        prompts = engine.prompts
        template = prompts.chat_template(tools=bool(self.offered))
        self.format = detect(template, prompts.special_tokens)
        tools = [tool.for_template() for tool in self.offered]
        if tools and self.format.calls is None:
            raise UsageError(
                f"{engine.name} has no tools: its chat template does not describe them",
                hint="take another model, or leave tools out",
            )
        messages = to_template_messages(self.messages, chat_template=template, format=self.format)
        options = {
            **self._defaults.template_options(engine.template_variables),
            **self.template_options,
        }
        return engine.encode(messages, tools=tools or None, template_options=options)

    def _grammar(self, engine: Engine, prompt_end: str) -> Grammar:
        if self._must_call:
            tokenizer = engine.prompts.tokenizer
            rules = call_grammar(
                self.format,
                self.offered,
                self.named or None,
                self.parallel,
                tokens=grammar_tokens(tokenizer.added_tokens_encoder, tokenizer.all_special_tokens),
                thinking=opens_thought(prompt_end, self.format),
            )
            return Grammar.lark(rules)
        assert self.schema is not None
        return Grammar.json_schema(self.schema, after=answer_begin(prompt_end, self.format))
