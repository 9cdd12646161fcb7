"""Lets an answer follow a :class:`moechat.reply_formats.grammar.Grammar`.

Before each token the grammar says which tokens may follow; the others are not drawn. The masks come from
llguidance, which walks the vocabulary as a trie with an Earley parser. A mask needs the last token only, so
it is computed in a thread beside the forward pass.
"""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from functools import cached_property
from typing import Any

import numpy as np
import torch

from moechat.confined.tokenising import panics_reported
from moechat.errors import MoechatError, UsageError, one_line
from moechat.reply_formats.grammar import Grammar, guidance_library

# Characters of a token that may hold a mark.
_LONGEST_TOKEN = 256
_LARK_GUIDE = "the syntax is that of llguidance, a dialect of Lark: https://github.com/guidance-ai/llguidance"


class GrammarCompiler:
    """Makes the masks of grammars for one model. Its first use takes up to a second.

    Args:
        tokenizer: A transformers tokenizer, or ``None``.
        vocabulary: Rows of the embedding.
        stop_tokens: Token ids that end an answer.

    Attributes:
        vocabulary: Rows of the embedding.
    """

    def __init__(self, tokenizer: Any, vocabulary: int, stop_tokens: frozenset[int]) -> None:
        self._tokenizer = tokenizer
        self.vocabulary = vocabulary
        self._stop_tokens = stop_tokens

    def begin(self, grammar: Grammar) -> Constraint:
        """The grammar at the beginning of an answer.

        Raises:
            UsageError: It is malformed or too large, or the model's tokenizer cannot be used with grammars.
        """
        matcher = guidance_library().LLMatcher(self.tokens, grammar.rules, log_level=0)
        if matcher.is_error():
            hint = (
                _LARK_GUIDE
                if grammar.title == "the grammar"
                else "parts of it that are not supported can be left out"
            )
            raise UsageError(f"{grammar.title} cannot be used: {one_line(matcher.get_error())}", hint=hint)
        trial = matcher.deep_copy()
        trial.compute_bitmask()
        if trial.is_error():  # nothing at all follows such rules, as with {"$ref": "#"}
            raise UsageError(f"{grammar.title} allows no answer", hint="check its references to itself")
        return Constraint(matcher, self, grammar.after)

    def token_bytes(self, token: int) -> bytes:
        """The bytes of one token's text.

        Raises:
            UsageError: As :meth:`begin`.
        """
        return bytes(self.tokens.decode_bytes([token])) if token < self.tokens.vocab_size else b""

    @cached_property
    def tokens(self) -> Any:
        """The vocabulary as llguidance has it."""
        from llguidance.hf import from_tokenizer

        try:
            with panics_reported("this model"):
                return from_tokenizer(self._tokenizer, eos_token=sorted(self._stop_tokens) or None)
        except Exception as error:
            raise UsageError(
                f"this model's tokenizer cannot be used with grammars: {one_line(error)}",
                hint="answer without schema or grammar",
            ) from None

    @cached_property
    def threads(self) -> ThreadPoolExecutor:
        """Computes masks."""
        return ThreadPoolExecutor(1, thread_name_prefix="moechat-grammar")

    def text(self, token: int) -> str:
        """One token as text, special ones too."""
        return str(self._tokenizer.decode([token], skip_special_tokens=False))

    def close(self) -> None:
        """End the thread; may be called again."""
        if "threads" in self.__dict__:
            self.threads.shutdown(wait=True)
            del self.threads


class Constraint:
    """A grammar at a place in one answer.

    Attributes:
        finished: The answer is complete: nothing may follow but its end.
    """

    # Invariant: _mask is written by the task in _computing only, and read when that is done.
    def __init__(self, matcher: Any, compiler: GrammarCompiler, after: str) -> None:
        self.finished = False
        self._matcher = matcher
        self._compiler = compiler
        self._after = after
        self._seen = ""
        self._mask = np.zeros((int(compiler.tokens.vocab_size) + 31) // 32, dtype=np.int32)
        self._computing: Future[None] | None = None
        if not after:
            self._compute()

    def forbidden(self) -> torch.Tensor | None:
        """Tokens that must not come next, bool ``[vocab]``; ``None`` while the grammar has not begun.

        Raises:
            MoechatError: The grammar needs too much memory or time for this answer.
        """
        if self._computing is None:
            return None
        self._computing.result()
        if self._matcher.is_error():
            raise MoechatError(
                f"the grammar cannot go on: {one_line(self._matcher.get_error())}",
                hint="simplify it, or limit repetitions in it",
            )
        allowed = np.unpackbits(self._mask.view(np.uint8), bitorder="little")
        found = np.ones(self._compiler.vocabulary, dtype=np.bool_)
        known = min(len(allowed), len(found))
        np.equal(allowed[:known], 0, out=found[:known])
        return torch.from_numpy(found)

    def accept(self, token: int) -> None:
        """Go on behind a token that was drawn."""
        if self._computing is None:
            # A mark may be written with several tokens, or be in the middle of one.
            self._seen = (self._seen + self._compiler.text(token))[-(len(self._after) + _LONGEST_TOKEN) :]
            if self._after in self._seen:
                self._compute()
            return
        self._matcher.consume_token(token)
        if self._matcher.is_stopped() and not self._matcher.is_error():
            self.finished = True
        else:
            self._compute()

    def _compute(self) -> None:
        self._computing = self._compiler.threads.submit(
            self._matcher.unsafe_compute_mask_ptr, self._mask.ctypes.data, self._mask.nbytes
        )
