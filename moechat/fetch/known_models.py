"""The known models on one machine, without the network: which fit, and how fast each is, best first."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from moechat.errors import DoesNotFitError, MoechatError
from moechat.fetch.sources import choose_bits, speeds_by_bits
from moechat.hub.model_ref import ALIASES
from moechat.simulate.shared_draws import in_threads

if TYPE_CHECKING:
    from moechat.hardware.profile import HardwareProfile
    from moechat.planning.expect import Expected

# Tokens a second: as fast as most people read, and comfortable.
READING, COMFORTABLE = 5.0, 10.0


@dataclass(frozen=True)
class KnownModel:
    """A known model on a machine.

    Attributes:
        name: For ``moechat run``.
        repository: On the hub.
        expected: Its speed and sizes; ``None`` if it does not run there.
        refused: Why it does not run; empty if it does.
        least_bytes: The smallest memory that it needs, where it does not fit; of the GPU if that computes.
    """

    name: str
    repository: str
    expected: Expected | None
    refused: str = ""
    least_bytes: int | None = None


def known_names() -> dict[str, str]:
    """The first name of each known repository."""
    names: dict[str, str] = {}
    for name, repository in ALIASES.items():
        names.setdefault(repository, name)
    return {name: repository for repository, name in names.items()}


def known_models(
    *,
    profile: HardwareProfile | None = None,
    load: Mapping[str, Any] = MappingProxyType({}),
) -> list[KnownModel]:
    """All known models on a machine, best first.

    The largest that is comfortably fast comes first, because larger ones know more; then those that are as
    fast as one reads, again the largest first; then slower ones by speed; at last those that do not run.

    Args:
        profile: The machine; ``None``: this one.
        load: Options of loading, such as ``ram`` and ``bits``.
    """
    options = dict(load)
    bits = options.pop("bits", None)

    def judge(entry: tuple[str, str]) -> KnownModel:
        name, repository = entry
        try:
            speeds = speeds_by_bits(name, bits, profile=profile, load=options, brief=True)
            return KnownModel(name, repository, speeds[choose_bits(speeds)])
        except DoesNotFitError as error:
            return KnownModel(name, repository, None, str(error), error.least_bytes)
        except MoechatError as error:  # such as a context that this model does not have
            return KnownModel(name, repository, None, str(error))

    return sorted(in_threads(judge, list(known_names().items())), key=_order)


def _order(model: KnownModel) -> tuple[int, float, float]:
    expected = model.expected
    if expected is None:
        return 3, float(model.least_bytes or 0), 0.0
    rate = expected.tokens_per_s
    if rate < READING:
        return 2, -rate, 0.0
    return int(rate < COMFORTABLE), -expected.parameters, -rate
