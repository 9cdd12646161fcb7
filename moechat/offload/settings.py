"""The link between store and pages, and options of the tier for tests and measurements."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from moechat.configurator.systems import CacheSettings
from moechat.validation import require_choice, require_number

LinkIo = Literal["auto", "uring", "threads"]


@dataclass(frozen=True)
class LinkSettings:
    """The link between the store and the pages of the tier.

    Attributes:
        kind: ``file`` reads the store; ``sim`` copies records from memory at a programmed speed.
        io: ``file``: ``uring``, ``threads``, or ``auto``, the better one that works.
        direct: ``file``: reads bypass the page cache where the file system allows it.
        checks: Records that are read from files are compared with their checksums; ``False`` only to measure
            what that costs.
        in_flight_bytes: Limit of the bytes in flight; 0 takes the link's default.
        stall_seconds: Seconds without an arrival after which a wait ends with an error.
        bandwidth: ``sim``: bytes a second; 0: as fast as memory.
        latency: ``sim``: seconds from the start of a transfer to its first byte.
        jitter: ``sim``: largest random delay of a transfer, in seconds.
        seed: ``sim``: seed of the random delays.
        reorder: ``sim``: number of started transfers that finish in random order.
        copy: ``sim``: ``False`` spends the time without moving bytes; for measurements on random weights.
        copies: Into a GPU: times that every block is copied, which plays a slower link; for measurements.
    """

    kind: Literal["file", "sim"] = "file"
    io: LinkIo = "auto"
    direct: bool = True
    checks: bool = True
    in_flight_bytes: int = 0
    stall_seconds: float = 30.0
    bandwidth: float = 0.0
    latency: float = 0.0
    jitter: float = 0.0
    seed: int = 0
    reorder: int = 1
    copy: bool = True
    copies: int = 1

    def __post_init__(self) -> None:
        require_choice("link", self.kind, ("file", "sim"))
        require_choice("io", self.io, get_args(LinkIo))
        require_number("stall_seconds", self.stall_seconds, 0, 1e6, above=True)
        for name in ("in_flight_bytes", "bandwidth", "latency", "jitter", "seed"):
            require_number(name, getattr(self, name), 0, float(1 << 62))
        require_number("reorder", self.reorder, 1, 1024)
        require_number("copies", self.copies, 1, 64)


@dataclass(frozen=True)
class OffloadOptions:
    """Options of the tier beyond budget and system, for tests and measurements.

    Attributes:
        cache: Settings in place of those of the named system.
        link: The link.
        pages: Number of pages in place of the rest of the budget; 0 maps the store instead.
        predictor: A :class:`moechat.predict.Predictor` in place of the next layer's router.
        replay: A :class:`moechat.routing.Replay` in place of the routers' choices.
        accelerator: A :class:`moechat.offload.accelerator.Accelerator` in place of the GPU of ``device``.
    """

    cache: CacheSettings | None = None
    link: LinkSettings = field(default_factory=LinkSettings)
    pages: int | None = None
    predictor: Any = None
    replay: Any = None
    accelerator: Any = None
