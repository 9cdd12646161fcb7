"""Random experts and tokens for the GPU kernels, on a GPU if there is one, else in Triton's interpreter."""

from dataclasses import replace

import numpy as np
import torch
from kept_support import kept_call
from native_support import ENCODINGS, GATES, Call

from moechat import _native
from moechat.geometry import ExpertGeometry, WeightType, nominal_bits
from moechat.offload.kernels.block_list import BlockList, Items
from moechat.offload.kernels.launch import BlockKernels

__all__ = ["DEVICE", "ENCODINGS", "GpuCall"]

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def int32(values) -> np.ndarray:
    return np.asarray(values, np.int32)


class GpuCall(Call):
    """A call of the CPU kernels that can be made on the GPU too."""

    gate = "silu"

    @classmethod
    def random(cls, *arguments, gate="silu", **options):
        call = super().random(*arguments, **options)
        call.gate = gate
        return call

    @classmethod
    def kept(cls, *arguments, gate="silu", **options):
        """Experts in kept encodings; see :func:`kept_support.kept_call`."""
        call = cls(**vars(kept_call(*arguments, **options)))
        call.gate = gate
        return call

    @property
    def blocks(self) -> int:
        return self.layout.blocks

    @property
    def experts(self) -> int:
        return len(self.records)

    def geometry(self) -> ExpertGeometry:
        layout = self.layout
        kept = (
            ((layout.encoding, layout.down_encoding),) if layout.encoding in _native.kept_encodings() else ()
        )
        return ExpertGeometry(
            layout.hidden_size,
            layout.intermediate_size,
            self.experts,
            nominal_bits(kept) if kept else layout.bits,
            WeightType.FP16 if layout.fp16 else WeightType.BF16,
            replace(GATES[self.gate], gated=layout.gated),
            layout.has_bias,
            kept,
        )

    def run(self, dtype, *, cuts=None, others=None) -> torch.Tensor:
        """The whole layer, each expert's blocks cut into two launches; pages in a random order."""
        kernels = BlockKernels(self.geometry(), DEVICE)
        order = np.random.default_rng(0).permutation(self.experts * self.blocks)
        pages = np.empty_like(self.records.reshape(len(order), -1))
        pages[order] = self.records.reshape(len(order), -1)
        on_device = torch.from_numpy(pages).to(DEVICE)
        starts = int32(np.cumsum([0, *map(len, self.tokens_of)]))
        items = Items.build(
            starts, np.concatenate(self.tokens_of), np.concatenate(self.weights_of), len(self.x), DEVICE
        )
        x = torch.from_numpy(self.x).to(DEVICE, dtype)
        partial = kernels.partials(items, dtype)
        partial.fill_(float("nan"))
        middle = [0] * self.experts if cuts is None else cuts
        for low, high in (([0] * self.experts, middle), (middle, [self.blocks] * self.experts)):
            page = [order[e * self.blocks + b] for e in range(self.experts) for b in range(low[e], high[e])]
            entries = int32(np.cumsum([0, *np.subtract(high, low)]))
            blocks = BlockList.build(int32(page), entries, int32(low), starts, DEVICE)
            kernels.add(on_device, blocks, items, x, partial)
        out = torch.full_like(x, float("nan"))
        kernels.combine(partial, items, out, None if others is None else others.to(DEVICE))
        return out.cpu()

    def error(self, dtype) -> float:
        """Largest difference from the CPU's float kernels, of the largest output."""
        whole = self.x
        out = self.run(dtype).float().numpy()
        self.x = torch.from_numpy(whole).to(dtype).float().numpy()
        expected = super().run(self.gate, activation_bits=32)
        self.x = whole
        return float(np.abs(out - expected).max() / np.abs(expected).max())
