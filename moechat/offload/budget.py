"""What a memory budget is spent on. Pure: numbers in, a plan or a refusal out.

A budget is for the whole process. In it are, in this order: the process as it is when the plan is made
(interpreter and libraries), the dense weights, the attention cache for the context, what a pass takes, the
kernels' scratch, a margin, and what is left in pages of one block each for the experts. If all experts fit,
they are mapped instead.

Loading is over before the first page is allocated, so what it takes besides the dense weights need not be
left beside the pages: it must fit the budget by itself.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from moechat.errors import DoesNotFitError

MEBI = 1 << 20
# Library code that comes into use with the first passes: about 16 MiB were measured. And for each thread
# its stack, its heap and the buffers of the compute libraries.
_FIRST_USE_BYTES = 24 * MEBI
_THREAD_BYTES = 4 * MEBI
# Of dense weights, attention cache and pages: page tables, the heap's gaps, bookkeeping of the cache.
_MARGIN_SHARE = 0.015
# The context is as long as the model allows while it takes at most this share of what the fixed parts leave.
_CONTEXT_SHARE = 0.25
_LEAST_CONTEXT = 4096
_CONTEXT_STEP = 256
_LEAST_RESERVE = 512 * MEBI
_RESERVE_SHARE = 0.1


@dataclass(frozen=True)
class Words:
    """How a budget is spoken of.

    Attributes:
        flag: How it is given.
        given: The budget, where the user gave it.
        found: The same, where it was found.
    """

    flag: str = "--ram (ram=)"
    given: str = "the memory budget"
    found: str = "the memory that is available"


@dataclass(frozen=True)
class Needs:
    """What a model takes, in bytes.

    Attributes:
        base: The process when the plan is made.
        dense: Dense weights that are not loaded yet, in the type they are computed in.
        loading: What loading the dense weights takes besides them, at most and for a time.
        kv: Attention cache for a number of tokens.
        workspace: What the largest pass takes in a context of so many tokens.
        scratch: Of the native kernels.
        page_bytes: A block with its padding.
        blocks: Of all experts.
        min_pages: Fewest pages that work.
        own_context: Tokens that the model was made for.
        threads: That compute.
    """

    base: int
    dense: int
    loading: int
    kv: Callable[[int], int]
    workspace: Callable[[int], int]
    scratch: int
    page_bytes: int
    blocks: int
    min_pages: int
    own_context: int
    threads: int


@dataclass(frozen=True)
class MemoryPlan:
    """How a budget is spent; all in bytes but ``pages`` and ``context``.

    Attributes:
        budget: For the whole process.
        given: The user gave the budget; else it is what was available.
        base: See :class:`Needs`, as the next four.
        dense: Dense weights.
        kv: Attention cache for the whole context.
        workspace: Of the largest pass.
        scratch: Of the native kernels.
        margin: For what is not counted one by one.
        page_bytes: A page.
        pages: Of the near tier; 0 if the experts are mapped.
        mapped: All experts fit and are mapped from the store.
        expert_bytes: Pages, or all experts if they are mapped.
        context: Tokens of prompt and answer together.
        context_limited: Memory made the context shorter than the model allows.
    """

    budget: int
    given: bool
    base: int
    dense: int
    kv: int
    workspace: int
    scratch: int
    margin: int
    page_bytes: int
    pages: int
    mapped: bool
    expert_bytes: int
    context: int
    context_limited: bool

    @property
    def total(self) -> int:
        """All parts together: at most the budget."""
        fixed = self.base + self.dense + self.kv + self.workspace + self.scratch + self.margin
        return fixed + self.expert_bytes


def automatic_budget(available: int, base: int) -> int:
    """Budget for the whole process where none was given: what is available, less a tenth or 512 MiB.

    Args:
        available: Bytes that the process could still take.
        base: Bytes that it has.
    """
    reserve = max(int(available * _RESERVE_SHARE), min(_LEAST_RESERVE, available // 2))
    return base + available - reserve


def plan_memory(
    needs: Needs,
    budget: int,
    *,
    given: bool = True,
    ctx: int | None = None,
    pages: int | None = None,
    words: Words | None = None,
) -> MemoryPlan:
    """Divide a budget.

    Without a wanted context, it is the model's own if all experts fit beside it, or if it takes at most a
    quarter of what the fixed parts leave; else the largest multiple of 256 that does; at least 4096, or the
    model's own if that is shorter.

    Args:
        needs: What the model takes.
        budget: Bytes for the whole process.
        given: Whether the user gave it.
        ctx: Tokens wanted, or ``None``.
        pages: Pages wanted in place of what is left; 0 maps the experts. Then nothing is refused.
        words: For the message of a refusal; ``None``: of a process's memory.

    Raises:
        DoesNotFitError: The budget is too small; the message has every part and the least budget that works.
    """
    plan = _divide(needs, budget, given, ctx, pages)
    if plan is not None:
        return plan
    least = least_budget(needs, ctx)
    context = _least_context(needs, ctx)
    parts = {**_fixed(needs, context), "experts": needs.min_pages * needs.page_bytes}
    when = f"for {context} tokens of context"
    loading = _while_loading(needs)
    loading_is_most = sum(loading.values()) > sum(parts.values())
    if loading_is_most:
        parts, when = loading, "while the weights are loaded"
    listed = ", ".join(f"{name} {-(-size // MEBI)}" for name, size in parts.items())
    words = Words() if words is None else words
    given_as = words.given if given else words.found
    hints = [f"give at least {least // MEBI}M with {words.flag}"]
    if not given:
        hints = [f"end other programs, or insist on {least // MEBI}M with {words.flag},"]
    if context > _CONTEXT_STEP and not loading_is_most:
        hints.append(f"or a context shorter than {context} tokens with --ctx (ctx=)")
    raise DoesNotFitError(
        f"{given_as} is {budget // MEBI} MiB; the least that works is {least // MEBI} MiB: "
        f"{listed} (all in MiB, {when})",
        hint=" ".join(hints),
        least_bytes=least,
    )


def least_budget(needs: Needs, ctx: int | None = None) -> int:
    """The smallest budget that works, rounded up: to 16 MiB, above 4 GiB to 64 MiB, above 32 GiB to 256
    MiB.
    """
    budget = sum(_fixed(needs, _least_context(needs, ctx)).values()) + needs.min_pages * needs.page_bytes
    budget = max(budget, sum(_while_loading(needs).values()))
    while True:
        step = MEBI * (16 if budget <= 4096 * MEBI else 64 if budget <= 32768 * MEBI else 256)
        budget = -(-budget // step) * step
        if _divide(needs, budget, True, ctx, None) is not None:
            return budget
        budget += step


def _divide(needs: Needs, budget: int, given: bool, ctx: int | None, pages: int | None) -> MemoryPlan | None:
    everything = needs.blocks * needs.page_bytes
    context, mapped = _choose(needs, budget, ctx)
    fixed = _fixed(needs, context)
    room = budget - sum(fixed.values())
    if pages is None:
        if sum(_while_loading(needs).values()) > budget:
            return None
        if mapped:
            count = 0
        else:
            # The share of the margin that grows with the pages.
            count = min(needs.blocks, int(room / (1 + _MARGIN_SHARE)) // needs.page_bytes)
            if count < needs.min_pages:
                return None
    else:
        mapped, count = pages == 0, pages
    experts = everything if mapped else count * needs.page_bytes
    return MemoryPlan(
        budget=budget,
        given=given,
        base=needs.base,
        dense=needs.dense,
        kv=fixed["attention cache"],
        workspace=fixed["workspace"],
        scratch=needs.scratch,
        margin=fixed["margin"] + int(_MARGIN_SHARE * experts),
        page_bytes=needs.page_bytes,
        pages=count,
        mapped=mapped,
        expert_bytes=experts,
        context=context,
        context_limited=ctx is None and context < needs.own_context,
    )


def _fixed(needs: Needs, context: int) -> dict[str, int]:
    """Everything but the experts, by name, for a context."""
    kv = needs.kv(context)
    return {
        "process": needs.base,
        "dense weights": needs.dense,
        "attention cache": kv,
        "workspace": needs.workspace(context),
        "scratch": needs.scratch,
        "margin": _margin(needs, needs.dense + kv),
    }


def _while_loading(needs: Needs) -> dict[str, int]:
    """Everything that is there while the dense weights are loaded, by name."""
    return {
        "process": needs.base,
        "dense weights": needs.dense,
        "loading": needs.loading,
        "margin": _margin(needs, needs.dense),
    }


def _margin(needs: Needs, held: int) -> int:
    return _FIRST_USE_BYTES + needs.threads * _THREAD_BYTES + int(_MARGIN_SHARE * held)


def _least_context(needs: Needs, ctx: int | None) -> int:
    return min(needs.own_context, _LEAST_CONTEXT) if ctx is None else ctx


def _choose(needs: Needs, budget: int, ctx: int | None) -> tuple[int, bool]:
    """The context, and whether all experts fit beside it."""
    everything = int(needs.blocks * needs.page_bytes * (1 + _MARGIN_SHARE))
    least = _least_context(needs, ctx)
    smallest = sum(_fixed(needs, least).values())
    mapped = smallest + everything <= budget
    if ctx is not None:
        return ctx, mapped
    # What a context may take: all that the mapped experts leave, or a quarter of what everything else leaves.
    empty = sum(_fixed(needs, 0).values())
    limit = budget - everything if mapped else empty + int(_CONTEXT_SHARE * (budget - empty))

    def fits(context: int) -> bool:
        return sum(_fixed(needs, context).values()) <= limit

    if fits(needs.own_context):
        return needs.own_context, mapped
    low, high = 0, needs.own_context // _CONTEXT_STEP  # in steps; low may fit, high does not
    while low < high - 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle * _CONTEXT_STEP) else (low, middle)
    if fits(high * _CONTEXT_STEP):
        low = high
    return max(low * _CONTEXT_STEP, least), mapped
