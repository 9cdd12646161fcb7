"""The interface of the devices that a model can be loaded onto."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import nn
from transformers import PreTrainedModel

from moechat.budget.memory_plan import Budget, BudgetLabels, MemoryPlan
from moechat.budget.needs import Memory
from moechat.configurator.systems import Prefetch
from moechat.models.decode import NativeModules
from moechat.models.dense_form import DenseForm
from moechat.models.packed import PackedMemory
from moechat.models.skeleton import Skeleton
from moechat.offload.far_memory import ReadProgress
from moechat.offload.tier import Placement
from moechat.options import LoadOptions
from moechat.predict import Predictor
from moechat.store.store import Store


class PassDecoder(Protocol):
    """Calls a model, with fewer launches than its own forward where it can."""

    def __call__(self, *, input_ids: torch.Tensor, **arguments: Any) -> Any:
        """Output of the model's forward for these arguments."""
        ...

    def lend(self, cache: Any) -> None:
        """Prepare an attention cache that a prompt is about to fill in another way."""
        ...


class ModelPlacement(Placement, Protocol):
    """The placement of a whole model: dense weights and pages lie in one memory, beside one device.

    Loading calls the methods in the order in which they stand here.

    Attributes:
        device: Device of tokens and logits.
        labels: Words for its budget in messages.
    """

    device: torch.device
    labels: BudgetLabels

    def dtype(self, name: str) -> torch.dtype:
        """The type that the dense part computes in, for a type's name or ``auto``."""
        ...

    def memory(self, options: LoadOptions) -> Memory:
        """The memory as it is before anything is loaded."""
        ...

    def budget(self, options: LoadOptions, base: int) -> Budget:
        """Memory that may be spent.

        Args:
            options: With ``vram`` and ``ram``.
            base: Bytes that the process, or the CUDA context, takes already.
        """
        ...

    def reserve(self, plan: MemoryPlan) -> None:
        """Limit later allocations to the parts of this plan, where the device can enforce that."""
        ...

    def packed_memory(self, nbytes: int, form: DenseForm, dtype: torch.dtype) -> PackedMemory | None:
        """Memory for packed dense weights; ``None``: the file they are cached in.

        Raises:
            DoesNotFitError: There is not enough memory.
        """
        ...

    def adopt(
        self, skeleton: Skeleton, form: DenseForm, *, prefetch: Prefetch
    ) -> tuple[NativeModules, Predictor | None]:
        """Bring the dense part, which is loaded, to the device.

        Args:
            skeleton: With its weights.
            form: Form of the dense weights.
            prefetch: Prefetches that a predictor is made for; ``none`` makes none.

        Returns:
            The parts computed natively, and the predictor, where it runs in Python.

        Raises:
            DoesNotFitError: It does not fit.
        """
        ...

    def read_far(
        self,
        store: Store,
        options: LoadOptions,
        activations: npt.NDArray[np.int64] | None,
        progress: ReadProgress,
    ) -> None:
        """Read experts into the far memory that the link copies from, where there is one.

        Args:
            store: The experts.
            options: With ``ram``.
            activations: ``[layers, experts]``: how often each was activated in earlier runs; ``None``: not
                known. Where memory does not hold all experts, it gets the most used ones.
            progress: Called with bytes read and bytes in all.

        Raises:
            MoechatError: A file cannot be read.
        """
        ...

    @property
    def in_ram(self) -> float:
        """Share of the experts that RAM holds behind a GPU, where the CPU can compute them; else 0."""
        ...

    def warm(self, model: PreTrainedModel, top_k: int, dtype: torch.dtype) -> None:
        """Build all kernels before the first answer needs them.

        Raises:
            DeviceUnavailableError: They cannot be built.
        """
        ...

    def decoder(
        self,
        model: PreTrainedModel,
        parts: Sequence[nn.Module],
        dtype: torch.dtype,
        notify: Callable[[str], None],
        *,
        graphs: bool,
    ) -> PassDecoder | None:
        """A way to call the model that is faster, or timed; ``None``: there is none.

        Args:
            model: On the device.
            parts: Its experts modules, in order.
            dtype: Type of the dense part.
            notify: Takes sentences for the user.
            graphs: CUDA graphs may be used: their memory is in the plan.
        """
        ...
