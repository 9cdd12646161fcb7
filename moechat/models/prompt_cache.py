"""Keeps the attention caches of conversations, so that their next turns compute only new tokens.

A prompt that continues an answer goes on from the tokens that it shares with it; that agrees with computing
it afresh within rounding. A prompt that only shares a beginning must give the same answer whatever came
before, so it goes back to the end of a part: the parts after it are then those of a prompt computed afresh,
and so are the bits. Caches with states go back to ends of parts where these were copied.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

from moechat.models.attention_cache import copy_cache, keep_first
from moechat.models.cache_states import CacheCopy, can_copy, can_cut, copy_layer

_NEVER = 1 << 62
# Caches that are kept, at most: each is compared with every prompt.
_MOST_HELD = 16
# Tokens that a cache reserves: an eighth more than it needs now, and some for an answer, in steps. Above a
# share of the context it is all of it: while it grows, one layer has its tokens twice, which must fit too.
_MORE, _ANSWER, _STEP = 8, 512, 2048
_WHOLE_SHARE = 0.85


@dataclass(frozen=True)
class CacheRoom:
    """Memory that attention caches of several lengths share.

    Attributes:
        nbytes: Bytes of a cache that reserves so many tokens.
        context: Most tokens of a cache.
        conversations: Caches of that length that the memory holds.
    """

    nbytes: Callable[[int], int]
    context: int
    conversations: int

    @property
    def total(self) -> int:
        """Bytes of all caches."""
        return self.conversations * self.nbytes(self.context)

    def capacity(self, tokens: int) -> int:
        """Tokens to reserve for a cache that needs so many now."""
        wanted = tokens + tokens // _MORE + _ANSWER
        if wanted > _WHOLE_SHARE * self.context:
            return self.context
        return min(self.context, -(-wanted // _STEP) * _STEP)


@dataclass(eq=False)
class CachedTokens:
    """An attention cache, its tokens, and the places to which it can go back. It has one owner at a time.

    Attributes:
        cache: Of transformers; ``None``: none yet.
        tokens: Tokens that it holds.
        prompt: Number of the first of them that were the last prompt.
        answered: Number of tokens before the first token of an answer.
        fresh: Number of the first tokens whose parts are those of a prompt computed afresh.
        marks: Ends of parts, ascending.
        copies: Copies of states at some of the marks.
        whole: No pass is under way, nor was one interrupted, and no guessed tokens are in the cache.
        capacity: Tokens that the cache reserves memory for, where caches share a :class:`CacheRoom`.
        credit: The cache with the least of it makes room for others; see :class:`PromptCache`.
        mtp: Attention cache of the model's head for multi-token prediction, ``None``: it has none. It may
            have fewer tokens.
    """

    cache: Any = None
    tokens: list[int] = field(default_factory=list)
    prompt: int = 0
    answered: int = _NEVER
    fresh: int = 0
    marks: list[int] = field(default_factory=list)
    copies: dict[int, CacheCopy] = field(default_factory=dict)
    whole: bool = True
    capacity: int = 0
    credit: int = 0
    mtp: Any = None
    _ends: set[int] = field(default_factory=set)
    _wanted: set[int] = field(default_factory=set)
    _afresh: bool = True

    def reach(self, tokens: Sequence[int], most: int) -> int:
        """Number of the first tokens of a prompt that the cache can keep; fewer than all.

        Args:
            tokens: The prompt.
            most: Longest prompt that may be computed in parts.
        """
        if self.cache is None:
            return 0
        common = 0
        for ours, theirs in zip(self.tokens, tokens[:-1], strict=False):
            if ours != theirs:
                break
            common += 1
        cuts = can_cut(self.cache)
        if common > self.prompt and cuts:
            return common
        if len(tokens) > most:
            return 0
        if common > self.prompt and common == len(self.tokens):
            return common
        places = self.marks if cuts else sorted(self.copies)
        usable = [
            mark for mark in places if mark <= common and (mark <= self.fresh or common > self.answered)
        ]
        return max(usable, default=0)

    def go_back(self, position: int) -> None:
        """Forget the tokens from ``position``, a result of :meth:`reach`, on."""
        if position < len(self.tokens):
            if can_cut(self.cache):
                keep_first(self.cache, position)
            else:
                self.copies[position].restore(self.cache, position)
            if self.mtp is not None:
                keep_first(self.mtp, max(0, position - 1))  # an entry depends on the token behind it
        self.tokens = self.tokens[:position]
        self.fresh = min(self.fresh, position)
        if position <= self.answered:
            self.answered = _NEVER
        self.marks = [mark for mark in self.marks if mark <= position]
        self.copies = {mark: copy for mark, copy in self.copies.items() if mark <= position}

    def copy_to(self, other: CachedTokens, position: int) -> None:
        """Give another the tokens before ``position``, a result of :meth:`reach`, in memory of its own."""
        if other.capacity:
            other.cache = copy_cache(self.cache, position, other.capacity)
        else:
            other.cache = deepcopy(self.cache)
        other.tokens, other.prompt, other.answered = self.tokens, self.prompt, self.answered
        other.fresh, other.marks, other.copies = self.fresh, self.marks, self.copies
        other.go_back(position)

    def begin(self, ends: Iterable[int], copies: int) -> None:
        """Choose where states are copied in the next prompt.

        Args:
            ends: Ends of its whole parts.
            copies: Most copies that are kept.
        """
        start, self._ends = len(self.tokens), set(ends)
        self._afresh = start <= self.fresh
        if start and start not in self.marks:
            self.marks.append(start)
        self._wanted = set()
        if copies and self.cache is not None and can_copy(self.cache):
            now = {start} if start else set()
            self._wanted = set(thinned(sorted({*self.copies, *now, *self._ends}), copies))
            self.copies = {mark: copy for mark, copy in self.copies.items() if mark in self._wanted}
            if start in self._wanted and start not in self.copies:
                self.copies[start] = CacheCopy.of(self.cache)

    def layer_reached(self, number: int, position: int) -> None:
        """Called in a wave when a layer of the cache holds the tokens before ``position``, and no more."""
        if position in self._wanted:
            copy = self.copies.setdefault(position, CacheCopy())
            if len(copy.layers) == number:
                copy.layers.append(copy_layer(self.cache.layers[number]))

    def reached(self, position: int) -> None:
        """Called when all layers hold the tokens before ``position``."""
        if position not in self._ends:
            return
        if position in self._wanted and position not in self.copies:
            self.copies[position] = CacheCopy.of(self.cache)
        self.marks.append(position)
        if self._afresh:
            self.fresh = position

    def forget_unfinished(self) -> None:
        """Drop copies of an interrupted wave."""
        count = len(self.cache.layers) if self.copies else 0
        self.copies = {mark: copy for mark, copy in self.copies.items() if len(copy.layers) == count}


class PromptCache:
    """Keys, values and states of prompts and answers: of the last one, or of several conversations.

    If there are too many, the cache with the least credit is evicted, by GreedyDual (Young, 1994): the credit
    of a cache is that of the one evicted last, plus a point for each token that would have to be computed
    again. So short requests do not evict a long conversation, and an abandoned long one is evicted in time.
    The one that is kept now stays.

    Args:
        most: Most attention caches at a time, those that are taken out included.
        room: Memory of the caches, which limits them in place of their number; ``None``: all are of one
            length.
        lend: Called with the bytes of that memory that no cache reserves, before one reserves more and after
            one reserves less.
    """

    # Invariants: a cache in _held has no other owner. Those of _held and _taken are at most `most`, or take
    # at most room.total, unless those in _taken, or they and the one that was kept last, are more alone. The
    # last one of _held was used last.
    def __init__(
        self, most: int = 1, room: CacheRoom | None = None, lend: Callable[[int], None] = lambda _: None
    ) -> None:
        self._most = most
        self._room = room
        self._lend = lend
        self._held: list[CachedTokens] = []
        self._taken: list[CachedTokens] = []
        self._spent = 0  # credit of the last one that made room

    @property
    def empty(self) -> bool:
        """Nothing is kept."""
        return not self._held

    @property
    def tokens(self) -> int:
        """Tokens of all caches that are kept."""
        return sum(len(held.tokens) for held in self._held)

    def __len__(self) -> int:
        return len(self._held)

    @property
    def latest(self) -> CachedTokens | None:
        """The cache that was used last, which stays here; ``None``: none is kept."""
        return self._held[-1] if self._held else None

    def add(self, held: CachedTokens) -> None:
        """Keep a cache as the one that was used last."""
        held.credit = self._spent + len(held.tokens)
        self._held.append(held)
        self._make_room(held)

    def take(self, tokens: list[int], most: int) -> CachedTokens:
        """Take out the cache with the most of the first tokens of a prompt that can be kept, or a new one.

        The beginning of a cache of another conversation is copied: the cache stays for that conversation
        where both fit.

        Args:
            tokens: The prompt.
            most: Longest prompt that may be computed in parts.
        """
        best = max(self._held, key=lambda held: held.reach(tokens, most), default=None)
        reused = 0 if best is None else best.reach(tokens, most)
        capacity = 0 if self._room is None else self._room.capacity(len(tokens))
        if best is None or not reused:
            return self._take_out(CachedTokens(capacity=capacity))
        if 2 * reused < len(best.tokens):
            copied = self._copy(best, reused, capacity)
            if copied is not None:
                return copied
        self._held = [other for other in self._held if other is not best]
        best.go_back(reused)
        return self._take_out(best)

    def _copy(self, best: CachedTokens, reused: int, capacity: int) -> CachedTokens | None:
        """Take out a copy of the beginning of a cache; the cache stays if both fit.

        Returns:
            The copy; ``None``: there is no room for it, even for a time.
        """
        copied = CachedTokens(capacity=capacity)
        # Room first: a copy that is made before another cache is freed takes more than all may have.
        self._taken.append(copied)
        if not self._may_stay(best):
            self.give_up(copied)
            return None
        fits = self._room is None or self._used([best, *self._taken]) <= self._room.total
        self._make_room(best)
        try:
            best.copy_to(copied, reused)
        except BaseException:
            self.give_up(copied)
            raise
        self._held = [other for other in self._held if other is not best]
        if fits:
            self.add(best)
        return copied

    def grow(self, held: CachedTokens, tokens: int) -> bool:
        """Make room where a cache that is taken out needs more than it has reserved.

        Args:
            held: The cache.
            tokens: Tokens that it will hold.

        Returns:
            Whether ``held.capacity`` is larger now.
        """
        if self._room is None or tokens <= held.capacity:
            return False
        held.capacity = self._room.capacity(tokens)
        self._make_room()
        return True

    def keep(self, held: CachedTokens, tokens: list[int], prompt: int, *, copied: bool) -> None:
        """Store a cache that holds ``tokens``, of which the first ``prompt`` were the prompt.

        Layers that hold more are cut, or the cache goes back to its last copy. It is dropped if that is not
        possible, or if it holds no token of an answer and no end of a part.

        Args:
            held: The cache, with its marks.
            tokens: Tokens that were computed.
            prompt: Tokens of the prompt.
            copied: The cache may be continued though it cannot be cut.
        """
        self.give_up(held)
        held.forget_unfinished()
        if can_cut(held.cache):
            if not held.cache.layers or any(
                layer.get_seq_length() < len(tokens) for layer in held.cache.layers
            ):
                return
            keep_first(held.cache, len(tokens))
        elif not copied or not can_copy(held.cache):
            return
        elif not held.whole:
            place = max((mark for mark in held.copies if mark <= len(tokens)), default=0)
            if not place:
                return
            held.copies[place].restore(held.cache, place)
            tokens = tokens[:place]
        if held.mtp is not None:
            keep_first(held.mtp, max(0, len(tokens) - 1))
        held.tokens, held.prompt, held.whole = tokens, prompt, True
        if len(tokens) > prompt:
            held.answered = min(held.answered, prompt)
        if len(tokens) > prompt or held.marks:
            self.add(held)

    def give_up(self, held: CachedTokens) -> None:
        """A cache that was taken out is gone."""
        self._taken = [other for other in self._taken if other is not held]

    def drop(self) -> None:
        """Discard all stored caches."""
        self._held = []

    def _take_out(self, held: CachedTokens) -> CachedTokens:
        self._taken.append(held)
        self._make_room()
        return held

    def _may_stay(self, held: CachedTokens) -> bool:
        """Whether a cache can stay beside those that are taken out, at least with no more memory than its
        tokens take.
        """
        if self._room is None:
            return len(self._taken) + 1 <= self._most
        return self._used(self._taken) + self._room.nbytes(len(held.tokens)) <= self._room.total

    def _used(self, caches: Iterable[CachedTokens]) -> int:
        assert self._room is not None
        return sum(self._room.nbytes(held.capacity) for held in caches)

    def _make_room(self, stays: CachedTokens | None = None) -> None:
        """Drop caches until the others fit; not ``stays``."""
        while self._too_many:
            others = [held for held in self._held if held is not stays]
            if not others:
                break
            gone = min(others, key=lambda held: held.credit)
            self._held = [held for held in self._held if held is not gone]
            self._spent = gone.credit
        if self._room is not None:
            self._lend(self._room.total - self._used([*self._held, *self._taken]))

    @property
    def _too_many(self) -> bool:
        if self._room is None:
            return len(self._held) + len(self._taken) > self._most
        most = max(_MOST_HELD, self._room.conversations)
        return len(self._held) > most or self._used([*self._held, *self._taken]) > self._room.total


def thinned(places: list[int], most: int) -> list[int]:
    """At most so many of some ascending places: the last one, and others the farther apart the earlier."""
    kept = list(places)
    while len(kept) > most:
        end = kept[-1]

        def loss(i: int, end: int = end) -> float:
            # An edit between this place and the next goes back to the one before; late edits are likelier.
            before = kept[i - 1] if i else 0
            return (kept[i + 1] - kept[i]) * (kept[i] - before) / (end - kept[i]) ** 2

        del kept[min(range(len(kept) - 1), key=loss)]
    return kept
