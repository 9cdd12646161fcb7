"""Calibrated quantisation: the model runs over a text while its experts are converted, layer by layer."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch

from moechat import _native
from moechat.calibration.layer_packer import LayerPacker
from moechat.calibration.text import calibration_ids
from moechat.errors import CheckpointError, MoechatError, UnsupportedModelError
from moechat.geometry import KEEP, ExpertGeometry
from moechat.models.assets import load_tokenizer
from moechat.models.one_pass import OnePass
from moechat.models.quiet import without_warnings
from moechat.models.skeleton import config_from
from moechat.models.threads import torch_threads
from moechat.offload.experts import ExpertCounters, ExpertLayer
from moechat.store.calibrated import ConvertLayer
from moechat.store.checkpoint import Checkpoint
from moechat.store.expert_refs import CheckpointPlan
from moechat.store.side_files import has_tokenizer
from moechat.store.verified_inputs import compared_inputs

Notice = Callable[[str], None]
# From 6 bits on, rounding costs next to nothing.
_MOST_CALIBRATED_BITS = 4


@dataclass(frozen=True)
class TextCalibration:
    """Measures activations on the packaged text; a :class:`moechat.store.calibrated.Calibration`.

    Attributes:
        checkpoint: The source.
        plan: Its experts and dense tensors.
        geometry: Of the store.
        notice: Receives the reason if the model cannot be run.
    """

    checkpoint: Checkpoint
    plan: CheckpointPlan
    geometry: ExpertGeometry
    notice: Notice

    def run(self, convert_layer: ConvertLayer, last: int) -> bool:
        """See :class:`moechat.store.calibrated.Calibration`."""

        def experts(
            ordinal: int, hidden: torch.Tensor, index: torch.Tensor, weights: torch.Tensor
        ) -> torch.Tensor:
            records = convert_layer(
                ordinal, lambda: LayerPacker(self.geometry, ordinal, hidden, index, weights)
            )
            # The later layers get what these quantised experts compute, as they will when the model is used.
            layer = ExpertLayer(self.geometry, records, ExpertCounters(), ordinal=ordinal)
            return layer.forward(hidden, index, weights)

        keys = [key for layer in self.plan.read_before for key in layer]
        try:
            source = self.checkpoint.path
            with without_warnings():
                config = config_from(self.checkpoint.config, source)
            one_pass = OnePass(config)
            with compared_inputs(source) as directory:
                ids = calibration_ids(load_tokenizer(directory, named=source), one_pass.vocabulary)
            # Rounding can depend on the number of threads, which callers choose.
            with torch_threads(_native.available_cores()):
                one_pass.run(self.checkpoint.tensors, keys, ids, experts, last)
        except Exception as error:  # depends on the family
            unsupported = isinstance(error, UnsupportedModelError) and not isinstance(error, CheckpointError)
            if isinstance(error, OSError) or (isinstance(error, MoechatError) and not unsupported):
                raise  # of files, or of the conversion, which would meet it again
            text = str(error) if unsupported else f"{type(error).__name__}: {error}"
            self.notice(f"experts are quantised without calibration: {text}")
            return False
        return True


def calibrates(plan: CheckpointPlan, bits: int, files: Iterable[str]) -> bool:
    """Whether a conversion is calibrated.

    Args:
        plan: Of the checkpoint.
        bits: Bits per expert weight, or :data:`moechat.geometry.KEEP`.
        files: Names of the checkpoint's files.
    """
    return KEEP < bits <= _MOST_CALIBRATED_BITS and bool(plan.read_before) and has_tokenizer(files)


def calibration_of(
    checkpoint: Checkpoint, plan: CheckpointPlan, bits: int, notice: Notice
) -> TextCalibration | None:
    """The calibration of a conversion; ``None`` if it is not calibrated.

    Args:
        checkpoint: The source, with its tokenizer.
        plan: Its experts and dense tensors.
        bits: Bits per expert weight.
        notice: Receives the reason if the model cannot be run after all.
    """
    if not calibrates(plan, bits, os.listdir(checkpoint.path)):
        return None
    return TextCalibration(checkpoint, plan, plan.geometry(bits), notice)
