"""All phases, in the order of the campaign."""

from __future__ import annotations

from pathlib import Path

from fault_injection.disturbed import Conversations, Convert, Download, Load, Paging
from fault_injection.flips import Flips, Rot
from fault_injection.fuzz import MAKERS, Fuzz
from fault_injection.native import Native
from fault_injection.phase import Phase
from fault_injection.scene import Scene
from fault_injection.signals import PARTS, Signals
from fault_injection.soak import Prompts, Server

_SOAK_S = 30.0


def all_phases(scene: Scene, root: Path) -> dict[str, Phase]:
    """All phases by name.

    Args:
        scene: What they share.
        root: The clone.
    """
    phases: list[Phase] = [
        Convert(scene, "convert"),
        Load(scene, "load"),
        Paging(scene, uring=False),
        Paging(scene, uring=True),
        Conversations(scene, "sessions"),
        Download(scene, "download"),
        Convert(scene, "kill-convert", kills=True),
        Conversations(scene, "kill-sessions", kills=True),
        Download(scene, "kill-download", kills=True),
        Flips(scene),
        Rot(scene),
        *(Signals(scene, part) for part in PARTS),
        *(Fuzz(scene, part) for part in MAKERS),
        Native(root, "tsan"),
        Native(root, "asan"),
        Prompts(scene, _SOAK_S),
        Server(scene, _SOAK_S),
    ]
    return {phase.name: phase for phase in phases}
