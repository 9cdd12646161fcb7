"""In which form the dense weights of a model are kept, decided before any of them is loaded.

A weight can be kept in another form than torch's where everything that uses it is an ``nn.Linear`` or an
``nn.Embedding`` that a family only calls. Routers stay as they are: they are small, and prediction reads
them. So do layers whose weight is read elsewhere than in their own forward, which a trial pass on the meta
device shows.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812 - the name the field uses

from moechat.errors import UsageError
from moechat.geometry import ACTIVATION_BITS, DENSE_BITS
from moechat.models.decode.latent import latent_projections
from moechat.models.skeleton import Skeleton

HALVES = (torch.bfloat16, torch.float16)
# Below, a product costs less than the call.
_LEAST_SIDE = 16
# Of a matrix that a card unpacks at a time: one of 4096 x 4096 weights of 16 bits.
_UNPACKED_BYTES = 32 << 20


def check_dense_bits(bits: Any) -> int:
    """The number of bits, if dense weights can be kept with so many.

    Raises:
        UsageError: They cannot.
    """
    if isinstance(bits, bool) or not isinstance(bits, int) or bits not in DENSE_BITS:
        raise UsageError(f"dense_bits is {bits!r}", hint="choose one of 4, 8, 16")
    return bits


def check_activation_bits(bits: Any) -> int:
    """The number of bits, if inputs can meet quantised weights with so many.

    Raises:
        UsageError: They cannot.
    """
    if isinstance(bits, bool) or not isinstance(bits, int) or bits not in ACTIVATION_BITS:
        raise UsageError(f"activation_bits is {bits!r}", hint="choose one of 8, 16, 32")
    return bits


def packed_bytes(rows: int, cols: int, bits: int) -> int:
    """Bytes of a matrix packed in groups: rows and columns padded to 16 and 64, codes, then scale and zero in
    fp16 for each row and group.
    """
    padded_rows, groups = -(-rows // 16) * 16, -(-cols // 64)
    return padded_rows * groups * (64 * bits // 8 + 4)


def unpacked_bytes(form: DenseForm, itemsize: int) -> int:
    """Bytes in which a card unpacks rows of packed matrices for products of many tokens; 0 where nothing is
    packed. As many as the largest matrix takes, within limits; 16 rows of the longest as float32 at least.

    Args:
        form: Of the dense weights.
        itemsize: Bytes of a number in the model's type.
    """
    if not form.packs:
        return 0
    shapes = form.linears.values()
    largest = max((-(-rows // 16) * 16 * cols * itemsize for rows, cols in shapes), default=0)
    least = max((16 * cols * 4 for _, cols in shapes), default=0)
    return max(min(largest, _UNPACKED_BYTES), least)


class WatchedReads:
    """Which layers' weights were read from outside while a pass was watched.

    Attributes:
        modules: Of those layers.
    """

    def __init__(self) -> None:
        self.modules: set[nn.Module] = set()


@contextmanager
def watched_weights(model: nn.Module) -> Iterator[WatchedReads]:
    """Note for a pass inside who reads the weight or bias of a plain layer other than its own forward."""
    reads = WatchedReads()

    class _Watched:
        def __getattr__(self, name: str) -> Any:
            if name in ("weight", "bias"):
                reads.modules.add(self)  # type: ignore[arg-type]
            return nn.Module.__getattr__(self, name)  # type: ignore[arg-type]

    class _WatchedLinear(_Watched, nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return F.linear(x, self._parameters["weight"], self._parameters["bias"])  # type: ignore[arg-type]

    class _WatchedEmbedding(_Watched, nn.Embedding):
        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            return F.embedding(ids, self._parameters["weight"])  # type: ignore[arg-type]

    kinds: dict[type[nn.Module], type[nn.Module]] = {
        nn.Linear: _WatchedLinear,
        nn.Embedding: _WatchedEmbedding,
    }
    changed = [module for module in model.modules() if type(module) in kinds]
    before = [type(module) for module in changed]
    try:
        for module, kind in zip(changed, before, strict=True):
            module.__class__ = kinds[kind]
        yield reads
    finally:
        for module, kind in zip(changed, before, strict=True):
            module.__class__ = kind


@dataclass(frozen=True)
class DenseForm:
    """How dense weights are kept.

    Attributes:
        bits: 16: as stored; 8 or 4: packed.
        activation_bits: How inputs meet packed weights.
        linears: Names of the layers in another form than torch's, with rows and columns.
        embeddings: Names of the embeddings that keep the stored type.
        kept: Names of the weights that keep the stored type instead of taking the model's.
        nbytes: Of all weights and buffers of the model as they will be in memory, each memory once.
        head_bytes: Of those, of the head.
        in_layers: Of those, of weights between the embedding and the head.
        itemsize: Bytes of one of these weights, in the mean.
    """

    bits: int
    activation_bits: int
    linears: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    embeddings: frozenset[str] = frozenset()
    kept: frozenset[str] = frozenset()
    nbytes: int = 0
    head_bytes: int = 0
    in_layers: int = 0
    itemsize: float = 2.0

    @property
    def packs(self) -> bool:
        """Weights are packed, which needs their values."""
        return self.bits < 16


def choose_form(
    skeleton: Skeleton,
    stored: Mapping[str, torch.dtype],
    *,
    bits: int,
    activation_bits: int,
    reads: WatchedReads | None = None,
    stored_rows: bool = True,
) -> DenseForm:
    """Decide for every weight of a skeleton.

    Args:
        skeleton: On the meta device.
        stored: Type of each weight in the store, by its name in the model; weights that are made from several
            types, or several weights from one, are left out and stay torch's.
        bits: 16, 8 or 4.
        activation_bits: 8, 16 or 32.
        reads: From a trial pass.
        stored_rows: Layers that are not packed read 16-bit rows as they are stored, where they can; else, as
            on a card, they stay torch's and take the model's type.
    """
    model = skeleton.model
    avoided = latent_projections(model) | (set() if reads is None else reads.modules)
    routers = {(entry.num_experts, entry.hidden_size) for entry in skeleton.experts}

    def replaceable(module: nn.Module) -> bool:
        if module in avoided:
            return False
        if type(module) is nn.Embedding:
            return module.max_norm is None and not module.sparse
        shape = tuple(module.weight.shape) if type(module) is nn.Linear else ()
        return len(shape) == 2 and min(shape) >= _LEAST_SIDE and shape not in routers

    users: dict[int, list[tuple[str, nn.Module, str]]] = {}
    tensors: dict[int, torch.Tensor] = {}
    for name, module in model.named_modules():
        for leaf, parameter in module._parameters.items():
            if parameter is not None:
                users.setdefault(id(parameter), []).append((name, module, leaf))
                tensors[id(parameter)] = parameter
    linears: dict[str, tuple[int, int]] = {}
    embeddings: set[str] = set()
    kept: set[str] = set()
    sizes: dict[int, dict[str, int]] = {}  # bytes of a parameter by use: "stored" or the name of a layer
    for key, parameter in tensors.items():
        of = users[key]
        names = [f"{name}.{leaf}" if name else leaf for name, _, leaf in of]
        types = {stored[name] for name in names if name in stored}
        fit = all(leaf == "weight" and replaceable(module) for _, module, leaf in of)
        sizes[key] = {"stored": parameter.nbytes}
        if len(types) != 1:
            continue
        (kind,) = types
        whole = stored_rows and fit and kind in HALVES
        if whole:
            kept.update(names)
            sizes[key] = {"stored": parameter.numel() * kind.itemsize}
        packed = [
            name
            for name, module, leaf in of
            if bits < 16 and leaf == "weight" and type(module) is nn.Linear and replaceable(module)
        ]
        for name, module, _ in of:
            if type(module) is nn.Linear and (whole or name in packed):
                linears[name] = (parameter.shape[0], parameter.shape[1])
            elif whole:
                embeddings.add(name)
        for name in packed:
            sizes[key][name] = packed_bytes(*linears[name], bits)
        if packed and len(packed) == len(of):
            # Only the packer reads it, and as it is stored.
            kept.update(names)
            del sizes[key]["stored"]

    def weight_of(module: Any) -> tuple[int, int, bool]:
        """Bytes of a layer's weight, its key, and whether it has a form of its own."""
        parameter = None if module is None else module._parameters.get("weight")
        if parameter is None:
            return 0, 0, False
        name = next((name for name, user, _ in users[id(parameter)] if user is module), "")
        found = sizes[id(parameter)]
        return found.get(name, found.get("stored", 0)), id(parameter), name in found

    embedding, embedding_key, _ = weight_of(model.get_input_embeddings())
    head, head_key, own = weight_of(model.get_output_embeddings())  # type: ignore[no-untyped-call]
    # Without an output embedding of its own a model's head is its embedding.
    head = head or embedding
    outside = head + (embedding if own or head_key not in (0, embedding_key) else 0)
    nbytes = sum(sum(size.values()) for size in sizes.values())
    in_layers = max(0, nbytes - outside)
    ends = {embedding_key, head_key}
    weights = sum(tensor.numel() for key, tensor in tensors.items() if key not in ends)
    return DenseForm(
        bits=bits,
        activation_bits=activation_bits,
        linears=linears,
        embeddings=frozenset(embeddings),
        kept=frozenset(kept),
        nbytes=nbytes + sum(buffer.nbytes for buffer in model.buffers()),
        head_bytes=head,
        in_layers=in_layers,
        itemsize=in_layers / weights if in_layers and weights else 2.0,
    )
