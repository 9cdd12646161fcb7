"""Native core: block layout, packing and CPU expert kernels (sources in ``native/``).

Every call that computes drops the GIL. Calls from several threads are safe; they take the one thread pool
in turns.
"""

from typing import Final, TypeAlias

import numpy as np
import numpy.typing as npt

BLOCK_FORMAT_VERSION: Final[int]

_F32: TypeAlias = npt.NDArray[np.float32]
_F16: TypeAlias = npt.NDArray[np.float16]
_U8: TypeAlias = npt.NDArray[np.uint8]
_I32: TypeAlias = npt.NDArray[np.int32]
_U64: TypeAlias = npt.NDArray[np.uint64]
_Biases: TypeAlias = tuple[_F32, _F32, _F32]
_Weights: TypeAlias = npt.NDArray[np.float32] | npt.NDArray[np.float16] | npt.NDArray[np.uint16]

class BlockLayout:
    """Byte map of one block record; the format is described in ``native/src/kernels/block_layout.h``.

    Offsets are bytes from the start of a record, -1 where the field is absent.

    Args:
        hidden_size: Columns of gate and up, rows of down; 1 to 2**20.
        intermediate_size: Neurons of an expert; 1 to 2**20.
        bits: 2, 3, 4, 8 (groups of 64 with fp16 scale and zero) or 16.
        fp16: 16-bit values are fp16 patterns instead of bf16.
        has_bias: Records carry gate, up and down biases.

    Raises:
        ValueError: A value is out of range.
    """

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        bits: int,
        fp16: bool = False,
        has_bias: bool = False,
    ) -> None: ...
    @property
    def hidden_size(self) -> int: ...
    @property
    def intermediate_size(self) -> int: ...
    @property
    def bits(self) -> int: ...
    @property
    def fp16(self) -> bool: ...
    @property
    def has_bias(self) -> bool: ...
    @property
    def hidden_padded(self) -> int:
        """``hidden_size`` rounded up to 64."""
    @property
    def blocks(self) -> int:
        """Blocks of one expert."""
    @property
    def record_bytes(self) -> int:
        """Bytes of one record, a multiple of 4096."""
    @property
    def payload_bytes(self) -> int:
        """Bytes of one record without the padding at its end."""
    @property
    def gate_q(self) -> int: ...
    @property
    def up_q(self) -> int: ...
    @property
    def down_q(self) -> int: ...
    @property
    def gate_sz(self) -> int: ...
    @property
    def up_sz(self) -> int: ...
    @property
    def down_sz(self) -> int: ...
    @property
    def gate_bias(self) -> int: ...
    @property
    def up_bias(self) -> int: ...
    @property
    def down_bias(self) -> int: ...
    @property
    def down_bias_rows(self) -> int:
        """Rows of the expert's down bias that one block owns: block b has rows [b * n, (b + 1) * n)."""

def cpu_features() -> dict[str, bool]:
    """Instruction sets that processor and operating system offer, by name; empty off x86."""

def available_isas() -> list[str]:
    """Kernel builds that can run here, slowest first: ``"portable"``, ``"avx2"``, ``"avx512"``."""

def active_isa() -> str:
    """The kernel build in use: the last of :func:`available_isas`, or what ``MOECHAT_ISA`` names.

    Raises:
        RuntimeError: ``MOECHAT_ISA`` names something unknown or impossible here.
    """

def set_num_threads(n: int) -> None:
    """Threads of the following calls, the calling one included.

    Raises:
        ValueError: ``n`` is not between 1 and 1024.
    """

def num_threads() -> int:
    """Threads in use; at first the physical cores that affinity mask and cgroup leave to this process."""

def pack_expert(
    layout: BlockLayout,
    gate: _Weights,
    up: _Weights,
    down: _Weights,
    biases: _Biases | None,
    out: _U8,
    threads: int | None = None,
) -> None:
    """Writes one expert as block records, quantising below 16 bits.

    The solver is HQQ's (Badri and Shaji, 2023), see ``native/src/kernels/hqq_solver.inc.h``. At 16 bits
    patterns of the layout's own type are copied unchanged; other types are rounded to nearest even, NaN and
    infinities stay.

    Args:
        layout: Target.
        gate: [intermediate, hidden], float32, float16 or uint16 (bfloat16 patterns); any strides.
        up: As ``gate``.
        down: [hidden, intermediate], otherwise as ``gate``.
        biases: Gate [intermediate], up [intermediate] and down [hidden]; exactly when the layout has them.
        out: [blocks, record_bytes], C order, writable; every byte is written.
        threads: Upper limit for this call.

    Raises:
        ValueError: Shapes or types do not match; a weight is not finite or above 65504 (quantised) or becomes
            infinite in 16 bits. The message names matrix, row and column; ``out`` is then undefined.
        RuntimeError: ``MOECHAT_ISA`` cannot be honoured.
    """

