"""Expert layers of decoded tokens that native code launches, in place of Python.

Of a recorded token everything but the router's choice is known beforehand: where inputs and sums lie, and
which kernels are launched with which arguments. So the host's part of a layer, which the GPU waits for, is
one call (``native/src/offload/device_layers.h``). It decides and launches exactly what
:meth:`moechat.offload.gpu_layer.GpuExpertLayer.answer` does.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from moechat import _native
from moechat.budget.gpu_sizes import WORK_PAIRS
from moechat.offload.gpu_layer import ExpertRequest, GpuExpertLayer
from moechat.offload.kernels.call import PreparedLayer


class LaunchedLayers:
    """The expert layers of one recording.

    Args:
        layers: The expert layers.
        requests: Their requests, in the recording's memory.
        sums: Memory for their sums.
        prepared: Their launches.
        far_there: Memory for the CPU's part on the GPU, float32 ``[1, hidden]``; ``None``: it computes none.
    """

    # Invariant: _native refers to _runner, and to the pages and lists at _addresses.
    def __init__(
        self,
        layers: Sequence[GpuExpertLayer],
        requests: Sequence[ExpertRequest],
        sums: Sequence[torch.Tensor],
        prepared: Sequence[PreparedLayer],
        far_there: torch.Tensor | None,
    ) -> None:
        self._layers, self._requests, self._sums = layers, requests, sums
        self._tier, self._pages = layers[0].tier, layers[0].pages
        self._runner = self._tier.runner
        self._picks = requests[0].chosen
        pages = self._pages
        lists = pages.lists.of_one_token(self._picks)
        self._packed = [_landed(request) for request in requests]
        self._native = _native.DeviceLayers(
            self._runner,
            device=pages.accelerator.ordinal,
            picks=self._picks,
            work=WORK_PAIRS,
            lists=lists.host,
            lists_there=lists.there,
            launch_size=lists.launch_size,
            far_out=None if far_there is None else pages.far_out(1).numpy(),
            far_there=0 if far_there is None else far_there.data_ptr(),
            layers=[
                (packed, list(request.places), request.inputs, one.blocks, one.total, one.total_with_others)
                for packed, request, one in zip(self._packed, requests, prepared, strict=True)
            ],
        )
        self._addresses = self._addresses_now()

    @classmethod
    def of(
        cls, layers: Sequence[GpuExpertLayer], requests: Sequence[ExpertRequest], sums: Sequence[torch.Tensor]
    ) -> LaunchedLayers | None:
        """``None``: something is not of one token, its kernels have not been built yet or cannot be launched
        by the driver, or something in Python takes the place of the runner.
        """
        if not isinstance(layers[0].tier.runner, _native.ExpertRunner):
            return None
        pages, picks = layers[0].pages, requests[0].chosen
        far_there = pages.far_there() if any(request.inputs for request in requests) else None
        prepared = []
        for layer, request, total in zip(layers, requests, sums, strict=True):
            if len(request.x) != 1 or request.chosen != picks or request.landed is None:
                return None
            others = far_there if request.inputs else None
            kernels = pages.kernels_of(layer.ordinal)
            found = kernels.prepare(pages.memory, picks, request.x, total, others)
            if found is None:
                return None
            prepared.append(found)
        return cls(layers, requests, sums, prepared, far_there)

    def serves(self) -> bool:
        """Whether the launches are those of the runner, the pages and the lists that there are now."""
        return self._tier.runner is self._runner and self._addresses == self._addresses_now()

    def begin_token(self) -> bool:
        """Whether the next token is launched so: nothing in Python decides what is loaded."""
        tier = self._tier
        settings = tier.settings
        if tier.replay is not None or tier.predictor is not None or settings.queues:
            return False
        self._native.begin_token(
            self._pages.accelerator.stream(),
            miss=self._pages.miss(settings, 1),
            **tier.loading_rules(),
        )
        return True

    def answer(self, ordinal: int) -> None:
        """Compute a layer; see :meth:`GpuExpertLayer.answer`."""
        tier, request = self._tier, self._requests[ordinal]
        clocks = self._pages.clocks
        clocks.begin_layer()
        nbytes = self._native.run(ordinal, clocks if clocks.timing else None)
        if nbytes < 0:
            # The router chose an expert twice, or none: only logits that are no numbers do that.
            packed = self._packed[ordinal]
            self._layers[ordinal].answer_begun(request, packed, self._picks, self._sums[ordinal])
        else:
            clocks.end_layer()
            tier.counters.bytes_read += nbytes
            tier.counters.activations += self._picks
        if tier.settings.looks_up and ordinal in (0, tier.layers - 1):
            self._learn(ordinal)

    def _learn(self, ordinal: int) -> None:
        """What the first layer chose for the token, and what the last one predicts for the next token's."""
        packed, picks, experts = self._packed[ordinal], self._picks, self._tier.geometry.num_experts
        if ordinal == 0:
            self._tier.learn_tokens(packed[:picks].reshape(1, -1).astype(np.int64))
        for place, (ahead, layer) in enumerate(self._requests[ordinal].places):
            if ahead == 1 and layer == 0:
                begin = 2 * picks + place * experts
                self._tier.expect_first(packed[begin : begin + experts].view(np.float32))

    def _addresses_now(self) -> tuple[int, int]:
        pages = self._pages
        return pages.memory.data_ptr(), pages.lists.of_one_token(self._picks).there


def _landed(request: ExpertRequest) -> np.ndarray[tuple[int], np.dtype[np.int32]]:
    assert request.landed is not None
    return request.landed.numpy()[: request.packed.numel()]
