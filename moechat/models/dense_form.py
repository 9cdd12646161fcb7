"""Chooses the form of dense weights in memory, before any of them is loaded.

A weight can have another form than a torch tensor if all its users are ``nn.Linear`` or ``nn.Embedding``
modules that the family only calls. Routers stay torch tensors: they are small, and prediction reads them.
So do layers whose weight is read outside their own forward, which a trial pass on the meta device shows,
and projections of latents to keys and values unless they are quantised.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812 - the name the field uses

from moechat import _native
from moechat.geometry import AUTO_BITS, FLOAT_ENCODINGS, DenseBits
from moechat.models.decode.latent import latent_projections
from moechat.models.decode.probe import inputs_dtype
from moechat.models.linear import TILE_ROWS, only_scales_rows
from moechat.models.skeleton import Skeleton
from moechat.models.wide_routers import widening_routers
from moechat.sizes.dense_sizes import DenseSizes

HALVES = (torch.bfloat16, torch.float16)
# For smaller matrices the call costs more than the product.
_LEAST_SIDE = 16

# Projections of attention that lose next to nothing in 4 bits. On held-out text of the demo model, 4 bits for
# one kind of matrix and 8 for all others changed the perplexity by 0.0 % (output projection), 0.1 % (query
# and key), 0.2 % (value) and 0.5 % (head).
_FOUR_BITS = frozenset({"q_proj", "k_proj", "o_proj"})
# Of all other matrices, of which most kinds have not been measured. On the demo the default diverges by 11.3
# millinats with 6 bits here, by 10.9 with 8; a token of Qwen3.6 reads a ninth less with 6.
_OTHER_BITS = 6
# Of matrices whose encoding in the store cannot be kept: to round them again adds next to nothing.
_DECODED_BITS = 8
# The head's first rows have _OTHER_BITS too: tokenizers number their pieces by frequency. With 8 bits that
# changed the perplexity by 0.3 % (an eighth of the rows), 0.2 % (a quarter) and 0.1 % (half).
_HEAD = "lm_head"
_WIDE_ROWS = 1 / 8

Part = tuple[int, int, int | str]


def automatic_parts(name: str, rows: int, cols: int, *, decoded: bool = False) -> tuple[Part, ...]:
    """Parts of a matrix with ``auto`` that is packed, from the first row on: rows, columns and bits of each.

    Query, key and output projections have 4 bits, the head 6 for its first rows and 4 for the others, all
    other matrices 6. Those that the store has encoded, in a form that cannot be kept, have 8.

    Args:
        name: Of its layer in the model.
        rows: Of the matrix.
        cols: Of the matrix.
        decoded: The store has it encoded.
    """
    if decoded:
        return ((rows, cols, _DECODED_BITS),)
    kind = name.rpartition(".")[2]
    wide = round(rows * _WIDE_ROWS / TILE_ROWS) * TILE_ROWS
    if kind == _HEAD and wide > 0:
        return (wide, cols, _OTHER_BITS), (rows - wide, cols, 4)
    return ((rows, cols, 4 if kind in _FOUR_BITS else _OTHER_BITS),)


def packed_bytes(rows: int, cols: int, bits: int) -> int:
    """Bytes of a quantised matrix: rows padded to 16, columns to 64, codes, and four bytes of scales for each
    row of a group.
    """
    padded_rows, groups = -(-rows // TILE_ROWS) * TILE_ROWS, -(-cols // 64)
    return padded_rows * groups * (64 * bits // 8 + 4)


def part_bytes(part: Part) -> int:
    """Bytes of a part of a packed layer."""
    rows, cols, bits = part
    return packed_bytes(rows, cols, bits) if isinstance(bits, int) else _native.LinearLayout(*part).nbytes


def encoded_bytes(rows: int, cols: int, encoding: str) -> int:
    """Bytes of a matrix in encoded rows of a store."""
    _, block, block_bytes = _native.kept_encodings()[encoding]
    return rows * (cols // block) * block_bytes


class WatchedReads:
    """Layers whose weights were read from outside during a watched pass.

    Attributes:
        modules: Those layers.
    """

    def __init__(self) -> None:
        self.modules: set[nn.Module] = set()


@contextmanager
def watched_weights(model: nn.Module) -> Iterator[WatchedReads]:
    """Record reads of plain layers' weights and biases from outside their own forward, during the block."""
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
    """Form of the dense weights in memory.

    Attributes:
        bits: 16: as stored; 8, 6 or 4: quantised; ``auto``: as stored where the weights are encoded, but
            not in FP8, else quantised, each in its own.
        activation_bits: Type of the inputs in products with packed weights.
        linears: Names of the layers that are not torch's, with rows and columns.
        embeddings: Names of the embeddings that keep the stored type.
        kept: Names of the weights that keep the stored type instead of the model's.
        encodings: Layers that use the encoded rows of a store (:mod:`moechat.store.encoded_file`), and their
            encoding. Linear ones are packed in it, which changes no value.
        encoded: Layers whose weights are encoded in the store, with the name of the stored weight. Their
            weights are not loaded as tensors.
        decoded: Layers whose weights are encoded in the store, but not kept so although ``bits`` is ``auto``.
        nbytes: Bytes of all weights and buffers in memory, shared memory counted once.
        head_bytes: Bytes of the head, included in ``nbytes``.
        in_layers: Bytes of weights between the embedding and the head, included in ``nbytes``.
        itemsize: Mean bytes per weight in the layers.
    """

    bits: DenseBits
    activation_bits: int
    linears: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    embeddings: frozenset[str] = frozenset()
    kept: frozenset[str] = frozenset()
    encodings: Mapping[str, str] = field(default_factory=dict)
    encoded: Mapping[str, str] = field(default_factory=dict)
    decoded: frozenset[str] = frozenset()
    nbytes: int = 0
    head_bytes: int = 0
    in_layers: int = 0
    itemsize: float = 2.0

    @property
    def sizes(self) -> DenseSizes:
        """What plans count with."""
        shapes = self.linears.values() if self.packs or self.kept_linears else ()
        return DenseSizes(
            bits=self.bits,
            activation_bits=self.activation_bits,
            title=self.title,
            nbytes=self.nbytes,
            head_bytes=self.head_bytes,
            in_layers=self.in_layers,
            itemsize=self.itemsize,
            largest=max((-(-rows // TILE_ROWS) * TILE_ROWS * cols for rows, cols in shapes), default=0),
            widest=max((cols for _, cols in shapes), default=0),
        )

    @property
    def packs(self) -> bool:
        """Whether linear layers are quantised, which needs the values of their weights."""
        return self.bits != 16

    @property
    def quantised(self) -> list[str]:
        """Names of the linear layers that are quantised, sorted."""
        return sorted(self.linears.keys() - self.encodings.keys()) if self.packs else []

    @property
    def kept_linears(self) -> list[str]:
        """Names of the linear layers that keep the encoding of the store, sorted."""
        return sorted(self.linears.keys() & self.encodings.keys())

    @property
    def title(self) -> str:
        """Bits or encodings of the weights by the kind of their layer, for people."""
        kinds: dict[str, set[str]] = {}
        for name in (*self.quantised, *self.kept_linears):
            labels = kinds.setdefault(name.rpartition(".")[2], set())
            labels.update(_label(part[2]) for part in self.parts_of(name))
        groups: dict[str, list[str]] = {}
        for kind, found in kinds.items():
            label = " and ".join(sorted(found, reverse=True))
            groups.setdefault(label.replace(" bits and ", " and "), []).append(kind)
        order = sorted(groups, key=lambda label: label.removesuffix(" bits"))
        packed = [f"{', '.join(sorted(groups[label]))} {label}" for label in order]
        return "; ".join([*packed, "others not packed" if packed else "not packed"])

    def parts_of(self, name: str) -> tuple[Part, ...]:
        """Parts of a layer in :attr:`linears`, from the first row on: rows, columns, and bits or encoding."""
        rows, cols = self.linears[name]
        encoding = self.encodings.get(name)
        if encoding is not None:
            return ((rows, cols, encoding),)
        return _parts(self.bits, name, rows, cols, decoded=name in self.decoded)


def _keeps(bits: DenseBits, encoding: str) -> bool:
    """Whether linear layers with encoded weights are not quantised again."""
    return bits == 16 or (bits == AUTO_BITS and encoding not in FLOAT_ENCODINGS)


def _label(bits: int | str) -> str:
    return f"{bits} bits" if isinstance(bits, int) else bits.upper()


def _parts(bits: DenseBits, name: str, rows: int, cols: int, *, decoded: bool) -> tuple[Part, ...]:
    if isinstance(bits, str):
        return automatic_parts(name, rows, cols, decoded=decoded)
    return ((rows, cols, bits),)


def _routers(skeleton: Skeleton) -> set[nn.Module]:
    """The routers that are linear layers.

    Such a layer has a row for each expert. It is a child of the module that holds the experts, or the only
    linear layer inside of such a child.

    The shape alone does not tell: the shared experts of Qwen3-Coder-Next have as many rows as it has experts.
    """
    shapes = {id(entry.module): (entry.num_experts, entry.hidden_size) for entry in skeleton.experts}
    found: set[nn.Module] = set()
    for parent in skeleton.model.modules():
        children = list(parent.children())
        wanted = {shapes[id(child)] for child in children if id(child) in shapes}
        for child in children if wanted else []:
            linears = [module for module in child.modules() if type(module) is nn.Linear]
            found.update(each for each in linears if len(linears) == 1 and tuple(each.weight.shape) in wanted)
    return found


def choose_form(
    skeleton: Skeleton,
    stored: Mapping[str, torch.dtype],
    *,
    bits: DenseBits,
    activation_bits: int,
    encodings: Mapping[str, str] | None = None,
    decoded: Collection[str] = (),
    reads: WatchedReads | None = None,
    stored_rows: bool = True,
) -> DenseForm:
    """Choose the form of every weight of a skeleton.

    Args:
        skeleton: A model on the meta device.
        stored: Stored type of each weight, by its name in the model. Weights combined from several types or
            split from one tensor are missing here and stay torch tensors.
        bits: 16, 8, 6, 4 or ``auto``.
        activation_bits: 8, 16 or 32.
        encodings: Encoding of each weight that has one in the store, by its name in the model.
        decoded: Names in the model of weights that are encoded in the store too, but not in whole rows.
        reads: Reads seen in a trial pass.
        stored_rows: Let layers that are not packed read rows as stored, if possible; ``False``, as on a GPU:
            they stay torch layers in the model's type, except for linear layers with encoded weights.
            Projections of latents stay torch layers then, too.
    """
    model = skeleton.model
    latents = latent_projections(model)
    avoided = set() if reads is None else reads.modules
    routers = _routers(skeleton)
    inputs = inputs_dtype(model)
    widening = widening_routers(model, inputs) if inputs in HALVES else set()

    def replaceable(module: nn.Module, *, is_encoded: bool = False) -> bool:
        if module in avoided or module in latents:
            return False
        if isinstance(module, nn.Embedding):
            plain = module.max_norm is None and not module.sparse
            return plain and (type(module) is nn.Embedding or (is_encoded and only_scales_rows(type(module))))
        shape = tuple(module.weight.shape) if type(module) is nn.Linear else ()
        return len(shape) == 2 and min(shape) >= _LEAST_SIDE and module not in routers

    def packable(module: nn.Module) -> bool:
        if latents.get(module, False):  # attention of latents takes them so on the CPU
            return stored_rows and module not in avoided
        return replaceable(module)

    users: dict[int, list[tuple[str, nn.Module, str]]] = {}
    tensors: dict[int, torch.Tensor] = {}
    for name, module in model.named_modules():
        for leaf, parameter in module._parameters.items():
            if parameter is not None:
                users.setdefault(id(parameter), []).append((name, module, leaf))
                tensors[id(parameter)] = parameter
    linears: dict[str, tuple[int, int]] = {}
    found_encodings: dict[str, str] = {}
    encoded: dict[str, str] = {}
    embeddings: set[str] = set()
    kept: set[str] = set()
    rounded: set[str] = set()
    sizes: dict[int, dict[str, int]] = {}  # bytes of a parameter by use: "stored" or the name of a layer
    for key, parameter in tensors.items():
        of = users[key]
        names = [f"{name}.{leaf}" if name else leaf for name, _, leaf in of]
        types = {stored[name] for name in names if name in stored}
        weight = next((name for name in names if name in (encodings or {})), None)
        keeps = weight is not None and encodings is not None and _keeps(bits, encodings[weight])
        fit = all(
            leaf == "weight" and replaceable(module, is_encoded=weight is not None) for _, module, leaf in of
        )
        sizes[key] = {"stored": parameter.nbytes}
        if len(types) != 1:
            continue
        (kind,) = types
        kept_linear = keeps and all(type(module) is nn.Linear for _, module, _ in of)
        whole = (stored_rows or kept_linear) and fit and kind in HALVES
        if whole and encodings is not None and weight is not None:
            rows, cols = parameter.shape
            sizes[key] = {}
            for name, module, _ in of:
                encoded[name] = weight
                if isinstance(module, nn.Embedding):
                    found_encodings[name] = encodings[weight]
                    sizes[key]["stored"] = encoded_bytes(rows, cols, encodings[weight])
                    continue
                linears[name] = (rows, cols)
                if keeps:
                    found_encodings[name] = encodings[weight]
                    sizes[key][name] = part_bytes((rows, cols, encodings[weight]))
                else:
                    sizes[key][name] = sum(map(part_bytes, _parts(bits, name, rows, cols, decoded=False)))
            kept.update(names)
            continue
        if kind is inputs and all(module in widening for _, module, _ in of):
            kept.update(names)
            sizes[key] = {"stored": parameter.numel() * kind.itemsize}
            continue
        if whole:
            kept.update(names)
            sizes[key] = {"stored": parameter.numel() * kind.itemsize}
        packed = [
            name
            for name, module, leaf in of
            if bits != 16 and leaf == "weight" and type(module) is nn.Linear and packable(module)
        ]
        for name, module, _ in of:
            if type(module) is nn.Linear and (whole or name in packed):
                linears[name] = (parameter.shape[0], parameter.shape[1])
            elif whole:
                embeddings.add(name)
        if bits == AUTO_BITS and (keeps or any(name in decoded for name in names)):
            rounded.update(packed)
        for name in packed:
            parts = _parts(bits, name, *linears[name], decoded=name in rounded)
            sizes[key][name] = sum(map(part_bytes, parts))
        if packed and len(packed) == len(of):
            # Only the packer reads it, in the stored type.
            kept.update(names)
            del sizes[key]["stored"]
            if weight is not None:
                encoded.update(dict.fromkeys(packed, weight))

    def weight_of(module: Any) -> tuple[int, int, bool]:
        """Bytes of a layer's weight, its key, and whether it is packed for this layer."""
        parameter = None if module is None else module._parameters.get("weight")
        if parameter is None:
            return 0, 0, False
        name = next((name for name, user, _ in users[id(parameter)] if user is module), "")
        found = sizes[id(parameter)]
        return found.get(name, found.get("stored", 0)), id(parameter), name in found

    embedding, embedding_key, _ = weight_of(model.get_input_embeddings())
    head, head_key, own = weight_of(model.get_output_embeddings())  # type: ignore[no-untyped-call]
    # A model without an output embedding uses its input embedding as head.
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
        encodings=found_encodings,
        encoded=encoded,
        decoded=frozenset(rounded),
        nbytes=nbytes + sum(buffer.nbytes for buffer in model.buffers()),
        head_bytes=head,
        in_layers=in_layers,
        itemsize=in_layers / weights if in_layers and weights else 2.0,
    )