def pack_quantized(
    layout: BlockLayout,
    gate_q: _U8,
    gate_s: _F16,
    gate_z: _F16,
    up_q: _U8,
    up_s: _F16,
    up_z: _F16,
    down_q: _U8,
    down_s: _F16,
    down_z: _F16,
    biases: _Biases | None,
    out: _U8,
    threads: int | None = None,
) -> None:
    """Writes one expert, quantised elsewhere with groups of 64 along columns, as block records.

    A weight is ``(q - z) * s``. Padding is added here.

    Args:
        layout: Target, below 16 bits.
        gate_q: Codes [intermediate, hidden], C order.
        gate_s: Scales [intermediate, ceil(hidden / 64)], C order.
        gate_z: Zeros, as ``gate_s``.
        up_q: As ``gate_q``.
        up_s: As ``gate_s``.
        up_z: As ``gate_s``.
        down_q: Codes [hidden, intermediate].
        down_s: Scales [hidden, ceil(intermediate / 64)].
        down_z: Zeros, as ``down_s``.
        biases: As in :func:`pack_expert`.
        out: As in :func:`pack_expert`.
        threads: Upper limit for this call.

    Raises:
        ValueError: Shapes or types do not match, a code exceeds the bits, a scale or zero is not finite.
    """

def unpack_expert(layout: BlockLayout, records: _U8) -> tuple[_F32, _F32, _F32, _Biases | None]:
    """Weights of one expert as the kernels see them, in float32, without padding.

    Args:
        layout: Of the records.
        records: [blocks, record_bytes], C order.

    Returns:
        Gate and up [intermediate, hidden], down [hidden, intermediate], biases or None.

    Raises:
        ValueError: Shape or type does not match.
    """

def moe_forward(
    layout: BlockLayout,
    activation: str,
    alpha: float,
    limit: float,
    x: _F32,
    block_ptr: _U64,
    block_index: _I32,
    block_row: _I32,
    row_start: _I32,
    row_token: _I32,
    row_weight: _F32,
    out: _F32,
) -> None:
    """Adds weighted partial outputs: ``out[t] += w * block(x[t])`` for every entry and token of its row.

    Each element of ``out`` is one sequential chain of fused multiply-adds in list order (multiply and add
    in the portable build), and a block's partial output depends on the block and ``x[t]`` only. Results are
    bitwise equal for any number of threads, any other tokens in the call, and any cut of the list into
    consecutive calls.

    Args:
        layout: Of all records.
        activation: ``"silu"``, ``"gelu"``, ``"gelu_tanh"`` or ``"clamped_swiglu"``.
        alpha: Sigmoid slope of ``"clamped_swiglu"``.
        limit: Clamp of ``"clamped_swiglu"``, above 0.
        x: [tokens, hidden], C order.
        block_ptr: [n] addresses of records. The caller keeps them alive and unchanged; they are not checked.
        block_index: [n] number of the block in its expert (selects its slice of the down bias).
        block_row: [n] row of the CSR below.
        row_start: [rows + 1] first item of each row; starts with 0, ends with the number of items.
        row_token: [items] token numbers.
        row_weight: [items] router weights.
        out: [tokens, hidden], C order, writable; must not overlap ``x``.

    Raises:
        ValueError: Shapes, types or indices do not match, or an address is 0; nothing has been computed then.
        RuntimeError: ``MOECHAT_ISA`` cannot be honoured.
    """

def apply_activation(activation: str, alpha: float, limit: float, gate: _F32, up: _F32) -> _F32:
    """``act(gate) * up`` as :func:`moe_forward` computes it between the two halves of a block.

    Args:
        activation: As in :func:`moe_forward`.
        alpha: As in :func:`moe_forward`.
        limit: As in :func:`moe_forward`.
        gate: [n].
        up: [n].

    Returns:
        [n] float32.

    Raises:
        ValueError: Unknown activation, wrong shapes or types.
    """
