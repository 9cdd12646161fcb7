"""Measures a GPU: starting and waiting, its memory, its kernels.

Every figure is the median of several rounds after a warm-up, with the range of the rounds. Times of kernels
are those of the GPU's events, times that the host waits for those of its clock. What cannot be measured stays
as assumed, with the reason in :attr:`CardRounds.missing`; nothing but Ctrl-C is raised.
"""

from __future__ import annotations

from dataclasses import replace

from moechat.hardware.card import CardFacts
from moechat.hardware.card_rounds import CardRounds
from moechat.hardware.measure_budget import format_size
from moechat.hardware.profile import Figure, GpuFigures

# Nodes of the graphs whose difference gives the time of a node.
SMALL_GRAPH, LARGE_GRAPH = 16, 272
_REPLAYS = 4
# Times the second-level cache: what is read again after so much comes from memory.
_CACHES = 8
_LEAST_BYTES = 256 << 20


def measure_gpu(rounds: CardRounds, before: GpuFigures) -> GpuFigures:
    """Measure a GPU by itself.

    Args:
        rounds: The GPU and the limits.
        before: The figures as assumed.
    """
    with rounds.part("gpu kernels"):
        facts = rounds.card.facts()
        return _measured(rounds, facts, before)
    return before


def _measured(rounds: CardRounds, facts: CardFacts, before: GpuFigures) -> GpuFigures:
    context = facts.context_bytes
    found = replace(
        before,
        capability=facts.capability or before.capability,
        sms=facts.sms or before.sms,
        l2_bytes=facts.l2_bytes or before.l2_bytes,
        context=None if context is None else Figure(context, "measured", "with torch's libraries"),
    )
    found = _memory(rounds, _starting(rounds, found), facts)
    return _experts(rounds, _dense(rounds, found))


def _starting(rounds: CardRounds, found: GpuFigures) -> GpuFigures:
    card = rounds.card
    rounds.report("GPU: starting kernels")
    with rounds.part("gpu starting kernels"):
        small = card.small()
        launch = rounds.repeated("kernels started one by one", lambda: rounds.started(small, wait=True))

        def woken() -> None:
            small.run()
            card.wait()

        sync = rounds.repeated(
            "from an event behind a kernel to the host", lambda: rounds.waited(woken) - launch.value
        )
        fetch = rounds.repeated("a few numbers to the host", lambda: rounds.waited(card.fetch))
        found = replace(found, launch=launch, sync=sync, round_trip=fetch)
    with rounds.part("gpu starting experts"):
        call = card.call()
        rounds.warm(call)
        how = "kernels of a layer's experts for one token, until the host goes on"
        found = replace(found, call=rounds.repeated(how, lambda: rounds.started(call, wait=False)))
    card.release()
    with rounds.part("gpu graphs"):
        few, many = card.graph(SMALL_GRAPH), card.graph(LARGE_GRAPH)
        node = rounds.repeated(
            "replays of graphs of small kernels",
            lambda: rounds.per_call(many, _REPLAYS) - rounds.per_call(few, _REPLAYS),
            1 / (LARGE_GRAPH - SMALL_GRAPH),
        )
        how = f"replay of {SMALL_GRAPH} small kernels, until the host goes on"
        start = rounds.repeated(how, lambda: rounds.started(few, wait=False))
        found = replace(found, graph_node=node, graph_launch=start)
    card.release()
    return found


def _memory(rounds: CardRounds, found: GpuFigures, facts: CardFacts) -> GpuFigures:
    nbytes = min(rounds.budget.gpu_bytes, facts.free_bytes // 4)
    least = min(rounds.budget.gpu_bytes, max(_LEAST_BYTES, _CACHES * (facts.l2_bytes or 0)))
    rounds.report("GPU: reading and copying its memory")
    with rounds.part("gpu memory"):
        if nbytes < least:
            raise ValueError(
                f"{format_size(nbytes)} of its memory may be used for that; it takes {format_size(least)}"
            )
        read = rounds.card.read(nbytes)
        found = replace(found, bandwidth=rounds.rate(read, read.nbytes, f"sum of {format_size(nbytes)}"))
        copy = rounds.card.copy(nbytes // 2)
        how = f"copy of {format_size(nbytes // 2)}, bytes read and written"
        found = replace(found, copy=rounds.rate(copy, copy.nbytes, how))
    rounds.card.release()
    return found


def _dense(rounds: CardRounds, found: GpuFigures) -> GpuFigures:
    rates: dict[int, Figure] = {}
    flops: dict[int, Figure] = {}
    many = rounds.budget.many_tokens
    for bits in rounds.budget.dense_bits:
        rounds.report(f"GPU: dense weights of {bits} bits")
        with rounds.part("gpu dense weights", f"{bits} bits, 1 token"):
            task = rounds.card.dense(bits, 1)
            rates[bits] = rounds.rate(task, task.nbytes, "one token, weights larger than the caches")
        with rounds.part("gpu dense weights", f"{bits} bits, {many} tokens"):
            task = rounds.card.dense(bits, many)
            flops[bits] = rounds.rate(task, task.operations, f"{many} tokens")
        rounds.card.release()
    whole = flops.get(16, found.flops)
    return replace(found, dense_rate=rates, dense_flops=flops, flops=whole)


def _experts(rounds: CardRounds, found: GpuFigures) -> GpuFigures:
    rates: dict[int, dict[int, Figure]] = {}
    flops: dict[int, dict[int, Figure]] = {}
    many = rounds.budget.many_tokens
    # The most wanted first, since time may be up: a token and a prompt, then what lies between.
    order = sorted(rounds.budget.gpu_tokens, key=lambda count: (1 < count < many, count))
    for bits in sorted(rounds.budget.bits, key=_rank):
        for tokens in order:
            name = f"{tokens} token{'' if tokens == 1 else 's'}"
            rounds.report(f"GPU: experts of {bits} bits, {name}")
            with rounds.part("gpu experts", f"{bits} bits, {name}"):
                task = rounds.card.experts(bits, tokens)
                how = f"{name} for each expert, blocks larger than the caches"
                rate = rounds.rate(task, task.nbytes, how)
                rates.setdefault(bits, {})[tokens] = rate
                flops.setdefault(bits, {})[tokens] = _scaled(rate, task.operations / task.nbytes)
        rounds.card.release()
    return replace(found, expert_rate=_sorted(rates), expert_flops=_sorted(flops))


def _scaled(figure: Figure, factor: float) -> Figure:
    assert figure.low is not None
    assert figure.high is not None
    low, value, high = (factor * end for end in (figure.low, figure.value, figure.high))
    return Figure(value, figure.origin, figure.source, low, high)


def _rank(bits: int) -> tuple[int, int]:
    """Order of encodings by use."""
    order = (4, 8, 3, 6, 16, 2)
    return order.index(bits) if bits in order else len(order), bits


def _sorted(figures: dict[int, dict[int, Figure]]) -> dict[int, dict[int, Figure]]:
    return {bits: dict(sorted(found.items())) for bits, found in sorted(figures.items())}
