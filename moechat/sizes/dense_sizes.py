"""Sizes of the dense (non-expert) weights of a model: how many there are, and what they take in memory."""

from __future__ import annotations

from dataclasses import dataclass

from moechat.geometry import DenseBits

# Most bytes that a GPU unpacks at a time: a 4096 x 4096 matrix of 16 bits.
_UNPACKED_BYTES = 32 << 20


@dataclass(frozen=True)
class DenseWeights:
    """Number of dense weights, by part of the model.

    Attributes:
        attention: Attention (or a family's replacement for it) and norms of all layers.
        shared: Shared experts.
        routers: Routers of all layers.
        feed_forward: Feed-forward parts of layers without routed experts.
        embedding: Token embedding; 0 if it is tied to the head.
        head: Final norm, head, and all other weights outside the layers.
    """

    attention: int
    shared: int
    routers: int
    feed_forward: int
    embedding: int
    head: int

    @property
    def in_layers(self) -> int:
        """Weights between the embedding and the final norm."""
        return self.attention + self.shared + self.routers + self.feed_forward

    @property
    def total(self) -> int:
        """All dense weights."""
        return self.in_layers + self.embedding + self.head


@dataclass(frozen=True)
class DenseSizes:
    """What the dense weights take in memory, in the form that :func:`moechat.models.dense_form.choose_form`
    gives them.

    Attributes:
        bits: Wanted bits of a weight; see :class:`moechat.models.dense_form.DenseForm`.
        activation_bits: Type of the inputs in products with packed weights.
        title: Bits or encodings of the weights by the kind of their layer, for people.
        nbytes: Bytes of all weights and buffers in memory, shared memory counted once.
        head_bytes: Bytes of the head, included in ``nbytes``.
        in_layers: Bytes of weights between the embedding and the head, included in ``nbytes``.
        itemsize: Mean bytes per weight in the layers.
        largest: Weights of the largest packed matrix, its rows padded to 16; 0: none is packed.
        widest: Columns of the widest one.
    """

    bits: DenseBits
    activation_bits: int
    title: str
    nbytes: int
    head_bytes: int
    in_layers: int
    itemsize: float
    largest: int
    widest: int

    def unpacked_bytes(self, itemsize: int) -> int:
        """Size of the GPU buffer for unpacking packed matrices in products of many tokens; 0 if none is
        packed.

        It holds the largest matrix, up to 32 MiB, and at least 16 rows of the widest one as float32.

        Args:
            itemsize: Bytes of an element in the model's type.
        """
        return max(min(self.largest * itemsize, _UNPACKED_BYTES), 16 * self.widest * 4)
