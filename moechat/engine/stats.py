"""Statistics of an answer, from the counters of experts and link."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from moechat.geometry import PLAIN_KV_BITS
from moechat.offload.experts import ExpertCounters
from moechat.offload.tier import ExpertTier
from moechat.offload.upkeep import Replanned
from moechat.tuner import Tuning


@dataclass(frozen=True)
class Stats:
    """Measurements of the last answer (or of the one under way).

    Attributes:
        load_s: Seconds that loading the model took, conversion and verification included.
        prompt_tokens: Tokens of the prompt.
        reused_tokens: Tokens of the prompt that were already in the attention cache from the answer before.
        output_tokens: Tokens drawn so far.
        drafted_tokens: Tokens that were guessed from the text so far, and computed with the one before them.
        accepted_tokens: Those of them that were drawn then: they took no pass of their own.
        ttft_s: Seconds from the call of ``generate`` to the first token; 0 before it.
        tpot_s: Mean seconds for each token after the first; 0 before the second.
        expert_activations: (token, layer, expert) triples computed.
        expert_bytes: Bytes of expert blocks read by the kernels.
        hits_full: Experts that a token of the answer needed and that were wholly resident; in a pass that
            several answers share, the answer's share of the experts of the pass. This field and those up to
            ``link_busy_s`` are 0 where experts are mapped: all are in memory, and none is cached.
        hits_prefetched: Needed experts whose missing blocks a prefetch had moved or was moving.
        hits_top: Needed experts that were resident in part; the rest was fetched on demand.
        misses: Needed experts that were fetched on demand as a whole.
        demand_bytes: Moved by the link after a router had chosen the expert.
        prefetch_bytes: Moved by the link before that.
        preloaded_bytes: Moved by the link between answers: experts that earlier tokens used most. Not part of
            ``prefetch_bytes``.
        shared_bytes: Of blocks that were missing on a GPU and that the CPU computed in place.
        stall_s: Seconds in which the computation waited for the link.
        link_busy_s: Seconds with at least one transfer under way.
        busy_s: Seconds from the call of ``generate`` to the last token drawn.
        pages: Pages of the near tier, one block each; 0 where experts are mapped.
        pages_peak: Most pages in use at a time since the model was loaded.
        page_bytes: Bytes of a page.
        budget_bytes: Memory budget of the whole process.
        peak_rss_bytes: Largest resident set of the process so far, mapped files included.
        dense_weights: Bits of the dense weights by the kind of their layer.
        kv_bits: Bits of a key or value in the attention cache: 16, those of the model's type, or 8.
        kv_bytes: Attention cache of a whole context, with 8 bits also one layer of it unpacked.
        seed: Repeats the draw.
        plan: Method that divided the pages among the layers; empty where experts are mapped.
        tuned: Candidate that the tuner has chosen, now or at an earlier start; empty without one.
        replans: New plans since the model was loaded.
        replan: The last of them; ``None`` before the first.
        tuning: Result of the tuner; ``None`` if it did not run.
    """

    load_s: float = 0.0
    prompt_tokens: int = 0
    reused_tokens: int = 0
    output_tokens: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    ttft_s: float = 0.0
    tpot_s: float = 0.0
    expert_activations: int = 0
    expert_bytes: int = 0
    hits_full: int = 0
    hits_prefetched: int = 0
    hits_top: int = 0
    misses: int = 0
    demand_bytes: int = 0
    prefetch_bytes: int = 0
    preloaded_bytes: int = 0
    shared_bytes: int = 0
    stall_s: float = 0.0
    link_busy_s: float = 0.0
    busy_s: float = 0.0
    pages: int = 0
    pages_peak: int = 0
    page_bytes: int = 0
    budget_bytes: int = 0
    peak_rss_bytes: int = 0
    dense_weights: str = ""
    kv_bits: int = PLAIN_KV_BITS
    kv_bytes: int = 0
    seed: int = 0
    plan: str = ""
    tuned: str = ""
    replans: int = 0
    replan: Replanned | None = None
    tuning: Tuning | None = None

    @property
    def hit_rates(self) -> dict[str, float | None]:
        """Shares of ``full``, ``prefetched``, ``top`` and ``miss``; all 0 before the first access.

        ``None`` where experts are mapped: nothing is cached.
        """
        counts = {
            "full": self.hits_full,
            "prefetched": self.hits_prefetched,
            "top": self.hits_top,
            "miss": self.misses,
        }
        accesses = sum(counts.values()) or 1
        return {name: count / accesses if self.pages else None for name, count in counts.items()}

    @property
    def link_busy_share(self) -> float:
        """Share of the answer's time in which the link was busy."""
        return min(1.0, self.link_busy_s / self.busy_s) if self.busy_s else 0.0

    def to_json(self) -> dict[str, Any]:
        """Plain values; the keys do not depend on how the experts are held, but rates that mean nothing are
        ``None``.
        """
        rates = {f"hit_rate_{name}": rate for name, rate in self.hit_rates.items()}
        nested = {
            "replan": None if self.replan is None else self.replan.to_json(),
            "tuning": None if self.tuning is None else self.tuning.to_json(),
        }
        return {**vars(self), **nested, **rates, "link_busy_share": self.link_busy_share}


