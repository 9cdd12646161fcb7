"""The state of the machine at work, as the page shows it: ``GET /moechat/state``."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Protocol

from moechat.engine.at_work import AtWork, Watcher
from moechat.hardware.memory import resident_bytes
from moechat.serve.counters import HIT_KINDS, Counters

if TYPE_CHECKING:
    from moechat import Description, Engine

# Seconds over which rates are means.
_WINDOW_S = 2.0
# Seconds between two looks at the size of the process, which take as long as all else here.
_RESIDENT_EVERY_S = 1.0


class WorkerFacts(Protocol):
    """What a worker tells other threads; see :class:`moechat.serve.worker.Worker`."""

    loaded: str
    loading: tuple[str, str, float] | None
    active: int
    drawn: int
    prompt: tuple[int, int] | None

    @property
    def waiting(self) -> int:
        """Requests in the queue."""

    @property
    def engine(self) -> Engine | None:
        """The model that is loaded."""


@dataclass(frozen=True)
class ModelFacts:
    """The model that is loaded.

    Attributes:
        name: As clients name it.
        type: Its transformers family.
        context: Most tokens of prompt and answer together.
        experts_form: The form of expert weights, for people.
        device: ``cpu``, ``cuda:0``, ...
        held: How the experts are held, for people.
        expert_bytes: Bytes of all experts.
    """

    name: str
    type: str
    context: int
    experts_form: str
    device: str
    held: str
    expert_bytes: int


@dataclass(frozen=True)
class Loading:
    """A model that is being loaded.

    Attributes:
        model: Its name.
        doing: The stage, for people.
        share: From 0 to 1.
    """

    model: str
    doing: str
    share: float


@dataclass(frozen=True)
class Answers:
    """The answers under way.

    Attributes:
        running: Their number.
        waiting: Requests in the queue.
        tokens_per_s: Tokens of all answers, each second, in the last two seconds or since they began; 0 if
            none is under way.
        last_tokens_per_s: Of the last answer, after its first token; ``None`` while one is under way, and
            before the first.
        prompt_done: Tokens of the prompt that is being computed that are done; ``None``: none is.
        prompt_total: Tokens of that prompt.
    """

    running: int
    waiting: int
    tokens_per_s: float
    last_tokens_per_s: float | None
    prompt_done: int | None
    prompt_total: int | None


@dataclass(frozen=True)
class MemoryPart:
    """One use of the memory budget.

    Attributes:
        name: For people.
        nbytes: Its bytes.
        basis: ``counted`` on the model, ``measured`` on this machine, or ``estimate``.
    """

    name: str
    nbytes: int
    basis: str


@dataclass(frozen=True)
class Memory:
    """The memory budget and its uses.

    Attributes:
        budget_bytes: The budget: of RAM, or of the GPU's memory.
        given: The user chose it.
        parts: All planned uses.
        experts_used_bytes: Of the part ``experts``, what holds experts now.
        resident_bytes: Resident set of the process, mapped files included.
    """

    budget_bytes: int
    given: bool
    parts: tuple[MemoryPart, ...]
    experts_used_bytes: int
    resident_bytes: int


@dataclass(frozen=True)
class Link:
    """The link in the last two seconds.

    Attributes:
        busy: Share of the time with a transfer under way, from 0 to 1.
        demand_bytes_per_s: Bytes that a router had asked for.
        ahead_bytes_per_s: Bytes that were fetched ahead.
    """

    busy: float
    demand_bytes_per_s: float
    ahead_bytes_per_s: float


@dataclass(frozen=True)
class StateMap:
    """Where the experts are; the characters are those of :class:`moechat.offload.expert_map.Place`.

    Attributes:
        layers: Indices of the decoder layers with experts.
        places: A string for each, with a character for each expert: ``m`` wholly in memory, ``p`` partly,
            ``w`` on its way, ``c`` computed by the CPU beside a GPU, ``.`` missing.
        uses: A string for each, with a digit for each expert, 0 to 9: how often it was used lately; empty
            where experts are mapped.
        counts: Experts in each place.
    """

    layers: tuple[int, ...]
    places: tuple[str, ...]
    uses: tuple[str, ...]
    counts: Mapping[str, int]


@dataclass(frozen=True)
class More:
    """What a larger budget would save.

    Attributes:
        all_experts_bytes: Bytes that the budget lacks to hold every expert.
        exposed_ms: Milliseconds of each token in which the plan expects to wait for experts; with all experts
            in memory it is none.
    """

    all_experts_bytes: int
    exposed_ms: float


@dataclass(frozen=True)
class MachineState:
    """The state of the machine at one moment.

    Attributes:
        at: When, in seconds since 1970.
        model: The model that is loaded; ``None``: none, and so are the fields that describe it.
        loading: The model that is being loaded.
        answers: Under way and waiting.
        memory: Budget and uses.
        hits: Of the experts that tokens of answers needed, the share that was in memory (``full``), brought
            in time (``prefetched``), there in part (``top``) or not there (``miss``), for the ``last`` answer
            and for ``all`` complete answers since the server began; ``None`` where none was needed, or where
            experts are mapped.
        link: ``None`` where experts are mapped.
        more: ``None`` where a larger budget saves nothing, or nothing is known about it.
        map: The experts; ``None`` in events of a stream if it is that of the event before.
    """

    at: float
    model: ModelFacts | None
    loading: Loading | None
    answers: Answers
    memory: Memory | None
    hits: Mapping[str, Mapping[str, float] | None]
    link: Link | None
    more: More | None
    map: StateMap | None

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self)


@dataclass(frozen=True)
class _Sample:
    at: float
    running: int
    drawn: int
    work: AtWork | None


class StateReader:
    """Makes states; REQUIRES: in the thread that computes, between tokens.

    Args:
        counters: Of the server.
    """

    def __init__(self, counters: Counters) -> None:
        self._counters = counters
        self._engine: Engine | None = None
        self._watcher: Watcher | None = None
        self._about: Description | None = None
        self._samples: deque[_Sample] = deque()
        self._resident_bytes, self._resident_due = 0, 0.0

    def read(self, worker: WorkerFacts) -> MachineState:
        """The state now; a fraction of a millisecond."""
        engine = worker.engine
        if engine is not self._engine:
            self._samples.clear()
            self._engine = engine
            self._watcher = None if engine is None else Watcher(engine)
            self._about = None if engine is None else engine.describe()
        work = None if self._watcher is None else self._watcher.look()
        sample = _Sample(time.monotonic(), worker.active, worker.drawn, work)
        while len(self._samples) > 1 and self._samples[1].at <= sample.at - _WINDOW_S:
            self._samples.popleft()
        before = self._samples[0] if self._samples else sample
        self._samples.append(sample)
        rate = _token_rate(self._samples)
        if engine is None or self._about is None or work is None:
            return outline(worker)
        return MachineState(
            time.time(),
            _model(self._about),
            _loading(worker),
            _answers(worker, rate, engine.decoder.stats.tpot_s),
            _memory(engine, self._about, work, self._resident()),
            {"last": _rates(_last_hits(engine)), "all": _rates(self._counters.hits())},
            _link(before, sample),
            _more(engine, self._about, work),
            StateMap(work.map.layers, work.map.places, work.map.uses, work.map.counts()),
        )

    def _resident(self) -> int:
        now = time.monotonic()
        if now >= self._resident_due:
            self._resident_bytes, self._resident_due = resident_bytes(), now + _RESIDENT_EVERY_S
        return self._resident_bytes


def outline(worker: WorkerFacts) -> MachineState:
    """The state without that of a model; from any thread."""
    return MachineState(
        time.time(),
        None,
        _loading(worker),
        _answers(worker),
        None,
        {"last": None, "all": None},
        None,
        None,
        None,
    )


def _model(about: Description) -> ModelFacts:
    return ModelFacts(
        about.name,
        about.model_type,
        about.context_length,
        about.experts_form,
        about.device,
        about.experts,
        about.expert_bytes,
    )


def _loading(worker: WorkerFacts) -> Loading | None:
    return None if worker.loading is None else Loading(*worker.loading)


def _token_rate(samples: Sequence[_Sample]) -> float:
    now = samples[-1]
    if not now.running:
        return 0.0
    first = now
    for sample in reversed(samples):
        if not sample.running:
            break
        first = sample
    seconds = now.at - first.at
    return (now.drawn - first.drawn) / seconds if seconds > 0 else 0.0


def _answers(worker: WorkerFacts, rate: float = 0.0, seconds_a_token: float = 0.0) -> Answers:
    done, total = worker.prompt or (None, None)
    last = 1 / seconds_a_token if seconds_a_token > 0 and not worker.active else None
    return Answers(worker.active, worker.waiting, rate, last, done, total)


def _memory(engine: Engine, about: Description, work: AtWork, resident: int) -> Memory:
    parts = tuple(MemoryPart(part.name, part.nbytes, part.basis) for part in engine.loaded.plan.parts)
    return Memory(about.memory_budget_bytes, about.memory_budget_given, parts, work.used_bytes, resident)


def _last_hits(engine: Engine) -> Mapping[str, int]:
    stats = engine.decoder.stats
    return {kind: getattr(stats, kind) for kind in HIT_KINDS}


def _rates(hits: Mapping[str, int]) -> Mapping[str, float] | None:
    total = sum(hits.values())
    return {HIT_KINDS[kind]: count / total for kind, count in hits.items()} if total else None


def _link(before: _Sample, now: _Sample) -> Link | None:
    if now.work is None or now.work.link is None:
        return None
    seconds, end = now.at - before.at, now.work.link
    begin = None if before.work is None else before.work.link
    if seconds <= 0 or begin is None:
        return Link(0.0, 0.0, 0.0)

    def gained(value: float, earlier: float) -> float:
        # A counter below its earlier value was set to 0 in between.
        return value - earlier if value >= earlier else value

    return Link(
        min(1.0, gained(end.busy_s, begin.busy_s) / seconds),
        gained(end.demand_bytes, begin.demand_bytes) / seconds,
        gained(end.ahead_bytes, begin.ahead_bytes) / seconds,
    )


def _more(engine: Engine, about: Description, work: AtWork) -> More | None:
    missing = about.expert_bytes - engine.loaded.plan.expert_bytes
    if work.exposed_ms is None or missing <= 0:
        return None
    return More(missing, work.exposed_ms)
