"""The size of a model's attention cache, and how much of a prompt may be computed at a time."""

from __future__ import annotations

from dataclasses import dataclass

from moechat.geometry import PLAIN_KV_BITS

# Most prompt tokens per pass. A constant, because the division into passes changes the rounding of a prompt's
# logits, which must not depend on a budget.
PREFILL_CHUNK = 1024
# :attr:`CacheShape.appendable` of a model that takes prompts of all lengths in parts.
UNLIMITED = 1 << 62
# Memory for copies, and their number: of states two are kept even if they are larger; more are of little use.
# Windows get less, because without copies an answer can at least be continued.
_COPY_BYTES, _WINDOW_BYTES = 128 << 20, 64 << 20
_FEWEST_COPIES = 2
_MOST_COPIES = 8


@dataclass(frozen=True)
class CacheShape:
    """Size and properties of a model's attention cache.

    Attributes:
        exact: Measured in a trial pass of the model; else an upper bound from the configuration.
        reserved: The cache is transformers' ``DynamicCache``, so its layers can be those of
            :mod:`moechat.models.cache_layers`, which take tokens without a copy.
        appendable: Most tokens of a prompt that may be computed in parts; 0: none.
        fixed_bytes: Bytes that do not depend on the number of tokens.
        growing: For each growing tensor: bytes per token, and the number of tokens after which it stops
            growing (or ``None``).
        copied: The same pairs for layers that are copied when they grow, one at a time.
        unpacked: The same pairs for packed layers that a pass unpacks, one at a time.
        bits: Of keys and values: 16, those of the model's type, or 8: packed.
        has_states: Some layers hold states besides keys and values, or instead of them.
        replays: CUDA graphs can replay tokens over it: it holds keys and values, and states that stay where
            they are.
        state_bytes: Bytes of a copy of these states and of windows of keys and values, which change in place.
        in_one_pass: Why no prompt, or no longer one, may be computed in parts; empty if all may.
    """

    exact: bool
    reserved: bool
    appendable: int
    fixed_bytes: int
    growing: tuple[tuple[int, int | None], ...]
    copied: tuple[tuple[int, int | None], ...] = ()
    unpacked: tuple[tuple[int, int | None], ...] = ()
    bits: int = PLAIN_KV_BITS
    has_states: bool = False
    replays: bool = False
    state_bytes: int = 0
    in_one_pass: str = ""

    def note_of_one_pass(self, tokens: int) -> str:
        """A sentence about prompts of so many tokens that are computed in one pass; empty if they are not."""
        if not self.in_one_pass or tokens <= self.appendable:
            return ""
        which = f"of more than {self.appendable} tokens " if self.appendable else ""
        return f"prompts {which}are computed in one pass, whose memory grows with them: {self.in_one_pass}"

    @property
    def unlimited(self) -> bool:
        """Whether prompts of all lengths may be computed in parts."""
        return self.appendable >= UNLIMITED

    def nbytes(self, tokens: int) -> int:
        """Bytes of the cache with ``tokens`` tokens, including the temporary copy of a growing layer,
        an unpacked one, and copies of states.
        """
        unpacked = max((_held(pair, tokens) for pair in self.unpacked), default=0)
        return self.read_bytes(tokens) + unpacked + self.copy_bytes

    @property
    def copies(self) -> int:
        """Most copies of states and windows that a conversation keeps."""
        return copies_kept(self.state_bytes, states=self.has_states) if self.appendable else 0

    @property
    def copy_bytes(self) -> int:
        """Bytes of copies of states and windows: those that a conversation keeps, and one during a wave."""
        return (self.copies + 1) * self.state_bytes if self.copies else 0

    def read_bytes(self, tokens: int) -> int:
        """Bytes that the native step of a token reads; layers without one unpack theirs besides."""
        copied = max((_held(pair, tokens) for pair in self.copied), default=0)
        return self.fixed_bytes + sum(_held(pair, tokens) for pair in self.growing) + copied


def _held(pair: tuple[int, int | None], tokens: int) -> int:
    each, most = pair
    return each * (tokens if most is None else min(tokens, most))


def copies_kept(nbytes: int, *, states: bool) -> int:
    """Number of copies that are kept of states and windows.

    Args:
        nbytes: Bytes of one copy; 0: there is nothing to copy.
        states: States are among them.
    """
    if not nbytes:
        return 0
    if not states:
        return min(_MOST_COPIES, _WINDOW_BYTES // nbytes)
    return max(_FEWEST_COPIES, min(_MOST_COPIES, _COPY_BYTES // nbytes))