class Meter:
    """Turns the running counters of experts and link into those of one answer.

    Counters are read before and after the passes of a step, so that two answers in turns do not count each
    other's work; transfers between two steps count for the next.
    """

    _SAME: Mapping[str, tuple[str, ...]] = {
        "hits_full": ("hits_full",),
        "hits_prefetched": ("hits_prefetch",),
        "hits_top": ("hits_top",),
        "misses": ("hits_miss",),
        "demand_bytes": ("link_bytes_demand",),
        "prefetch_bytes": ("link_bytes_next", "link_bytes_later"),
        "stall_s": ("stall_seconds",),
        "link_busy_s": ("link_busy_seconds",),
    }
    # Counted apart by passes of several tokens. They are hits of answers if the tokens are decoded ones.
    _SHARED: Mapping[str, str] = {
        "hits_full": "prefill_hits_full",
        "hits_prefetched": "prefill_hits_prefetch",
        "hits_top": "prefill_hits_top",
        "misses": "prefill_hits_miss",
    }

    def __init__(self, near: ExpertTier | None, counters: ExpertCounters) -> None:
        self._counters = counters
        self._near = near
        self._pages_peak = 0
        self._before = self._read()

    def close(self) -> None:
        """Drop the near tier, which is about to be closed."""
        self._near = None

    def restart(self) -> None:
        """Attribute all that was computed and moved until now to no answer."""
        self._before = self._read()

    def start(self) -> None:
        """Attribute all that was computed since the last step to other answers."""
        now = self._read()
        for key in ("expert_activations", "expert_bytes"):
            self._before[key] = now[key]

    def add(self, stats: Stats) -> Stats:
        """The statistics, with everything since the last call added."""
        return self._divided(self._gain(), [stats])[0]

    def add_shares(self, answers: Sequence[Stats]) -> list[Stats]:
        """The statistics of several answers, with everything since the last call divided equally among them.

        The sums over the answers are exact. REQUIRES: since then passes had decoded tokens, as many of each
        answer.
        """
        gained = self._gain()
        for key, shared in self._SHARED.items():
            gained[key] = gained.get(key, 0) + gained.get(shared, 0)
        return self._divided(gained, answers)

    def _divided(self, gained: Mapping[str, Any], answers: Sequence[Stats]) -> list[Stats]:
        count = len(answers)
        found = []
        for place, stats in enumerate(answers):
            values = {
                key: getattr(stats, key)
                + (value // count + (place < value % count) if isinstance(value, int) else value / count)
                for key, value in gained.items()
                if key not in self._SHARED.values()
            }
            found.append(replace(stats, pages_peak=self._pages_peak, **values))
        return found

    def _gain(self) -> dict[str, Any]:
        now = self._read()
        # A counter below its last value was reset to 0 in between.
        gained = {
            key: value - self._before[key] if value >= self._before[key] else value
            for key, value in now.items()
        }
        self._before = now
        return gained

    def _read(self) -> dict[str, Any]:
        counts: dict[str, Any] = {
            "expert_activations": self._counters.activations,
            "expert_bytes": self._counters.bytes_read,
        }
        if self._near is not None:
            native = self._near.stats()
            self._pages_peak = int(native["pages_peak"])
            counts["shared_bytes"] = int(native["blocks_far"] * native["page_bytes"])
            counts |= {key: sum(native[name] for name in names) for key, names in self._SAME.items()}
            counts |= {name: native[name] for name in self._SHARED.values()}
            # They move at the priority of prefetches. Their counter runs behind the link's.
            counts["preloaded_bytes"] = int(native["preloaded"] * native["page_bytes"])
            counts["prefetch_bytes"] = max(0, counts["prefetch_bytes"] - counts["preloaded_bytes"])
        return counts
