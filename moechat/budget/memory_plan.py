"""Divides a memory budget. Pure: numbers in, a plan or a refusal out.

On the CPU a budget is for the whole process; on a GPU it is for all of its memory that moechat
takes. It pays, in this order, for the base (interpreter and libraries, or the CUDA context), the dense
weights, the attention cache of the context, the largest pass, the kernels' scratch and a margin; the rest
becomes pages of one expert block each. If all experts fit, they are mapped from the store instead.

The attention cache is counted for a whole context, and most conversations are much shorter. The part that one
of usual length does not use is *lent* to more pages, which give it back when a conversation gets longer.

Without a given budget, a reserve is left for other programs. Three quarters of it hold experts that are
mapped from the store: they stay in the system's page cache until another program needs the memory.

Loading ends before the first page is allocated. So the memory that loading needs besides the dense weights
must fit the budget by itself, and takes nothing from the pages.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

from moechat.errors import DoesNotFitError
from moechat.sizes.cache_shape import PREFILL_CHUNK
from moechat.store.files import format_bytes

MEBI = 1 << 20
Basis = Literal["counted", "measured", "estimate"]
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
# Other programs need about as much on a large machine as on a small one.
_LEAST_RESERVE, _MOST_RESERVE = 512 * MEBI, 1024 * MEBI
_RESERVE_SHARE = 0.1
# Of the reserve, for experts in the page cache.
_SPARE_SHARE = 0.75
# Of free graphics memory, where no budget is given: the desktop's share may grow.
_FREE_SHARE = 0.95
# Most of the memory for experts that a wave of a prompt may take, and its most tokens. Longer waves move
# missing experts less often, but every page that they take keeps no expert while tokens are decoded.
_WAVE_SHARE = 0.06
_MOST_WAVE = 32768


@dataclass(frozen=True)
class Budget:
    """Bytes to divide.

    Attributes:
        nbytes: Of the process, or of a GPU's memory.
        given: The user gave them; else they are those that were available.
        spare: Bytes of RAM beyond them for experts that are mapped from the store: the system takes them back
            as soon as another program needs them.
    """

    nbytes: int
    given: bool = True
    spare: int = 0


@dataclass(frozen=True)
class BudgetLabels:
    """The words for a budget in messages.

    Attributes:
        flag: The option that gives it.
        given: The budget that the user gave.
        found: The budget that was found.
        retry: Hint where no budget was given; ``{least}`` stands for the smallest one that works.
        larger: Hint where the memory has less than that in all.
    """

    flag: str
    given: str
    found: str
    retry: str
    larger: str

    def elsewhere(self) -> BudgetLabels:
        """The same for another machine, which runs no programs that could be ended."""
        return replace(self, retry=f"insist on {{least}} with {self.flag}")


RAM_LABELS = BudgetLabels(
    "--ram (ram=)",
    "the memory budget",
    "the memory that is available",
    "end other programs, or insist on {least} with --ram (ram=)",
    "name a machine with more memory with --gpu (profile=)",
)
VRAM_LABELS = BudgetLabels(
    "--vram (vram=)",
    "the budget of graphics memory",
    "the graphics memory that is free",
    "end other programs, or insist on {least} with --vram (vram=)",
    "name a GPU with more memory with --gpu (profile=)",
)


@dataclass(frozen=True)
class Part:
    """One use of a memory.

    Attributes:
        name: For people, and the key for programs.
        nbytes: Bytes that it takes.
        basis: ``counted`` on the model, ``measured`` on this machine, or ``estimate``.
    """

    name: str
    nbytes: int
    basis: Basis


@dataclass(frozen=True, kw_only=True)
class Needs:
    """The bytes that a model takes; see :func:`moechat.budget.needs.memory_needs`.

    Attributes:
        base: The process, or the CUDA context, when the plan is made.
        base_name: Name of that part.
        basis: Source of that part.
        dense: Dense weights that are not loaded yet, in the type they are computed in.
        loading: Bytes that loading the dense weights takes besides them, at most and for a time.
        kv: Attention cache for a number of tokens.
        workspace: The largest pass in a context of a number of tokens.
        scratch: Scratch of the kernels and libraries.
        page_bytes: A block with its padding.
        blocks: Number of blocks of all experts.
        expert_blocks: Number of blocks of one.
        kv_idle: The part of the attention cache for so many tokens that a conversation of usual length does
            not use, where pages can have it meanwhile.
        spare_pages: Pages beyond one for every block, where all experts fit.
        min_pages: Fewest pages that work.
        own_context: Tokens that the model was made for.
        threads: Threads that compute.
        chunk: Tokens of a chunk of a wave; 0: prompts are not computed in waves.
        wave: Bytes of a wave beyond the workspace, for its tokens and the tokens of the context.
        wave_scratch: Bytes beyond ``scratch`` where the kernels compute so many tokens of a wave in one call.
        operations: Of a token.
        operations_per_byte: Operations that a fast machine computes while a byte of experts is moved.
    """

    base: int
    base_name: str = "process"
    basis: Basis = "measured"
    dense: int
    loading: int
    kv: Callable[[int], int]
    workspace: Callable[[int], int]
    scratch: int
    page_bytes: int
    blocks: int
    expert_blocks: int = 1
    kv_idle: Callable[[int], int] = lambda _tokens: 0
    spare_pages: int = 0
    min_pages: int
    own_context: int
    threads: int
    chunk: int = 0
    wave: Callable[[int, int], int] = lambda _tokens, _context: 0
    wave_scratch: Callable[[int], int] = lambda _tokens: 0
    operations: int = 1
    operations_per_byte: int = 1

    @property
    def all_expert_bytes(self) -> int:
        """Bytes of all experts, where they fit."""
        return (self.blocks + self.spare_pages) * self.page_bytes


@dataclass(frozen=True)
class MemoryPlan:
    """The division of a budget; all in bytes except ``pages`` and ``context``.

    Attributes:
        budget: The budget.
        given: The user gave the budget; else it is the memory that was available.
        base: See :class:`Needs`, as the next two.
        base_name: Name of that part.
        basis: Source of that part.
        dense: Dense weights.
        kv: Attention cache for the whole context.
        workspace: The largest pass, and the wave.
        scratch: Scratch of the kernels and libraries.
        margin: Allowance for everything that is not counted one by one.
        page_bytes: A page.
        pages: Number of pages; 0 if the experts are mapped.
        mapped: All experts fit and are mapped from the store.
        expert_bytes: Pages, or all experts if they are mapped.
        spare: See :class:`Budget`.
        cached_experts: Experts that are in the page cache, beyond the budget; 0 if all are mapped.
        expert_blocks: Blocks of an expert.
        lent_pages: More pages, in the part of the attention cache that a conversation of usual length does
            not use.
        context: Tokens of prompt and answer together.
        context_limited: Memory made the context shorter than the model allows.
        wave: Tokens of a prompt that go through a layer together, so that its missing experts are moved once,
            and each expert computes many tokens;
            0: those of a pass.
        mtp: The head for multi-token prediction, if there is one and memory was left for it.
    """

    budget: int
    given: bool
    base: int
    base_name: str
    basis: Basis
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
    wave: int = 0
    mtp: int = 0
    spare: int = 0
    cached_experts: int = 0
    expert_blocks: int = 1
    lent_pages: int = 0

    @property
    def whole_budget(self) -> Budget:
        """What was divided."""
        return Budget(self.budget, self.given, self.spare)

    @property
    def cached_bytes(self) -> int:
        """Bytes of the experts in the page cache, which are no part of the budget."""
        return self.cached_experts * self.expert_blocks * self.page_bytes

    @property
    def beyond_bytes(self) -> int:
        """Bytes of experts beyond the budget, in what is spare."""
        return max(0, self.total - self.budget) if self.mapped else self.cached_bytes

    @property
    def near_pages(self) -> int:
        """The pages, those that are lent, and as many more as the experts in the page cache would take; 0 if
        all are mapped.
        """
        return self.pages + self.lent_pages + self.cached_experts * self.expert_blocks

    @property
    def lent_bytes(self) -> int:
        """Bytes of the pages that are lent, which are a part of the attention cache."""
        return self.lent_pages * self.page_bytes

    @property
    def parts(self) -> tuple[Part, ...]:
        """All uses of the budget, experts last."""
        head = (Part("multi-token prediction", self.mtp, "counted"),) if self.mtp else ()
        return (
            Part(self.base_name, self.base, self.basis),
            Part("dense weights", self.dense, "counted"),
            Part("attention cache", self.kv, "counted"),
            Part("workspace", self.workspace + self.scratch, "estimate"),
            Part("margin", self.margin, "estimate"),
            *head,
            Part("experts", self.expert_bytes, "counted"),
        )

    @property
    def total(self) -> int:
        """Sum of all parts: at most the budget, with mapped experts at most what is spare more."""
        return sum(part.nbytes for part in self.parts)


def automatic_budget(available: int, base: int) -> Budget:
    """Budget for the whole process where none was given: all that is available, less a reserve.

    The reserve, for other programs, is a tenth, but at least 512 MiB and at most 1 GiB. Three quarters of it
    are spare.

    Args:
        available: Bytes that the process could still take.
        base: Bytes that it has.
    """
    reserve = min(max(int(available * _RESERVE_SHARE), _LEAST_RESERVE), _MOST_RESERVE, available // 2)
    return Budget(base + available - reserve, False, int(reserve * _SPARE_SHARE))


def available_vram(free: int, context: int) -> int:
    """Largest budget on a GPU: the CUDA context, and 95 % of the memory that is free beside it.

    Args:
        free: Bytes that are free beside the CUDA context.
        context: Bytes of the CUDA context.
    """
    return context + int(max(0, free) * _FREE_SHARE)


def gpu_budget(wanted: int | None, free: int, context: int) -> tuple[Budget, str]:
    """Bytes of a GPU's memory that may be spent, and a remark if they are not the wanted ones.

    Args:
        wanted: Bytes that the user gave; ``None``: all that is available.
        free: Bytes that are free beside the CUDA context.
        context: Bytes of the CUDA context.
    """
    most = available_vram(free, context)
    if wanted is None or wanted <= most:
        return (Budget(most, False) if wanted is None else Budget(wanted)), ""
    short = (
        f"{format_bytes(wanted)} of graphics memory were given, but only {format_bytes(most)} are available: "
        f"the CUDA context of {format_bytes(context)} and {100 * _FREE_SHARE:.0f} % of the "
        f"{format_bytes(free)} free beside it; other programs may need the rest"
    )
    return Budget(most, False), short


def plan_memory(
    needs: Needs,
    budget: Budget | int,
    *,
    ctx: int | None = None,
    pages: int | None = None,
    labels: BudgetLabels = RAM_LABELS,
    capacity: int | None = None,
    keeps_experts: bool = True,
) -> MemoryPlan:
    """Divide a budget.

    Without a wanted context, it is the model's own if all experts fit beside it, or if it takes at most a
    quarter of what the fixed parts leave; else the largest multiple of 256 that does; at least 4096, or the
    model's own if that is shorter.

    Args:
        needs: Bytes that the model takes.
        budget: Bytes to divide; a number is a budget that the user gave.
        ctx: Tokens wanted, or ``None``.
        pages: Pages wanted in place of the rest of the budget; 0 maps the experts. Then nothing is refused,
            and nothing is spare or lent.
        labels: Words for the message of a refusal.
        capacity: Bytes that the memory has in all, where that is known.
        keeps_experts: Whether more experts in memory are of use: what is spare and what the attention cache
            does not use serve them.

    Raises:
        DoesNotFitError: The budget is too small; the message has every part and the least budget that works.
    """
    whole = Budget(budget) if isinstance(budget, int) else budget
    if not keeps_experts or pages is not None:
        whole = replace(whole, spare=0)
        needs = replace(needs, kv_idle=lambda _tokens: 0)
    plan = _divide(needs, whole, ctx, pages)
    if plan is None:
        raise _refusal(needs, whole, ctx, labels, capacity)
    return plan


def _refusal(
    needs: Needs, budget: Budget, ctx: int | None, labels: BudgetLabels, capacity: int | None
) -> DoesNotFitError:
    least = least_budget(needs, ctx)
    context = _least_context(needs, ctx)
    parts = {**_fixed(needs, context), "experts": needs.min_pages * needs.page_bytes}
    when = f"for {context} tokens of context"
    loading = _while_loading(needs)
    loading_is_most = sum(loading.values()) > sum(parts.values())
    if loading_is_most:
        parts, when = loading, "while the weights are loaded"
    listed = ", ".join(f"{name} {-(-size // MEBI)}" for name, size in parts.items())
    if capacity is not None and least > capacity:
        hint, link = labels.larger, " or"
    elif budget.given:
        hint, link = f"give at least {least // MEBI}M with {labels.flag}", " or"
    else:
        hint, link = labels.retry.format(least=f"{least // MEBI}M"), ", or"
    if context > _CONTEXT_STEP and not loading_is_most:
        hint += f"{link} a context shorter than {context} tokens with --ctx (ctx=)"
    return DoesNotFitError(
        f"{labels.given if budget.given else labels.found} is {budget.nbytes // MEBI} MiB; "
        f"the least that works is {least // MEBI} MiB: {listed} (all in MiB, {when})",
        hint=hint,
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
        if _divide(needs, Budget(budget), ctx, None) is not None:
            return budget
        budget += step


def _divide(needs: Needs, budget: Budget, ctx: int | None, pages: int | None) -> MemoryPlan | None:
    # Mapped experts may lie in what is spare.
    context, mapped = _choose(needs, budget.nbytes, ctx)
    if not mapped and budget.spare > 0:
        beyond, fits = _choose(needs, budget.nbytes + budget.spare, ctx)
        context, mapped = (beyond, True) if fits else (context, False)
    fixed = _fixed(needs, context)
    room = budget.nbytes - sum(fixed.values())
    if pages is not None:
        mapped = pages == 0
    wave, extra = _short_wave(needs, context, room + budget.spare) if mapped else _wave(needs, context, room)
    fixed["workspace"] += extra
    room -= extra
    if pages is None:
        if sum(_while_loading(needs).values()) > budget.nbytes:
            return None
        if mapped:
            count = 0
        else:
            # A part of the margin grows with the pages.
            count = min(needs.blocks, int(room / (1 + _MARGIN_SHARE)) // needs.page_bytes)
            if count < needs.min_pages:
                return None
    else:
        count = pages
    experts = needs.all_expert_bytes if mapped else count * needs.page_bytes
    cached = lent = 0
    if not mapped:
        idle = int(needs.kv_idle(context) / (1 + _MARGIN_SHARE)) // needs.page_bytes
        lent = max(0, min(idle, needs.blocks - count))
        lacking = -(-(needs.blocks - count - lent) // needs.expert_blocks)
        cached = min(budget.spare // (needs.expert_blocks * needs.page_bytes), max(0, lacking))
    return MemoryPlan(
        budget=budget.nbytes,
        given=budget.given,
        base=needs.base,
        base_name=needs.base_name,
        basis=needs.basis,
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
        wave=wave,
        spare=budget.spare,
        cached_experts=cached,
        expert_blocks=needs.expert_blocks,
        lent_pages=lent,
    )


def _wave(needs: Needs, context: int, room: int) -> tuple[int, int]:
    """Tokens of the longest wave within its share of the room for experts, and its bytes; 0 of both if even
    two chunks exceed it.

    A wave that is longer than the context has no use. Nor has one that takes longer to compute than to move,
    if it has the tokens of a usual pass.
    """
    missing = max(0, needs.all_expert_bytes - room)
    enough = max(missing * needs.operations_per_byte // needs.operations, PREFILL_CHUNK)
    best, tokens = (0, 0), 2 * needs.chunk
    while needs.chunk and needs.chunk < context and tokens <= _MOST_WAVE:
        nbytes = needs.wave(min(tokens, context), context)
        if nbytes > _WAVE_SHARE * room:
            break
        best = tokens, nbytes
        if tokens >= min(context, enough):
            break
        tokens *= 2
    return best


def _short_wave(needs: Needs, context: int, room: int) -> tuple[int, int]:
    """Tokens of a wave where no expert is missing, and its bytes; 0 of both if it has no use or does not fit.

    Where chunks are shorter than usual, each of many experts gets few tokens of one, and its weights are
    unpacked for those alone.
    """
    if not 0 < needs.chunk < min(context, PREFILL_CHUNK):
        return 0, 0
    nbytes = needs.wave(min(PREFILL_CHUNK, context), context) + needs.wave_scratch(PREFILL_CHUNK)
    left = room - int(needs.all_expert_bytes * (1 + _MARGIN_SHARE))
    return (PREFILL_CHUNK, nbytes) if nbytes <= left else (0, 0)


def _fixed(needs: Needs, context: int) -> dict[str, int]:
    """All parts but the experts, by name, for a context."""
    kv = needs.kv(context)
    return {
        needs.base_name: needs.base,
        "dense weights": needs.dense,
        "attention cache": kv,
        "workspace": needs.workspace(context),
        "scratch": needs.scratch,
        "margin": _margin(needs, needs.dense + kv),
    }


def _while_loading(needs: Needs) -> dict[str, int]:
    """All parts that exist while the dense weights are loaded, by name."""
    return {
        needs.base_name: needs.base,
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
    everything = int(needs.all_expert_bytes * (1 + _MARGIN_SHARE))
    least = _least_context(needs, ctx)
    smallest = sum(_fixed(needs, least).values())
    mapped = smallest + everything <= budget
    if ctx is not None:
        return ctx, mapped
    # A context may take all that mapped experts leave, or a quarter of what the other fixed parts leave.
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
