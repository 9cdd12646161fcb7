"""One figure or table of each paper: theirs, ours, the ratio."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from made_routing import MadeRouting
from papers_player import Setting, table
from papers_theta import MIXTRAL_ROUTING, QWEN_HEAD_SHARE, QWEN_ROUTING, QWEN_TOKEN, qwen_costs

from moechat.configurator.costs import Costs
from moechat.configurator.estimate import costs_of
from moechat.hardware.profile_file import read_profile
from moechat.routing.counter import statistics_of_trace
from moechat.routing.trace import Trace
from moechat.simulate.simulated_model import model_for

# Popularity and repetition like OLMoE's (scripts/bench/choice).
OLMOE_ROUTING = MadeRouting(16, 64, 8, 0.7, 0.35)
TOKENS, WARMUP = 300, 700
_SECONDS = 1e3  # milliseconds


@dataclass(frozen=True)
class Inputs:
    """What tables are made from.

    Attributes:
        traces: Recorded routing by the name of the model.
        testbeds: Directory of the papers' machines.
        quick: Fewer tokens.
    """

    traces: Mapping[str, Trace]
    testbeds: Path
    quick: bool

    @property
    def timed(self) -> int:
        """Timed tokens."""
        return TOKENS // 3 if self.quick else TOKENS

    def made(self, routing: MadeRouting) -> Trace:
        """Made routing of the usual length."""
        return routing.trace(WARMUP // (2 if self.quick else 1) + self.timed)

    def on(self, testbed: str, model: str, trace: Trace, bits: int, accuracy: float) -> Setting:
        """A model on the machine of a paper."""
        profile = read_profile(self.testbeds / f"{testbed}.toml")
        placed = model_for(model, trace, bits).on("gpu")
        return Setting(placed, trace, costs_of(profile, placed.shape, near="gpu"), accuracy, self.timed)


def _rows(
    setting: Setting,
    share: float,
    theirs: Mapping[str, float | None],
    *,
    relative: bool = False,
    value: str = "tpot",
) -> list[list[str]]:
    """Rows of systems: theirs, ours, ours by theirs.

    Args:
        setting: Of the paper.
        share: Share of the experts in the near tier.
        theirs: By system; ``None``: the paper has no such figure.
        relative: Both as shares of the first system's.
        value: ``tpot`` and ``stall`` in milliseconds, or ``hits`` in percent.
    """
    rows: list[list[str]] = []
    unit = None
    for system, published in theirs.items():
        left = [system, "" if published is None else f"{published:.4g}"]
        if setting.absent(system):
            rows.append([*left, "absent", ""])
            continue
        run = setting.run(system, share)
        if value == "hits":
            ours = 100 * (run.hits["full"] + run.hits["prefetch"])
        else:
            ours = _SECONDS * (run.tpot if value == "tpot" else float(run.stall.mean()))
        unit = unit or ours
        shown = ours / unit if relative else ours
        rows.append([*left, f"{shown:.3g}", f"{shown / published:.2f}" if published else ""])
    return rows


def moepic(inputs: Inputs) -> None:
    """Hit rates of table 1, and times of a token from section 4.2 and table 3."""
    published = {
        "lfu": (24.36, 43.74, 60.68, 75.84, 89.34),
        "lru": (19.11, 38.88, 56.38, 73.16, 88.97),
        "lcp": (25.56, 45.36, 62.21, 77.12, 90.08),
    }
    sizes = (10, 20, 30, 40, 50)
    trace = QWEN_ROUTING.trace(2000 if inputs.quick else 5000)
    rows = []
    for policy, theirs in published.items():
        ours = 100 * statistics_of_trace(trace, policy).hit_rate[:, sizes].mean(axis=0)
        rows.append([policy, *(f"{a:.0f} / {b:.0f}" for a, b in zip(theirs, ours, strict=True))])
    table(
        "MoEpic, table 1: % of hits by experts cached, Qwen1.5-MoE on MMLU; theirs / ours",
        ["policy", *map(str, sizes)],
        rows,
        f"Routing: {QWEN_ROUTING}; its two parameters are fitted to these 15 figures. So this says that "
        "our policies rank as theirs, not that our routing is right. Ours has no drift between texts, "
        "which LCP and LRU use and LFU does not.",
    )
    # Not stated: the times of Mixtral. A layer is taken to need as long as one of Qwen1.5-MoE, and the load
    # is what makes Pre-gated MoE, which caches nothing, as slow as published.
    trace = inputs.made(MIXTRAL_ROUTING)
    layer = qwen_costs(0.6)
    costs = replace(layer, head=QWEN_HEAD_SHARE * QWEN_TOKEN)
    setting = Setting(model_for("mixtral-8x7b", trace, 2), trace, costs, 0.88, inputs.timed)
    setting = _fitted(setting, "pregated", 0.248)
    budget = 160 / 256
    theirs: dict[str, float | None] = {
        "pregated": 248,
        "mixtral-offloading": 162,
        "adapmoe": 144,
        "moe-infinity": 136,
        "moepic": 85,
        "moepic:allocation=uniform,split=1": None,
        "auto:miss=fetch": None,
    }
    table(
        "MoEpic, section 4.2: ms a token, Mixtral in 2 bits, room for 160 of 256 experts",
        ["system", "theirs", "ours", "ratio"],
        _rows(setting, budget, theirs),
        f"Our load of an expert, fitted to the first row: {1e3 * setting.costs.load:.2f} ms. Theirs load "
        "whole experts in order; in ours a demand overtakes prefetches and all systems share one fast "
        "bookkeeping, so the baselines are better and the gap is smaller.",
    )
    ablation: dict[str, float | None] = {"moepic": 132, "moepic:allocation=uniform,split=0.5": 193}
    table(
        "MoEpic, table 3: ms a token, room for 96 of 256 experts; without the configurator (uniform, θ = "
        "0.5)",
        ["system", "theirs", "ours", "ratio"],
        _rows(setting, 96 / 256, ablation),
        "Theirs takes 46 % longer without it, ours is faster. In the cells of `papers theta` its plan "
        "takes up to 15 % more than θ = 1 in every layer, and up to 2 % less.",
    )


def _fitted(setting: Setting, system: str, seconds: float) -> Setting:
    """The setting with the load with which a system takes these seconds a token."""
    load = setting.costs.load
    for _ in range(8):
        setting = replace(setting, costs=replace(setting.costs, load=load), _shared=setting._shared)
        now = setting.run(system, 0.5).tpot
        if abs(now / seconds - 1) < 0.005:
            break
        # Beyond the window, a token takes longer in proportion to the load.
        load *= seconds / now if now < seconds else (seconds / now) ** 0.8
    return setting


def moe_infinity(inputs: Inputs) -> None:
    """Hit rates of table 5, Mixtral, and its times of a token."""
    trace = inputs.made(MIXTRAL_ROUTING)
    setting = inputs.on("a5000-moe-infinity", "mixtral-8x7b", trace, 16, 0.88)
    share = 39 / 256
    hits: dict[str, float | None] = {
        "on-demand": 2,
        "brainstorm": 5,
        "moe-infinity": 17,
        "on-demand:policy=belady": 21,
    }
    table(
        "MoE-Infinity, table 5: % of hits, Mixtral, 39 slots for 256 experts (LRU, model tracing, ours, "
        "ideal)",
        ["system", "theirs", "ours", "ratio"],
        _rows(setting, share, hits, value="hits"),
        "Their LRU is one list for all layers, shorter than the 64 experts of a token, so nothing stays "
        "until it is used again. Ours divides the slots among the layers.",
    )
    times: dict[str, float | None] = {"deepspeed": 6000, "on-demand": None, "moe-infinity": 336}
    table(
        "MoE-Infinity, sections 2 and 7.4: ms a token, Mixtral in 16 bits, one A5000",
        ["system", "theirs", "ours", "ratio"],
        _rows(setting, share, times),
        f"An expert takes {1e3 * setting.costs.load:.1f} ms here (theirs: 10), so 336 ms load 31 of a "
        "token's 64 experts, while 17 % of hits leave 53: their figure is of another state than table 5. "
        "Whole layers at the rate of the link are 2.8 s, their 6 s are slower copies; in ours the "
        "experts that the router names overtake the rest of the layer.",
    )


def finemoe(inputs: Inputs) -> None:
    """Times of a token with a cache of 6 GB, section 6.4."""
    trace = inputs.made(MIXTRAL_ROUTING)
    setting = inputs.on("rtx3090-finemoe", "mixtral-8x7b", trace, 16, 0.88)
    share = 6e9 / setting.model.shape.all_expert_bytes
    theirs: dict[str, float | None] = {
        "deepspeed": 1.0,
        "mixtral-offloading": 0.64 / 0.75,
        "moe-infinity": 0.64 / 0.71,
        "finemoe": 0.64,
        "on-demand": None,
    }
    table(
        "FineMoE, section 6.4: time of a token by that of DeepSpeed, cache of 6 GB; Mixtral in 16 bits",
        ["system", "theirs", "ours", "ratio"],
        _rows(setting, share, theirs, relative=True),
        "Theirs are means of three models on six GPUs, which load at once and together hold more. On one "
        "link an expert takes 11 ms and a layer computes for 1 ms, so that no prefetching can hide much, "
        "and our `deepspeed` is near the others: the experts that the router names overtake the rest of "
        "the layer. `on-demand` is what the paper measured as DeepSpeed.",
    )


def expertflow(inputs: Inputs) -> None:
    """Waiting on the A6000, tables 3 and 5."""
    trace = inputs.traces.get("deepseek-v2-lite")
    trace = (
        inputs.made(MadeRouting(26, 64, 6, 0.8, 0.28)) if trace is None else trace.head(WARMUP + inputs.timed)
    )
    setting = inputs.on("a6000-moepic", "deepseek-v2-lite", trace, 16, 0.63)
    # The paper states 64 GB/s for this GPU.
    costs = replace(setting.costs, load=setting.costs.load / 2, load_together=None)
    setting = replace(setting, costs=costs)
    shape = setting.model.shape
    room = 20e9 - shape.dense_bytes - shape.head_bytes
    share = min(1.0, room / shape.all_expert_bytes)
    theirs: dict[str, float | None] = {
        "on-demand": 1.0,
        "mixtral-offloading": None,
        "expertflow": 0.0328 / 1.38,
        "auto:miss=fetch": None,
    }
    waits = _SECONDS * float(setting.run("on-demand", share).stall.mean())
    table(
        "ExpertFlow, tables 3 and 5: waiting by that of the baseline, DeepSeek-V2-Lite, 20 GB "
        f"({share:.0%} of the experts)",
        ["system", "theirs", "ours", "ratio"],
        _rows(setting, share, theirs, relative=True, value="stall"),
        "Their baseline waits for 1.38 s (of what, is not said), by the transformers library, whose "
        f"copies are not at the rate of the link; ours waits {waits:.1f} ms a token. Prefetching one "
        "layer ahead hides a part of that, with the accuracy of their table 2, 0.63.",
    )


def melinoe(inputs: Inputs) -> None:
    """Transfers and rates of the base models, table 3."""
    rows = []
    for name, routing, cached, bits, transfers, rate, resident in (
        ("olmoe-1b-7b", OLMOE_ROUTING, 16, 4, 727, 15.15, 1 / 37.84),
        ("mixtral-8x7b", MIXTRAL_ROUTING, 5, 4, 105, 3.37, None),
    ):
        trace = routing.trace(64)
        model = model_for(name, trace, bits)
        loads = _loads(trace, cached)
        # Times of their program: all experts near (table 1), and what each load adds to reach theirs.
        ours = (
            ""
            if resident is None
            else f"{(1 / rate - resident) / (model.shape.layers * transfers / 2 / 64) * 1e3:.2f}"
        )
        rows.append(
            [name, f"{transfers}", f"{2 * loads:.0f}", f"{2 * loads / transfers:.2f}", f"{rate:.4g}", ours]
        )
    table(
        "MELINOE, table 3, base models: transfers of a layer in 64 tokens (in and out), LFU; their "
        "tokens a second",
        ["model", "theirs", "ours", "ratio", "tokens/s", "ms a load, from theirs"],
        rows,
        f"Routing: {OLMOE_ROUTING} and {MIXTRAL_ROUTING}, from an empty cache. Theirs are counted in both "
        "directions, as 727 are more than 64 tokens times 8 experts. The rows of the tuned models need "
        "tuned routing, which is not published.",
    )
    setting = inputs.on("rtx4090-melinoe", "olmoe-1b-7b", inputs.made(OLMOE_ROUTING), 4, 0.8)
    theirs: dict[str, float | None] = {
        "fiddler": 1000 / 8.5,
        "on-demand:policy=lfu": None,
        "melinoe": 1000 / 16.6,
        "auto": None,
    }
    table(
        "MELINOE, section 4.2: ms a token, OLMoE in 4 bits, 16 of 64 experts a layer, RTX 4090",
        ["system", "theirs", "ours", "ratio"],
        _rows(setting, 0.25, theirs),
        "Their program takes 26 ms a token with all experts on an H100 (table 1), ours a few: kernels "
        "that read quantised experts, and CUDA graphs, in place of PyTorch's modules and HQQ.",
    )


def _loads(trace: Trace, cached: int) -> float:
    """Loads of a layer, mean, with LFU from an empty cache."""
    loads = 0
    for layer in range(trace.layers):
        loads += trace.tokens * trace.top_k - _hits(trace.experts[:, layer], cached, "lfu", 0)
    return loads / trace.layers


def _hits(chosen: np.ndarray, cached: int, policy: str, warmup: int, *, enters: bool = True) -> int:
    """Hits of one layer, counted without any of moechat's code.

    Args:
        chosen: ``[tokens, k]``.
        cached: Experts that are kept, at least k.
        policy: ``lru`` or ``lfu``; ties of counts are broken by recency.
        warmup: Tokens that are not counted.
        enters: What a token chose stays until the next one, as published systems do; ``False``: the lowest of
            all leaves, be it new or not.
    """
    count: Counter[int] = Counter()
    last: dict[int, int] = {}
    held: set[int] = set()
    hits = 0

    def key(expert: int) -> tuple[int, int]:
        return (count[expert] if policy == "lfu" else 0, last[expert])

    for token, experts in enumerate(chosen.tolist()):
        hits += sum(expert in held for expert in experts) if token >= warmup else 0
        count.update(experts)
        last.update(dict.fromkeys(experts, token))
        staying = set(experts) if enters else set()
        others = sorted((held | set(experts)) - staying, key=key, reverse=True)
        held = staying | set(others[: cached - len(staying)])
    return hits


def hits(inputs: Inputs) -> None:
    """Hit rates of LRU and LFU on recorded routing, counted three ways."""
    rows = []
    tokens, warmup = (1500, 300) if inputs.quick else (6000, 1000)
    for name, whole in inputs.traces.items():
        trace = whole.head(tokens)
        cached = trace.num_experts // 4
        model = model_for(name, trace, 4)
        costs = Costs(attention=1e-3, moe=1e-3, head=1e-3, load=1e-3)
        setting = Setting(model, trace, costs, timed=trace.tokens - warmup)
        for policy in ("lru", "lfu"):
            system = f"on-demand:policy={policy}"
            counted = [
                sum(
                    _hits(trace.experts[:, layer], cached, policy, warmup, enters=enters)
                    for layer in range(trace.layers)
                )
                / ((trace.tokens - warmup) * trace.layers * trace.top_k)
                for enters in (True, False)
            ]
            ranked = float(statistics_of_trace(trace, policy).hit_rate[:, cached].mean())
            reserve = trace.top_k / 2 / (trace.num_experts * trace.layers)
            runs = [
                setting.run(f"{system},{admit}", share)
                for admit, share in (
                    ("admit=key", 0.25),
                    ("admit=key", 0.25 + reserve),
                    ("admit=always", 0.25 + reserve),
                )
            ]
            rows.append(
                [
                    f"{name}, {policy}",
                    *(f"{share:.3f}" for share in (*counted, ranked, *(run.hits["full"] for run in runs))),
                ]
            )
    if not rows:
        print("\nHit rates on recorded routing: left out, there are no traces (--traces)")
        return
    table(
        f"Hit rates with a quarter of the experts, {tokens} tokens, {warmup} of them before counting",
        ["trace, policy", "all enter", "by key", "H(C)", "simulator", "and reserve", "all enter"],
        rows,
        "The first two share no code with moechat. `All enter`: what a token chose stays until the next "
        "one, as in published systems (`admit=always`). `By key`: what has the lowest key leaves, be it "
        "new (`admit=key`): the same for LRU, but LFU then never lets in what has been used seldom so "
        "far. H(C): ranks before each access, all tokens, for the configurator. The simulator's pages "
        "also hold what is on its way, half of a token's experts; the last two columns add pages for "
        "them.",
    )
    _policy_hits(inputs, tokens, warmup)


# Hit rates of a simple replay of these traces, sequences shuffled, all experts admitted: gpt-oss-20b and
# DeepSeek-V2-Lite.
_REPLAYED: dict[str, tuple[float, float]] = {
    "policy=lru": (0.647, 0.521),
    "policy=lfu": (0.642, 0.501),
    "policy=request,layer_factor=false": (0.677, 0.543),
    "policy=discount": (0.679, 0.544),
    "policy=lru,allocation=shared,victims=lowest": (0.603, 0.498),
    "policy=lfu,allocation=shared,victims=lowest": (0.531, 0.405),
    "policy=request,layer_factor=false,allocation=shared,victims=lowest": (0.654, 0.495),
    "policy=request,allocation=shared,victims=lowest": (0.560, 0.430),
}


def _policy_hits(inputs: Inputs, tokens: int, warmup: int) -> None:
    """Hit rates of the policies of the sister systems, a pool for each layer or one for all."""
    rows = []
    for number, name in enumerate(("gpt-oss-20b", "deepseek-v2-lite")):
        if name not in inputs.traces:
            continue
        trace = inputs.traces[name].head(tokens)
        costs = Costs(attention=1e-3, moe=1e-3, head=1e-3, load=1e-3)
        setting = Setting(model_for(name, trace, 4), trace, costs, timed=trace.tokens - warmup)
        reserve = trace.top_k / 2 / (trace.num_experts * trace.layers)
        for keys, replayed in _REPLAYED.items():
            ours = setting.run(f"on-demand:{keys},admit=always", 0.25 + reserve).hits["full"]
            shown = keys.replace("policy=", "").replace(",allocation=shared,victims=lowest", ", one pool")
            shown = shown.replace(",layer_factor=false", "") if "layer" in keys else shown
            shown += ", 1 - l/L" if "request" in keys and "layer" not in keys else ""
            rows.append([name, shown, f"{replayed[number]:.3f}", f"{ours:.3f}"])
    table(
        "Hit rates by policy, a quarter of the experts, nothing fetched ahead",
        ["trace", "policy", "simple replay", "simulator"],
        rows,
        "The replay shuffles the sequences and has no pages for what is on its way; here they come in the "
        "order of the trace. In one pool, what is on its way takes pages of all layers.",
    )
