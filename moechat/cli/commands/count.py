"""``moechat count``: the tokens of a text, from a model's tokenizer alone."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from moechat.cli.commands.count_arguments import CountCommand
from moechat.cli.commands.prompt_input import read_prompt
from moechat.cli.commands.tokenizer_check import require_tokenizer
from moechat.cli.engine_import import import_engine
from moechat.cli.terminal.consoles import write_json_line, write_output
from moechat.errors import UsageError, one_line
from moechat.hub.model_ref import ModelRef
from moechat.hub.names import resolve


def count(command: CountCommand) -> int:
    """Print the number of tokens; returns the exit status.

    Raises:
        UsageError: There is no text, the model has no tokenizer, or ``--chat`` finds no chat template.
        MoechatError: There is no such model, or its tokenizer cannot be used.
    """
    require_tokenizer(command.model, None)
    text = read_prompt(command.text)
    if text is None:
        raise UsageError("there is no text", hint="give it as an argument or on stdin")
    ref = resolve(command.model)
    import_engine()
    with _directory(ref) as directory:
        tokens, context = _counted(directory, ref.name, text, chat=command.chat)
    if command.json:
        write_json_line(
            sys.stdout, {"model": ref.name, "tokens": tokens, "characters": len(text), "context": context}
        )
    else:
        write_output(sys.stdout, f"{tokens}\n")
    return 0


@contextmanager
def _directory(ref: ModelRef) -> Iterator[Path]:
    """The directory with a model's configuration and tokenizer; of a GGUF file they are made."""
    if ref.store is not None:
        from moechat.store.store import Store
        from moechat.store.verified_inputs import verified_inputs

        with verified_inputs(Store.open(ref.store)) as directory:
            yield directory
        return
    assert ref.checkpoint is not None
    if ref.checkpoint.is_dir():
        yield ref.checkpoint
        return
    from moechat.models.gguf_source import opened_gguf

    with opened_gguf(ref.checkpoint) as opened:
        yield opened.path


def _counted(directory: Path, name: str, text: str, *, chat: bool) -> tuple[int, int]:
    """Tokens of a text, and the context that the model was made for."""
    from moechat.confined.tokenising import tokenise
    from moechat.models.assets import load_tokenizer
    from moechat.models.outlining import read_config
    from moechat.sizes.context_length import context_length, stated_context

    tokenizer = load_tokenizer(directory)
    if not chat:
        tokens = tokenise(tokenizer, text, name)
    elif not getattr(tokenizer, "chat_template", None):
        raise UsageError(f"{name} has no chat template: it was not made for chats", hint="leave --chat out")
    else:
        messages = [{"role": "user", "content": text}]
        tokens = tokenise(tokenizer, _rendered(tokenizer, messages, name), name, add_special_tokens=False)
    return len(tokens), context_length(stated_context(read_config(directory)), None)


def _rendered(tokenizer: Any, messages: list[dict[str, str]], name: str) -> str:
    from moechat.confined.process import RefusedError
    from moechat.confined.templates import render_messages

    try:
        return render_messages(tokenizer, messages, name)
    except RefusedError as error:
        raise UsageError(f"the chat template of {name} refuses this text: {one_line(error)}") from None
