"""Settings of a fine-tuning run; the defaults are those of the paper (MELINOE, tables 7 and 8)."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from moechat.validation import require_choice, require_number, require_whole

INITIAL_COUNTS = ("fill", "uniform")
BASE_ROUTERS = ("model", "router")


@dataclass(frozen=True, kw_only=True)
class TuneSettings:
    """How a model is fine-tuned. Everything here changes the result, so a run resumes only with the same.

    The paper leaves some points open. They are settings: ``initial``, ``base_router``, ``tune_gate``,
    ``batch``, ``weight_decay`` and ``clip``.

    Attributes:
        epochs: Passes over the data.
        learning_rate: Peak rate of AdamW; it rises over ``warmup`` and then falls linearly to 0.
        warmup: Share of all steps in which the rate rises.
        weight_decay: Of AdamW.
        clip: Largest norm of the gradient; 0 does not limit it.
        batch: Sequences of a step, over all processes.
        max_tokens: Tokens of a sequence; longer ones are cut.
        cache_weight: λ_cs, weight of the cache simulation loss.
        rank_weight: λ_rm, weight of the rank matching loss.
        gamma: γ, decay of the counts for each token; 1 is LFU, towards 0 it becomes LRU.
        margin: ρ, by which the tuned router has to keep the order of the base router.
        capacity: C, experts that the simulated cache holds in a layer; ``None``: a quarter of them.
        initial: Counts before the first token: ``fill`` starts with none, ``uniform`` with C/E each.
        base_router: Where the base router's probabilities come from: a pass of the base ``model``, or only
            its ``router`` on the tuned model's hidden states, which is faster.
        lora_rank: r, of the adapters on the experts' up and down projections.
        lora_alpha: α; adapters count α/r.
        tune_gate: Adapt the experts' gate projections like up projections. Off, they stay as they are.
        held_out: Share of the data that is only measured.
        seed: Of all random numbers.
        preload: Train the predictor that ranks experts by the prompt.
        preload_hidden: Its hidden neurons.
        preload_rate: Its rate of SGD with momentum 0.9.
        preload_batch: Prompts of a step.
        preload_epochs: Passes over the prompts.
    """

    epochs: int = 3
    learning_rate: float = 1e-5
    warmup: float = 0.03
    weight_decay: float = 0.0
    clip: float = 1.0
    batch: int = 8
    max_tokens: int = 512
    cache_weight: float = 0.5
    rank_weight: float = 0.1
    gamma: float = 0.9
    margin: float = 0.1
    capacity: int | None = None
    initial: str = "fill"
    base_router: str = "model"
    lora_rank: int = 32
    lora_alpha: float = 16.0
    tune_gate: bool = False
    held_out: float = 0.1
    seed: int = 0
    preload: bool = True
    preload_hidden: int = 1024
    preload_rate: float = 2e-4
    preload_batch: int = 16
    preload_epochs: int = 10

    def __post_init__(self) -> None:
        """Check the ranges.

        Raises:
            UsageError: A value is out of range; the message names the option of the command line.
        """
        require_whole("--epochs", self.epochs, 1, 10_000)
        require_number("--learning-rate", self.learning_rate, 0, 1, above=True)
        require_number("--warmup", self.warmup, 0, 1)
        require_number("--weight-decay", self.weight_decay, 0, 10)
        require_number("--clip", self.clip, 0, 1e9)
        require_whole("--batch", self.batch, 1, 1 << 20)
        require_whole("--max-tokens", self.max_tokens, 2, 1 << 20)
        require_number("--cache-weight", self.cache_weight, 0, 1e6)
        require_number("--rank-weight", self.rank_weight, 0, 1e6)
        require_number("--gamma", self.gamma, 0, 1)
        require_number("--margin", self.margin, 0, 2)
        if self.capacity is not None:
            require_whole("--capacity", self.capacity, 1, 1 << 16)
        require_choice("--initial", self.initial, INITIAL_COUNTS)
        require_choice("--base-router", self.base_router, BASE_ROUTERS)
        require_whole("--lora-rank", self.lora_rank, 1, 4096)
        require_number("--lora-alpha", self.lora_alpha, 0, 1e6)
        require_number("--held-out", self.held_out, 0, 0.9)
        require_whole("--seed", self.seed, 0, (1 << 63) - 1)
        require_whole("--preload-hidden", self.preload_hidden, 1, 1 << 16)
        require_number("--preload-rate", self.preload_rate, 0, 100)
        require_whole("--preload-batch", self.preload_batch, 1, 1 << 20)
        require_whole("--preload-epochs", self.preload_epochs, 0, 100_000)

    def capacity_of(self, experts: int) -> int:
        """C for layers with ``experts`` experts: as set, else a quarter, at least 1."""
        return min(self.capacity or max(1, experts // 4), experts)

    def facts(self) -> dict[str, Any]:
        """All values by name, for files and comparisons."""
        return asdict(self)
