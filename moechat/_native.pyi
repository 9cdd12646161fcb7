"""Native core: block layout, packing, CPU expert kernels, links and the split-expert cache (``native/``).

Every call that computes drops the GIL. Calls are safe from several threads; they share one thread pool, one
call at a time.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Final, Literal, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

BLOCK_FORMAT_VERSION: Final[int]
DEMAND: Final[int]
NEXT: Final[int]
LATER: Final[int]

_F32: TypeAlias = npt.NDArray[np.float32]
_U8: TypeAlias = npt.NDArray[np.uint8]
_I32: TypeAlias = npt.NDArray[np.int32]
_I64: TypeAlias = npt.NDArray[np.int64]
_U16: TypeAlias = npt.NDArray[np.uint16]
_U32: TypeAlias = npt.NDArray[np.uint32]
_U64: TypeAlias = npt.NDArray[np.uint64]
_F64: TypeAlias = npt.NDArray[np.float64]
_Biases: TypeAlias = tuple[_F32, _F32 | None, _F32]
_RoutingCounts: TypeAlias = tuple[int, _I64, _I64, _I64, _I64, _I64]
_HitKind: TypeAlias = Literal["full", "prefetch", "top", "miss"]
_Weights: TypeAlias = npt.NDArray[np.float32] | npt.NDArray[np.float16] | npt.NDArray[np.uint16]

class Gate:
    """The computation between the projections of an expert; see :class:`moechat.geometry.Gate`.

    Args:
        activation: ``"silu"``, ``"gelu"``, ``"gelu_tanh"`` or ``"relu2"``.
        alpha: Slope of the sigmoid of ``"silu"``.
        limit: Clamp, above 0; infinite: none.
        offset: Added to up.
        clamps_result: The limit applies to ``act(gate)``, not to gate.
        gated: Multiplied by up; else that is all, as in experts without a gate projection.

    Raises:
        ValueError: Unknown activation, or the limit is not above 0.
    """

    def __init__(
        self,
        activation: str = "silu",
        *,
        alpha: float = 1.0,
        limit: float = ...,
        offset: float = 0.0,
        clamps_result: bool = False,
        gated: bool = True,
    ) -> None: ...

class BlockLayout:
    """Byte offsets of the fields of a block record (``native/src/kernels/layout/block_layout.h``).

    Offsets are bytes from the start of a record, -1 where the field is absent.

    Args:
        hidden_size: Columns of gate and up, rows of down; 1 to 2**20.
        intermediate_size: Neurons of an expert; 1 to 2**20.
        bits: 2, 3, 4, 6, 8 or 16.
        fp16: 16-bit values are fp16 patterns instead of bf16.
        has_bias: Records carry gate, up and down biases.
        gated: Records carry gate and up; else one input projection, called gate, and no up.

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
        gated: bool = True,
    ) -> None: ...
    @property
    def hidden_size(self) -> int: ...
    @property
    def intermediate_size(self) -> int: ...
    @property
    def bits(self) -> int:
        """Of a code; of kept encodings, of gate and up."""
    @property
    def kept(self) -> bool:
        """The records keep the encodings of a file; see :func:`kept_layout`."""
    @property
    def encoding(self) -> str:
        """The name of the encoding of gate and up."""
    @property
    def down_encoding(self) -> str: ...
    @property
    def fp16(self) -> bool: ...
    @property
    def has_bias(self) -> bool: ...
    @property
    def gated(self) -> bool: ...
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
    def gate_super(self) -> int: ...
    @property
    def up_super(self) -> int: ...
    @property
    def down_super(self) -> int: ...
    @property
    def gate_bias(self) -> int: ...
    @property
    def up_bias(self) -> int: ...
    @property
    def down_bias(self) -> int: ...
    @property
    def down_bias_rows(self) -> int:
        """Rows n of the expert's down bias in each block: block b holds rows [b * n, (b + 1) * n)."""

def cpu_features() -> dict[str, bool]:
    """Instruction sets that the processor and the operating system support, by name; empty except on x86."""

def available_isas() -> list[str]:
    """Instruction sets that the kernels are compiled for and this processor runs, slowest first.

    Of ``"portable"``, ``"avx2"``, ``"avx2-vnni"``, ``"avx512"``, ``"avx512-vnni"``, ``"amx"``.
    """

def built_isas() -> list[str]:
    """Instruction sets that the kernels are compiled for, whether or not this processor runs them.

    May contain ``"amx-emulated"``, which tests select by name.
    """

def active_isa() -> str:
    """Instruction set in use: the last of :func:`available_isas`, or the one that ``MOECHAT_ISA`` names.

    Raises:
        RuntimeError: ``MOECHAT_ISA`` names an instruction set that is unknown, cannot run here,
            or is not compiled in.
    """

def huge_empty(nbytes: int) -> _U8:
    """Allocate a large, long-lived buffer: uint8 ``[nbytes]`` of zeros, in huge pages where available.

    Aligned to 4096 bytes, or to 2 MiB from a size of 2 MiB. Pages are committed when they are first written.
    Freed with the last array that views it; forked children inherit it.

    Raises:
        ValueError: ``nbytes`` is negative or above 2**46.
        MemoryError: The system has not enough memory.
    """

def prefer_huge_pages(data: _U8) -> None:
    """Request huge pages for the parts of a mapped file that are read from now on.

    Args:
        data: Contiguous uint8, any shape.
    """

def read_ahead(data: _U8) -> None:
    """Read the pages of a mapped file that are not in memory.

    Args:
        data: Contiguous uint8, any shape. No effect if it is not a mapped file.
    """

def crc32c_ways() -> list[str]:
    """Ways to compute CRC-32C that this processor has, the best one last: ``portable``, ``sse4.2``,
    ``avx512``.
    """

def crc32c(data: _U8, before: int = 0, way: str = "") -> int:
    """CRC-32C (Castagnoli) of bytes.

    Args:
        data: Contiguous uint8, any shape.
        before: The value of the bytes before these.
        way: One of :func:`crc32c_ways`; empty: the best one. All give the same.

    Raises:
        ValueError: The processor does not have that way.
    """

def record_checksums(data: _U8, record_bytes: int) -> npt.NDArray[np.uint32]:
    """CRC-32C of each of the records that lie one behind the other.

    Args:
        data: Contiguous uint8, any shape.
        record_bytes: Bytes of a record.

    Returns:
        uint32 ``[records]``.

    Raises:
        ValueError: These are not whole records.
    """

class MappedGuard:
    """Keeps the process alive when a mapped file can no longer be read, see
    ``native/src/memory/mapped_guard.h``: what is lost reads as zeros.
    """

    def __init__(self, memory: object) -> None:
        """Guard the memory of a buffer, which must stay mapped as long as the guard exists."""
    def lost(self) -> int:
        """Offset of the first lost byte; -1: nothing is lost."""

def mapping_losses() -> int:
    """Losses in all guarded mappings since the process began."""

def prewake() -> None:
    """Wake sleeping worker threads ahead of a computing call expected within some 100 microseconds.

    Costs a system call if a worker sleeps, otherwise almost nothing.
    """

def available_cores() -> int:
    """Physical cores that this process may use now, by its affinity mask and cgroup; at least 1."""

def set_num_threads(n: int) -> None:
    """Set the number of threads of later calls, including the calling thread.

    Raises:
        ValueError: ``n`` is not between 1 and 1024.
    """

def set_weight_streams(n: int) -> None:
    """Set how later calls with few tokens read weights; the default is what is faster on this processor.

    Results do not depend on it.

    Args:
        n: 2: gate and up of an expert, or two parts of a dense matrix, side by side. 1: one after the other,
            dense matrices with one or two tokens, experts where one token takes whole blocks.

    Raises:
        ValueError: ``n`` is another number.
    """

def num_threads() -> int:
    """Threads in use; initially :func:`available_cores`."""

def check_file_rows(encoding: str, rows: _U8) -> None:
    """Check that all scales of a GGUF file's rows [rows, bytes] are finite.

    Raises:
        ValueError: One is not, the message says where; or they are no whole blocks.
    """

def kept_encodings() -> dict[str, tuple[int, int, int]]:
    """Encodings of files that blocks can keep, by name: bits of a code, columns and bytes of a block.

    See ``native/src/kernels/layout/kept_encodings.h``.
    """

def kept_form(encoding: str) -> dict[str, int | float | str | list[int]]:
    """What the kernels have to know about a kept encoding, as ``KeptForm`` has it in
    ``native/src/kernels/layout/kept_encodings.h``.

    Returns:
        ``code_bits``; ``steps`` of 64 bytes that the q of a tile's group has; ``table``: ``none``, ``iq4``,
        ``e2m1``, ``e4m3`` or ``grid``; ``values``: those of the 16 codes of ``iq4`` and ``e2m1`` less the
        zero, else empty; ``subs``: sub-blocks of a group; ``words``: kind of the scale words, by the names of
        the table there; ``unit``: what ``odd`` scales are multiplied with; ``zero``; ``super_halves``: fp16
        values of a row in the super field, an fp32 or a word being two; ``super_groups``: groups that share
        them, in gate, up and dense matrices.

    Raises:
        ValueError: The encoding is unknown.
    """

def kept_grid(encoding: str) -> _U32:
    """The grid of a kept encoding: codes of neighbouring columns, without signs and deltas.

    Returns:
        ``[numbers, dwords]``; byte k of dword d of a number is the code of its column 4d + k.

    Raises:
        ValueError: The encoding is unknown or has no grid.
    """

def decode_file_rows(encoding: str, rows: _U8, out: _F32 | _U16) -> float:
    """Decode rows of a matrix in a kept encoding.

    Args:
        encoding: One of :func:`kept_encodings`.
        rows: uint8 [rows, bytes of a row]; rows may be strided.
        out: float32 [rows, columns], or uint16 for float16 patterns; C order, writable.

    Returns:
        The largest magnitude, before it is rounded; NaN or infinite if a value is.

    Raises:
        ValueError: The shapes do not fit, or the encoding is unknown.
    """

def kept_layout(
    hidden_size: int,
    intermediate_size: int,
    gate_up: str,
    down: str,
    has_bias: bool = False,
    record_bytes: int = 0,
    gated: bool = True,
) -> BlockLayout:
    """The layout of records that keep encodings.

    Args:
        hidden_size: As :class:`BlockLayout`.
        intermediate_size: As :class:`BlockLayout`.
        gate_up: Encoding of gate and up; one of :func:`kept_encodings`.
        down: Encoding of down.
        has_bias: As :class:`BlockLayout`.
        record_bytes: Least size of a record, a multiple of 4096, so that layers can have records of one size.
        gated: As :class:`BlockLayout`.

    Raises:
        ValueError: An encoding is unknown or ``fp8``, a value is out of range, or rows are not whole blocks.
    """

def pack_kept(
    layout: BlockLayout,
    gate: _U8,
    up: _U8 | None,
    down: _U8,
    biases: _Biases | None,
    out: _U8,
    threads: int | None = None,
) -> None:
    """Write one expert as block records with the values that it has in a file.

    Args:
        layout: One of :func:`kept_layout`.
        gate: uint8 [intermediate, bytes of a row]; rows may be strided.
        up: As ``gate``; ``None`` if the layout has none.
        down: uint8 [hidden, bytes of a row].
        biases: As :func:`pack_expert`.
        out: [blocks, record_bytes], C order, writable; every byte is written.
        threads: Upper limit for this call.

    Raises:
        ValueError: The shapes do not fit, or a scale is not finite; the message names its place.
    """

def pack_expert(
    layout: BlockLayout,
    gate: _Weights,
    up: _Weights | None,
    down: _Weights,
    biases: _Biases | None,
    out: _U8,
    threads: int | None = None,
    solver: str = "least-squares",
    feedback: tuple[tuple[_F32, _F32], tuple[_F32, _F32]] | None = None,
) -> None:
    """Write one expert as block records, quantised if the layout has fewer than 16 bits.

    At 16 bits, values of the layout's own type are copied bit for bit; other types are rounded to nearest
    even, NaN and infinities are kept.

    Args:
        layout: Format of the records.
        gate: [intermediate, hidden], float32, float16 or uint16 (bfloat16 patterns); any strides.
        up: As ``gate``; ``None`` if the layout has none.
        down: [hidden, intermediate], otherwise as ``gate``.
        biases: Gate [intermediate], up [intermediate] and down [hidden]; ``None`` if the layout has none.
        out: [blocks, record_bytes], C order, writable; every byte is written.
        threads: Upper limit for this call.
        solver: How scale and zero of a group are found: ``least-squares``, or ``half-quadratic`` (HQQ, Badri
            and Shaji, 2023); see ``native/src/kernels/experts/least_squares.inc.h`` and ``hqq_solver.inc.h``.
        feedback: For the columns of gate and up, and for those of down: importances [cols] of squared errors,
            and factors [blocks, width, width] with which columns of a block make good the rounding errors of
            those before them (GPTQ, Frantar et al. 2023, section 3); only above the diagonal they are read.
            Width is a multiple of 64. For ``least-squares`` only.

    Raises:
        ValueError: Shapes or types do not match; a weight is not finite, or above 65504 (6 and 8 bits) or
            4096 (2 to 4), or becomes infinite in 16 bits. The message names matrix, row and column; ``out``
            is then undefined.
        RuntimeError: ``MOECHAT_ISA`` cannot run on this machine.
    """

def pack_quantized(
    layout: BlockLayout,
    gate_q: _U8,
    gate_s: _U32,
    up_q: _U8 | None,
    up_s: _U32 | None,
    down_q: _U8,
    down_s: _U32,
    biases: _Biases | None,
    out: _U8,
    threads: int | None = None,
) -> None:
    """Write one expert, already quantised in groups of 64 along the columns, as block records.

    At 6 and 8 bits a weight is ``(q - zero) * scale``; at 2 to 4, ``(q * factor - offset) * step``
    with a factor and an offset for each half of a group. The matrices are padded here.

    Args:
        layout: Format of the records, below 16 bits.
        gate_q: Codes [intermediate, hidden], C order.
        gate_s: Scales [intermediate, ceil(hidden / 64)], C order: scale words (:func:`fit_scale_words`), or
            at 6 and 8 bits the float16 pattern of the scale plus 65536 times that of the zero.
        up_q: As ``gate_q``; ``None`` if the layout has no up.
        up_s: As ``gate_s``.
        down_q: Codes [hidden, intermediate].
        down_s: Scales [hidden, ceil(intermediate / 64)], as ``gate_s``.
        biases: As in :func:`pack_expert`.
        out: As in :func:`pack_expert`.
        threads: Upper limit for this call.

    Raises:
        ValueError: Shapes or types do not match, a code exceeds the bits, at 6 or 8 bits a scale or zero is
            not finite.
    """

def max_quantisable(bits: int) -> float:
    """Largest magnitude of a weight that can be quantised in ``bits`` bits."""

def fit_scale_words(bits: int, scales: _F32, zeros: _F32) -> _U32:
    """Return the scale words nearest to wanted scales and zeros of the two halves of groups.

    Args:
        bits: 2, 3 or 4.
        scales: [groups, 2], at least 0; a half with scale 0 gets the one value 0.
        zeros: [groups, 2], in codes.

    Returns:
        uint32 [groups]; see ``native/src/kernels/layout/block_layout.h``.

    Raises:
        ValueError: Shapes or types do not match, a number is not finite, or a scale is below 0 or above 3600.
    """

def read_scale_words(words: _U32) -> tuple[_F32, _I32, _I32]:
    """Return what scale words [groups] stand for: steps [groups], factors and offsets [groups, 2]."""

def unpack_expert(layout: BlockLayout, records: _U8) -> tuple[_F32, _F32 | None, _F32, _Biases | None]:
    """Return the dequantised weights of one expert, without padding, as the kernels use them.

    Args:
        layout: Format of the records.
        records: [blocks, record_bytes], C order.

    Returns:
        float32 gate and up [intermediate, hidden], down [hidden, intermediate], biases or None. Up is None if
        the layout has none.

    Raises:
        ValueError: Shape or type does not match.
    """

def moe_forward(
    layout: BlockLayout,
    gate: Gate,
    x: _F32,
    block_ptr: _U64,
    block_index: _I32,
    block_row: _I32,
    row_start: _I32,
    row_token: _I32,
    row_weight: _F32,
    out: _F32,
    activation_bits: int = 16,
) -> None:
    """Add weighted partial outputs: ``out[t] += w * block(x[t])`` for each listed block and token of its row.

    Each element of ``out`` is one sequential chain of fused multiply-adds in list order (multiply and add
    in the portable build), and a block's partial output depends on the block and ``x[t]`` only. Results are
    bitwise equal for any number of threads, whatever other tokens are in the call, and however the list is
    split into consecutive calls.

    Args:
        layout: Format of all records.
        gate: The computation between the projections of a block.
        x: [tokens, hidden], C order.
        block_ptr: [n] addresses of records, unchecked; the caller keeps the records alive and unchanged.
        block_index: [n] number of the block in its expert (selects its slice of the down bias).
        block_row: [n] row of each block in the CSR lists below.
        row_start: [rows + 1] first item of each row; starts with 0, ends with the number of items.
        row_token: [items] token numbers.
        row_weight: [items] router weights.
        out: [tokens, hidden], C order, writable; must not overlap ``x``.
        activation_bits: 16 or 8: ``x`` and the activations are quantised to so many bits, in groups of 64,
            and products are integer (``native/src/kernels/isa/kernel_api.h``). 32: both stay float32.
            Ignored for 16-bit weights, whose inputs are always float32.

    Raises:
        ValueError: Shapes, types or indices do not match, or an address is 0; nothing has been computed then.
        RuntimeError: ``MOECHAT_ISA`` cannot run on this machine.
    """

def apply_gate(spec: Gate, gate: _F32, up: _F32) -> _F32:
    """Compute the gate as :func:`moe_forward` does between the projections of a block.

    Args:
        spec: The gate.
        gate: [n].
        up: [n].

    Returns:
        [n] float32.

    Raises:
        ValueError: Wrong shapes or types.
    """

class LinearLayout:
    """Byte offsets of a dense matrix [rows, cols], quantised or with the values of a GGUF file
    (``native/src/kernels/dense/linear.h``).

    Args:
        rows: 1 to 2^20.
        cols: 1 to 2^20.
        bits: 2, 3, 4, 6 or 8; or the name of a kept encoding, of which ``cols`` must be whole blocks.

    Raises:
        ValueError: A size, ``bits`` or the encoding is out of range.
    """

    def __init__(self, rows: int, cols: int, bits: int | str, /) -> None: ...
    @property
    def rows(self) -> int: ...
    @property
    def cols(self) -> int: ...
    @property
    def bits(self) -> int:
        """Of a code."""
    @property
    def encoding(self) -> str | None:
        """The kept encoding; ``None``: quantised."""
    @property
    def sz(self) -> int:
        """Offset of scales and zeros; the codes start at 0."""
    @property
    def super(self) -> int:
        """Offset of the scales of blocks of 256 columns; that of :attr:`sz` if the encoding has none."""
    @property
    def nbytes(self) -> int: ...
    def first_rows(self, rows: int) -> LinearLayout:
        """Layout of the first rows of a matrix, in the data of all.

        Args:
            rows: A multiple of 16, at most :attr:`rows`.

        Raises:
            ValueError: It is not.
        """

def pack_linear(
    layout: LinearLayout, matrix: _Weights, threads: int = 0, solver: str = "least-squares"
) -> _U8:
    """Quantise a matrix as :func:`pack_expert` does.

    Args:
        layout: Format of the result.
        matrix: [rows, cols], any strides: float32, float16, or uint16 holding bfloat16 patterns.
        threads: Most worker threads; 0 sets no limit.
        solver: As in :func:`pack_expert`.

    Returns:
        uint8 [layout.nbytes], aligned to 64 bytes. Copies should be aligned too, for speed.

    Raises:
        ValueError: A weight is not finite, or above 65504 (6 and 8 bits) or 4096 (2 to 4); shapes or
            types do not match.
        RuntimeError: ``MOECHAT_ISA`` cannot run on this machine.
    """

def pack_kept_linear(layout: LinearLayout, rows: _U8, out: _U8) -> None:
    """Rearrange the rows of a GGUF file; the values stay the same.

    Args:
        layout: One of a kept encoding.
        rows: [rows, bytes]; the rows may be apart.
        out: uint8 [layout.nbytes], overwritten.

    Raises:
        ValueError: A scale is not finite; shapes or types do not match.
    """

def unpack_linear(layout: LinearLayout, data: _U8) -> _F32:
    """Return the dequantised values of a packed matrix, float32 [rows, cols].

    Args:
        layout: Format of the data.
        data: uint8 [layout.nbytes].

    Raises:
        ValueError: Shape or type does not match.
    """

def linear_forward(
    layout: LinearLayout,
    data: _U8,
    x: _F32,
    bias: _F32 | None,
    out: _F32,
    activation_bits: int = 16,
) -> None:
    """Compute ``out = x @ W.T + bias`` over a packed matrix.

    A row of ``out`` depends on its row of ``x`` only: bitwise equal for any number of threads.

    Args:
        layout: Format of the data.
        data: uint8 [layout.nbytes].
        x: [tokens, cols], C order.
        bias: [rows] or None.
        out: [tokens, rows], C order, overwritten; must not overlap ``x``.
        activation_bits: As in :func:`moe_forward`.

    Raises:
        ValueError: Shapes, types or ``activation_bits`` do not match.
        RuntimeError: ``MOECHAT_ISA`` cannot run on this machine.
    """

ROWS16_MAX_TOKENS: int

def rows16_forward(weights: _U16, is_fp16: bool, x: _F32, bias: _F32 | None, out: _F32) -> None:
    """Compute ``out = x @ weights.T + bias`` over 16-bit weights in the layout of a checkpoint.

    Products and sums are float32. A row of ``out`` depends on its row of ``x`` only: bitwise equal for any
    number of threads (``native/src/kernels/dense/rows16.inc.h``).

    Args:
        weights: uint16 [rows, cols], C order: bfloat16 or float16 patterns.
        is_fp16: ``weights`` holds float16 patterns, otherwise bfloat16.
        x: [tokens, cols], C order; at most ``ROWS16_MAX_TOKENS`` tokens.
        bias: [rows], or ``None``.
        out: [tokens, rows], C order, overwritten; must not overlap the others.

    Raises:
        ValueError: Shapes or types do not match, or there are too many tokens.
        RuntimeError: ``MOECHAT_ISA`` cannot run on this machine.
    """

def stream_read_rate(data: _U8, threads: int, seconds: float) -> float:
    """Measure the memory read bandwidth in bytes a second: the fastest of several passes.

    Args:
        data: uint8, C-contiguous, at least 4096 bytes; larger than the CPU caches to measure memory.
        threads: Threads that read a part each, at most :func:`num_threads`.
        seconds: Passes are repeated for this time, at least twice.

    Raises:
        ValueError: An argument is out of range, or ``data`` has another type.
        KeyboardInterrupt: Ctrl-C between two passes (or the exception that the signal handler raises).
    """

class Link:
    """Moves block records from the far tier into pages; made by `file_link`, `cuda_link` and `sim_link`.

    An `ExpertRunner` takes ownership of the link; after that every call below raises ValueError. A transfer
    is identified by its slot, a number below the ``slots`` of `open`. Unfinished transfers have distinct
    slots; a transfer is unfinished until `poll` has returned its completion. Queued transfers start by
    priority (DEMAND 0, NEXT 1, LATER 2), and within a priority in order of submission. All calls are safe
    from any thread; those that wait drop the GIL. Contract: ``native/src/link/link.h``.
    """

    def name(self) -> str:
        """``file (io_uring)``, ``file (threads)`` or ``sim``."""
    def describe(self, region: int, offset: int) -> str:
        """Return the source of these bytes for messages: ``FILE at byte N``.

        Raises:
            IndexError: There is no such region.
        """
    def regions(self) -> int:
        """Number of regions, which are numbered from 0."""
    def region_bytes(self, region: int) -> int:
        """Bytes of a region.

        Raises:
            IndexError: There is no such region.
        """
    def open(self, slots: int) -> None:
        """Make slots 0 to ``slots`` - 1 available; called once, before the first `submit`.

        Raises:
            RuntimeError: The link is open already.
            ValueError: ``slots`` is not positive.
        """
    def submit(self, transfers: Sequence[tuple[int, int, int, int, int]], target: _U8) -> None:
        """Queue transfers into rows of ``target``, and start as many as there is room for.

        Args:
            transfers: (slot, region, offset, bytes, priority) each; the bytes go to ``target[slot]``.
            target: uint8 [slots, page_bytes], C-contiguous, writable; kept alive by the link, which writes
                to it until the transfer completes. Direct reads require rows aligned to 4096 bytes.

        Raises:
            ValueError: A transfer is out of range or its slot is in use; nothing was queued.
            RuntimeError: The link is not open, has failed, or was stopped.
        """
    def cancel(self, slot: int) -> bool:
        """Cancel a queued transfer; True if it had not started, in which case it has no completion."""
    def promote(self, slot: int, priority: int) -> None:
        """Move a queued transfer to the end of a higher priority's queue; no effect on any other."""
    def poll(self) -> list[tuple[int, int]]:
        """Return completions since the last call, (slot, error) each; error is 0 or an errno."""
    def wait(self, seconds: float) -> bool:
        """Wait until `poll` has completions (True), the limit has passed, or the link stopped or failed."""
    def failure(self) -> str:
        """Return the reason why the whole link has failed; empty if it has not."""
    def stats(self) -> dict[str, float]:
        """Return counters since the start.

        ``bytes_*`` and ``transfers_*`` (finished without an error) for ``demand``, ``next``, ``later``;
        ``operations`` (reads or copies issued), ``errors``, ``cancelled``, ``queued`` (now), ``in_flight``
        (bytes, now), ``busy_seconds`` (with at least one transfer in flight), ``bandwidth`` (bytes a second
        while busy, a moving estimate).
        """
    def fills_first(self, stream: int, slots: _U32, seconds: float) -> bool:
        """Order later work of a stream after the transfers into these slots, on the GPU.

        Args:
            stream: CUstream.
            slots: uint32 [n], submitted and not cancelled. Finished and failed transfers impose no order.
            seconds: How long to wait for all of them to have started.

        Returns:
            False if they had not all started in time; the stream is then unchanged.

        Raises:
            RuntimeError: The link has failed or was stopped.
            ValueError: The link copies into host memory.
        """
    def reads_first(self, stream: int, slots: _U32) -> None:
        """Order later transfers into these slots after the work already queued in a stream.

        Args:
            stream: CUstream.
            slots: uint32 [n].

        Raises:
            RuntimeError: The link has failed.
            ValueError: The link copies into host memory.
        """
    def stop(self, seconds: float) -> bool:
        """Cancel queued transfers and wait until none is in flight.

        Returns:
            True: no target will be written to any more. False: a transfer is stuck.
        """

def file_link(
    regions: Sequence[tuple[str, int, int]],
    io: str = "auto",
    direct: bool = True,
    in_flight_bytes: int = 0,
    operation_bytes: int = 0,
    reader_threads: int = 0,
    checksums: Sequence[npt.NDArray[np.uint32] | None] = (),
    record_bytes: int = 0,
) -> Link:
    """A link that reads files.

    Args:
        regions: (path, offset, bytes) each; offset and bytes in multiples of 4096.
        io: ``uring``, ``threads``, or ``auto``: io_uring where available.
        direct: Read past the page cache (O_DIRECT) where the file system allows it.
        in_flight_bytes: Most bytes in flight; 0: a measured default.
        operation_bytes: Most bytes of one read, which may merge adjacent transfers; 0: a measured default.
        reader_threads: Number of threads of ``threads``; 0: default.
        checksums: For each region :func:`record_checksums` of it, or None; empty: for none. Records that
            differ after a second read fail with EBADMSG. Transfers of such regions are whole records.
        record_bytes: Bytes of a record.

    Raises:
        OSError: A file cannot be opened (its name is in ``filename``), or ``uring`` is not available
            (``filename`` is ``io_uring``).
        ValueError: A region is not aligned or lies beyond its file; an option is out of range.
    """

class CudaUnavailableError(RuntimeError):
    """There is no NVIDIA driver, no GPU, or the driver is unusable; the message has the reason."""

class CudaError(RuntimeError):
    """A call to the driver failed.

    Attributes:
        code: The driver's error number.
        sticky: The error is permanent: this process cannot use the GPU any more.
    """

    code: int
    sticky: bool

def cuda_driver_version() -> int:
    """CUDA version that the driver supports, such as 12080.

    Raises:
        CudaUnavailableError: There is no usable driver.
    """

class CudaKernel:
    """A kernel that another library has built and loaded, launched by the driver.

    Args:
        function: Handle (CUfunction), of a module that stays loaded.
        threads: Of a block.
        shared_bytes: Dynamic shared memory of a block.
        kinds: Of each parameter: ``p`` (pointer), ``i`` (int32) or ``f`` (float32).

    Raises:
        ValueError: The function takes other parameters, or the driver cannot tell (it can from CUDA 12.4 on).
        CudaUnavailableError: There is no usable driver.
    """

    def __init__(self, function: int, threads: int, shared_bytes: int, kinds: str) -> None: ...
    def __call__(self, stream: int, x: int, y: int, z: int, *values: float) -> None:
        """Launch it in the current context.

        Args:
            stream: Handle (CUstream).
            x: Blocks in each direction.
            y: Likewise.
            z: Likewise.
            values: One for each parameter; addresses as integers.

        Raises:
            ValueError: There are more or fewer values than parameters.
            CudaError: The driver refused.
        """

class PreparedLaunch:
    """A kernel with its arguments, for :class:`DeviceLayers`.

    Args:
        kernel: The kernel.
        grid: Blocks in each direction.
        values: As :meth:`CudaKernel.__call__`. In place of what is known at the launch, its name: ``clear``,
            or a list of ``native/src/offload/device_lists.h``: ``row_item``, ``item_token``, ``item_weight``,
            ``token_item``, ``entry_page``, ``entry_slot``, ``row_entry``, ``row_block``.

    Raises:
        ValueError: A name is not known, or a value does not fit its parameter.
    """

    def __init__(self, kernel: CudaKernel, grid: tuple[int, int, int], values: list[float | str]) -> None: ...
    def __call__(self, stream: int) -> None:
        """Launch it in the current context, where nothing is a name.

        Raises:
            ValueError: Something is.
            CudaError: The driver refused.
        """

class LaunchClocks(Protocol):
    """See :class:`moechat.offload.gpu_clocks.GpuClocks`."""

    def begin_launch(self, nbytes: int) -> None: ...
    def end_launch(self) -> None: ...

class DeviceLayers:
    """The expert layers of decoded tokens on a GPU (``native/src/offload/device_layers.h``).

    Args:
        runner: Of all these layers.
        device: Index of the GPU.
        picks: Experts of a token.
        work: As :meth:`ExpertRunner.finish_on_device`.
        lists: int32 ``[n]``, pinned: where lists are written.
        lists_there: Address of as many on the GPU.
        launch_size: Elements that the lists of a launch take at most.
        far_out: float32 ``[1, hidden]``, pinned, for the CPU's part; ``None``: it computes none.
        far_there: Address of as many on the GPU.
        layers: Of each layer: its request, int32 in host memory (experts, weights, scores of every place, and
            perhaps inputs); places (distance and layer); whether it has inputs; the launches of blocks, of
            their sum, and of the sum with the CPU's part.

    Raises:
        ValueError: Something does not fit together.
    """

    def __init__(
        self,
        runner: ExpertRunner,
        *,
        device: int,
        picks: int,
        work: int,
        lists: npt.NDArray[np.int32],
        lists_there: int,
        launch_size: int,
        far_out: npt.NDArray[np.float32] | None,
        far_there: int,
        layers: list[
            tuple[
                npt.NDArray[np.int32],
                list[tuple[int, int]],
                bool,
                PreparedLaunch,
                PreparedLaunch,
                PreparedLaunch | None,
            ]
        ],
    ) -> None: ...
    def begin_token(
        self,
        stream: int,
        *,
        predicted: int,
        experts: int,
        max_bytes: int | None,
        ahead: str,
        lookahead: int,
        stream_tokens: int,
        miss: str,
    ) -> None:
        """How the experts of the next layers are loaded.

        Args:
            stream: Handle (CUstream) in which everything is launched.
            predicted: Layers ahead whose scores are used.
            experts: Of a layer that are prefetched at most.
            max_bytes: Of a layer that are prefetched at most; ``None``: no limit.
            ahead: As :func:`plan_speculation`.
            lookahead: Likewise.
            stream_tokens: Likewise.
            miss: As :meth:`ExpertRunner.begin`.

        Raises:
            ValueError: A name is not known.
        """

    def run(self, layer: int, clocks: LaunchClocks | None = None) -> int:
        """Wait for a layer's request and launch its experts.

        Args:
            layer: The layer.
            clocks: Told of the launches of blocks; ``None``: nothing is.

        Returns:
            Bytes of the block records that are computed. -1: the router did not choose ``picks`` different
            experts; the layer has begun, with its prefetches, and nothing has been launched.

        Raises:
            CudaError: The driver refused.
            LinkError, DeviceLostError: As :meth:`ExpertRunner.finish_on_device`.
        """

def cuda_copy_in(stream: int, to: int, source: int, nbytes: int, device: int = 0) -> None:
    """Copy pinned host memory to the GPU's, in the order of a stream.

    Args:
        stream: Handle (CUstream), of torch's context of the GPU.
        to: Address in the GPU's memory.
        source: Address in pinned memory, which must not change until the copy is done.
        nbytes: How much.
        device: Index of the GPU.

    Raises:
        CudaError: The driver refused.
    """

def cuda_finish(stream: int, device: int = 0) -> None:
    """Wait for the work of a stream (CUstream) of a GPU.

    Args:
        stream: Handle; 0: the default one.
        device: Number of the GPU.

    Raises:
        CudaUnavailableError: There is no usable driver or no such GPU.
        CudaError: The work, or other work of this process, has failed.
    """

def cuda_memory(device: int = 0) -> tuple[int, int]:
    """Free and total bytes of a GPU's memory.

    Raises:
        CudaUnavailableError: There is no usable driver or no such GPU.
        CudaError: The driver's query failed.
    """

def cuda_pin(memory: _U8, device: int = 0) -> None:
    """Pin host memory, so that the GPU can copy it directly (DMA); unpin it before it is freed.

    Args:
        memory: uint8, C-contiguous, writable.
        device: Number of the GPU.

    Raises:
        CudaUnavailableError: There is no usable driver or no such GPU.
        CudaError: The memory cannot be pinned.
    """

def cuda_unpin(memory: _U8, device: int = 0) -> None:
    """Undo :func:`cuda_pin`, for the same array."""

def cuda_link(
    regions: Sequence[tuple[_U8 | list[tuple[_U8 | None, int, bool]] | None, int, bool, str, int]],
    device: int = 0,
    in_flight_bytes: int = 0,
    buffer_bytes: int = 0,
    buffers: int = 0,
    threads: int = 0,
    copies: int = 1,
    checksums: Sequence[npt.NDArray[np.uint32] | None] = (),
    record_bytes: int = 0,
) -> Link:
    """A link into a GPU's memory; the rules are in ``native/src/link/cuda_link.h``.

    Args:
        regions: (memory, bytes, pinned, path, offset) each. If memory is None, ``bytes`` are read from the
            file, starting at ``offset``; otherwise path and offset are for messages only. Instead of memory,
            a list of parts (memory, bytes, pinned), in order; those whose memory is None are read from their
            place in the file. Pinned memory of a part was pinned by one call. Memory is kept alive.
        device: Number of the GPU.
        in_flight_bytes: Most bytes of prefetches in flight; 0: default.
        buffer_bytes: Size of a pinned buffer, used for unpinned regions; at least the largest transfer.
        buffers: Number of pinned buffers, fewer if the system does not pin so many; 0: default.
        threads: Threads that fill the buffers; 0: default.
        copies: Times that every block is copied: a link so many times slower, for measurements.
        checksums: As for :func:`file_link`; compared where a record is read from its file.
        record_bytes: As for :func:`file_link`.

    Raises:
        CudaUnavailableError: There is no usable driver or no such GPU.
        CudaError: A driver call failed, such as pinning the buffers.
        OSError: A file cannot be opened.
        ValueError: An option is out of range.
    """

def sim_link(
    regions: Sequence[_U8],
    bandwidth: float = 0.0,
    latency: float = 0.0,
    jitter: float = 0.0,
    seed: int = 0,
    reorder: int = 1,
    in_flight_bytes: int = 0,
    copy: bool = True,
    fault_rate: float = 0.0,
    fail_after: int = -1,
    stall_after: int = -1,
) -> Link:
    """A link that copies from host memory at a set speed, for tests and measurements.

    Args:
        regions: uint8, C-contiguous, of any shape; kept alive.
        bandwidth: Bytes a second; 0: as fast as memory.
        latency: Seconds from the start of a transfer to its first byte, overlapping with other transfers.
        jitter: Largest random delay added to each transfer, in seconds.
        seed: Seed of all random choices.
        reorder: Number of started transfers that may finish in random order; 1: in order.
        in_flight_bytes: Most bytes in flight; 0: default.
        copy: False: transfers take their time but copy nothing.
        fault_rate: Share of transfers that fail with EIO after half of their bytes.
        fail_after: Number of transfers after which the whole link fails; -1: never.
        stall_after: Number of transfers after which none finishes until `Link.stop`; -1: never.

    Raises:
        ValueError: An option is out of range, or a region is not a contiguous uint8 array.
    """

def policy_names() -> list[str]:
    """Names of the eviction policies."""

def demand_hits(policy: EvictionPolicy, experts: _I32, capacities: list[int], admit: str = "key") -> _I64:
    """Count hits of a cache of whole experts without prefetching, for several sizes in one pass.

    Args:
        policy: Ownership passes to this call; it observes every token.
        experts: int32 [tokens, layers, top_k], no expert twice for a token.
        capacities: Experts that a layer can cache, 0 to all.
        admit: What a layer keeps of the experts that it had and those that a token chose: ``key``, those of
            highest key; ``always``, first those chosen; ``best``: see :class:`SplitExpertCache`.

    Returns:
        int64 [capacities, layers]: cached experts among the tokens * top_k choices.

    Raises:
        IndexError: An expert does not exist, or a capacity is out of range.
        ValueError: Wrong dtype or shape, or the policy already has an owner.
    """

class EvictionPolicy:
    """Ranks the experts of each layer for eviction; tracks (layer, expert) pairs, not pages.

    A cache or a runner takes ownership of its policy; every later call on this object raises ValueError.

    Args:
        name: ``forecast`` and ``blend`` (ours), ``lcp`` (MoEpic, section 3.3), ``lru``, ``lfu``, ``discount``
            (MELINOE, definition C.1), ``two_level_lru`` (ExpertFlow, section 3.3.1), ``request``
            (MoE-Infinity, section 5.3), ``map`` (FineMoE, section 4.5), ``static``, ``belady``.
        layers: Expert layers.
        experts: Experts of a layer.
        omega: ``lcp``: tokens after which an unused expert's priority has fallen by the factor ``rho``;
            above 0.
        rho: ``lcp``: above 0, at most 1.
        gamma: ``discount``: factor of the counts at each token; above 0, at most 1.
        ranks: ``static``: float64 [layers, experts]; experts of higher rank are kept.
        future: ``belady``: int32 [tokens, layers, top_k], the experts that will be chosen; -1 for none. A
            layer's clock is its index into the tokens.
        layer_factor: ``request``: counts of layer l weigh ``1 - l / layers``.
        high_span: ``two_level_lru``: layer steps for which a used expert stays in the high list; 0: until the
            layer's next access.
        per_request: ``discount`` and ``lfu``: counts begin anew with each request.

    Raises:
        ValueError: A value is out of range, or ``ranks`` or ``future`` is missing or has another shape.
    """

    def __init__(
        self,
        name: str,
        layers: int,
        experts: int,
        omega: float = 128.0,
        rho: float = 0.25,
        gamma: float = 0.9,
        ranks: _F64 | None = None,
        future: _I32 | None = None,
        layer_factor: bool = True,
        high_span: int = 0,
        per_request: bool = False,
    ) -> None: ...
    @property
    def name(self) -> str: ...
    @property
    def layers(self) -> int: ...
    @property
    def experts(self) -> int: ...
    @property
    def comparable(self) -> bool:
        """Whether keys of different layers may be compared."""
    def access(self, layer: int, experts: _I32, tokens: _I32, pass_tokens: int = 1) -> None:
        """Record the router's choice of experts [n]; advances the layer's clock by ``pass_tokens``.

        Args:
            layer: Expert layer.
            experts: int32 [n], distinct.
            tokens: int32 [n], number of tokens of the pass that chose each expert, at least 1.
            pass_tokens: Tokens of the pass, at least 1.

        Raises:
            IndexError: A layer or an expert does not exist.
            ValueError: A count below 1; wrong dtype or shape.
        """
    def predict_ahead(self, layers: _I32, experts: _I32, scores: _F32 | None = None) -> None:
        """Record what is expected of all later layers, most urgent first.

        Args:
            layers: int32 [n].
            experts: int32 [n].
            scores: float32 [n]: expected shares of the routers' distributions; ``None``: not known.

        Raises:
            IndexError: A layer or an expert does not exist.
            ValueError: Wrong dtype or shape.
        """
    def reach(self, layer: int, steps: int) -> None:
        """Predictions now reach ``steps`` layers ahead of ``layer``, which was accessed last."""
    def begin_request(self) -> None:
        """The accesses that follow belong to another request."""
    def predict(self, layer: int, experts: _I32) -> None:
        """Record a prediction for the next access of ``layer``: experts int32 [n], best first.

        Raises:
            IndexError: A layer or an expert does not exist.
            ValueError: Wrong dtype or shape.
        """
    def keys(self, layer: int) -> _F64:
        """Finite keys [experts] of a layer, a copy; the lowest is evicted first.

        Raises:
            IndexError: The layer does not exist.
        """
    def follow(self, experts: _I32) -> None:
        """Record the choices of many tokens, one after the other, as :meth:`access` does: int32 [tokens,
        layers, top_k], distinct in each layer.

        Raises:
            IndexError: An expert does not exist; nothing is recorded.
            ValueError: Wrong dtype or shape.
        """
    def copy(self) -> EvictionPolicy:
        """A policy in the same state, which from now on changes by itself."""
    def reset(self) -> None:
        """Return to the state after construction."""

class CachePlan:
    """Evictions and fetches decided by :meth:`SplitExpertCache.plan`."""

    @property
    def version(self) -> int:
        """Version of the cache that the plan was made for."""
    @property
    def prefetch(self) -> bool: ...
    @property
    def satisfied(self) -> int:
        """Number of leading requested experts that have pages for all blocks after the plan is committed."""
    @property
    def victims(self) -> list[tuple[int, int, int]]:
        """(layer, expert, blocks): number of blocks to evict, from the last one down."""
    @property
    def fetches(self) -> list[tuple[int | None, int, int, int]]:
        """(page, layer, expert, block); the page is ``None`` until the plan is committed."""

class SplitExpertCache:
    """Maps blocks of experts to pages: the state machine behind the runner, for tests and simulation.

    The caller makes the transfers and reports their results. Rules and invariants are in
    ``native/src/cache/split_cache.h``.

    Args:
        layers: Expert layers.
        experts: Experts of a layer.
        blocks: Blocks of an expert.
        pages: Pages of the slab, one block each.
        page_bytes: Bytes of a page, a multiple of 4096.
        policy: Ownership passes to the cache.
        targets: int32 [layers, 2]: experts that a layer keeps, and blocks of each.
        reserve: Pages that the targets must leave for blocks in transit; at least 1.
        admit: ``key``: the experts with the highest keys are protected; ``always``: the one that was just
            used, in place of the lowest; ``best``: in each layer as the one of these that has had more hits
            lately, which is counted beside (``AdmissionTrial`` in ``native/src/cache/demand.h``).
        victims: ``farthest``: pages come from the layer whose turn is farthest away; ``lowest``: from the
            expert with the lowest key of all layers.

    Raises:
        ValueError: A size is out of range, the targets take more than ``pages - reserve`` pages, or the
            policy has other sizes or already has an owner.
    """

    def __init__(
        self,
        layers: int,
        experts: int,
        blocks: int,
        pages: int,
        page_bytes: int,
        policy: EvictionPolicy,
        targets: _I32,
        reserve: int,
        admit: str = "key",
        victims: str = "farthest",
    ) -> None: ...
    @property
    def layers(self) -> int: ...
    @property
    def experts(self) -> int: ...
    @property
    def blocks(self) -> int: ...
    @property
    def pages(self) -> int: ...
    @property
    def page_bytes(self) -> int: ...
    @property
    def version(self) -> int:
        """Increases with every change."""
    def resident(self, layer: int, expert: int) -> int:
        """Number of leading blocks that are ready. IndexError: no such expert; so for the next three."""
    def assigned(self, layer: int, expert: int) -> int:
        """Number of leading blocks that have a page, ready or being filled."""
    def is_protected(self, layer: int, expert: int) -> bool: ...
    def pins(self, layer: int, expert: int) -> int: ...
    def page(self, layer: int, expert: int, block: int) -> int | None:
        """Page of a block; ``None`` if it has none.

        Raises:
            IndexError: There is no such block.
        """
    def free_pages(self) -> int: ...
    def available(self) -> int:
        """Pages that a demand can take at once: free, or surplus of unpinned experts."""
    def cheapest(self, at: int) -> float:
        """Key of the expert that would lose the next page to a demand of layer ``at``; infinite: none would.

        Raises:
            ValueError: The layer does not exist.
        """
    def expect(self, shares: _F64) -> None:
        """Rank experts that no layer has accessed yet: float64 [layers, experts], shares of tokens.

        Raises:
            ValueError: Wrong dtype or shape.
        """
    def in_flight(self) -> int:
        """Pages whose transfer has not been reported as finished, including orphans and staging pages."""
    def staging(self) -> int: ...
    def orphans(self) -> int:
        """Pages whose expert gave them up before their transfer finished."""
    def counters(self) -> dict[str, int]:
        """``hits_*`` and ``prefill_hits_*`` by hit kind, and the other fields of ``CacheCounters``."""
    def reset_counters(self) -> None: ...
    def targets(self) -> _I32:
        """[layers, 2], a copy."""
    def check(self) -> str:
        """Recount everything; return the first inconsistency found, or an empty string."""
    def keys(self, layer: int) -> _F64:
        """As :meth:`EvictionPolicy.keys` of the cache's policy."""
    def predict(self, layer: int, experts: _I32) -> None:
        """As :meth:`EvictionPolicy.predict` of the cache's policy."""
    def access(
        self, layer: int, experts: _I32, tokens: _I32 | None = None, pass_tokens: int = 1
    ) -> list[_HitKind]:
        """Record the router's choice of experts [n]: update the policy, count hits, pin the experts.

        Args:
            layer: Expert layer.
            experts: int32 [n], distinct.
            tokens: int32 [n], number of tokens of the pass that chose each expert; ``None``: one each.
            pass_tokens: Tokens of the pass; passes with one token have hit counters of their own.

        Raises:
            ValueError: A number is out of range, or an expert occurs twice; nothing has changed.
        """
    def release(self, layer: int, expert: int) -> None:
        """Unpin an expert of an access; admit it to the kept experts if its key is high enough.

        Raises:
            RuntimeError: The expert is not pinned.
            ValueError: There is no such expert.
        """
    def give_up(self, layer: int, expert: int, from_block: int = 0) -> int:
        """Free the blocks of an expert from a number on, protected or not.

        Returns:
            Their number; 0 if it is pinned, or if a block of it is on its way.

        Raises:
            ValueError: The expert does not exist, or the number is negative.
        """
    def plan(
        self,
        layer: int,
        experts: _I32,
        *,
        at: int | None = None,
        prefetch: bool = False,
        max_blocks: int | None = None,
        whole: bool = True,
        preload: bool = False,
    ) -> CachePlan:
        """Decide how the missing blocks of experts [n] get pages; changes nothing.

        Args:
            layer: Layer of the experts.
            experts: int32 [n], distinct; without ``prefetch`` they must be pinned.
            at: Layer that is being computed; ``None``: ``layer``.
            prefetch: The fetches are speculative and may evict less (rules in ``split_cache.h``).
            max_blocks: Most fetches; ``None`` sets no limit.
            whole: Give an expert pages for all of its missing blocks or for none.
            preload: A prefetch that takes free pages only, and is never wasted.

        Raises:
            ValueError: A number is out of range, an expert occurs twice, or a demanded one is not pinned.
        """
    def commit(self, plan: CachePlan) -> list[tuple[int | None, int, int, int]]:
        """Apply a plan; returns its fetches with their pages.

        Raises:
            RuntimeError: The cache has changed since the plan was made; nothing has changed.
        """
    def take_staging(self, at: int) -> int | None:
        """Take a page that belongs to no expert, in flight until reported; ``None`` if none is available.

        Raises:
            ValueError: The layer does not exist.
        """
    def give_staging(self, page: int) -> None:
        """Return a staging page; if its transfer is in flight, it becomes an orphan.

        Raises:
            RuntimeError: The page is not a staging page.
        """
    def landed(self, page: int, error: int = 0) -> bool:
        """Report that the transfer into ``page`` has finished; False if the page was an orphan or staging.

        Raises:
            RuntimeError: The page is not being filled.
        """
    def cancelled(self, page: int) -> None:
        """Report that the transfer into ``page`` was cancelled before it started.

        Raises:
            RuntimeError: The page is not being filled.
        """
    def filling(self, page: int) -> bool:
        """Whether a transfer into the page is in flight. IndexError: no such page."""
    def stale_prefetches(self, layer: int) -> list[tuple[int, int, int, int]]:
        """Prefetches of unpinned experts of ``layer``, in the order in which to cancel them.

        Raises:
            ValueError: The layer does not exist.
        """
    def set_targets(self, targets: _I32) -> None:
        """New targets int32 [layers, 2]; no block moves, protection follows at once.

        Raises:
            ValueError: As for the constructor; nothing has changed.
        """

class LinkError(RuntimeError):
    """A demanded block could not be read, or no transfer finished within the stall limit."""

class DamagedRecordError(LinkError):
    """A demanded block does not have its checksum, read twice.

    Attributes:
        layer: Number among the expert layers.
        expert: The expert.
        block: The block of it.
    """

    layer: int
    expert: int
    block: int

class DeviceLostError(RuntimeError):
    """The link into a GPU has failed: this process cannot use the GPU any more."""

def resident_forward(
    layout: BlockLayout,
    gate: Gate,
    records: _U8,
    x: _F32,
    top_k_index: _I64,
    top_k_weights: _F32,
    out: _F32,
    activation_bits: int = 16,
) -> int:
    """Compute the weighted sum of each token's experts when all records of a layer are in memory.

    ``out[t] = ((0 + acc_1) + acc_2) + ...`` over the token's experts in ascending order, where ``acc_e`` is
    the chain of fused multiply-adds over the blocks of ``e`` from 0. Bitwise equal to
    :meth:`ExpertRunner.finish` for any residency.

    Args:
        layout: Format of the records.
        gate: As in :func:`moe_forward`.
        records: uint8 [experts, blocks, record_bytes], C order.
        x: [tokens, hidden], C order.
        top_k_index: int64 [tokens, k], C order; an index outside the layer selects no expert.
        top_k_weights: [tokens, k], C order.
        out: [tokens, hidden], C order, overwritten; must not overlap ``x``.
        activation_bits: As in :func:`moe_forward`.

    Returns:
        Bytes of block records read.

    Raises:
        ValueError: Shapes or types do not match.
        RuntimeError: ``MOECHAT_ISA`` cannot run on this machine.
    """

class ResidentExperts:
    """:func:`resident_forward` over the records of one layer, with checks made once and inputs by address.

    Args are those of :func:`resident_forward`; ``records`` is kept alive. With ``reads_ahead``, an expert is
    read from the disk as a whole when it is used for the first time: the kernels would fault it in page by
    page, as they do when the system has dropped it from memory later.

    Raises:
        ValueError: Shapes or types do not match.
    """

    def __init__(
        self,
        layout: BlockLayout,
        gate: Gate,
        records: _U8,
        activation_bits: int = 16,
        reads_ahead: bool = False,
    ) -> None: ...
    def read_unused(self, index: Sequence[int]) -> list[int]:
        """Read those of some experts ahead that were not used before, as :meth:`forward` does.

        Args:
            index: Any numbers; those of no expert are left out.

        Returns:
            The experts that are being read, ascending.
        """

    def forward(self, x: int, top_k_index: int, top_k_weights: int, out: int, tokens: int, k: int) -> int:
        """Compute :func:`resident_forward` without checks. All arrays are in C order.

        Args:
            x: Address of float32 [tokens, hidden].
            top_k_index: Address of int64 [tokens, k].
            top_k_weights: Address of float32 [tokens, k].
            out: Address of float32 [tokens, hidden], not overlapping ``x``.
            tokens: Rows.
            k: Experts of a row.

        Returns:
            Bytes of block records read.

        Raises:
            RuntimeError: ``MOECHAT_ISA`` cannot run on this machine.
        """

class ExpertRunner:
    """Runs the experts of a layer over the split-expert cache and a link.

    For each layer of a pass: :meth:`begin`, then :meth:`prefetch` for later layers, then :meth:`finish`.
    Resident blocks are computed while missing ones arrive. Calls from several threads are serialised. After
    :meth:`close`, in a forked child, and in a signal handler that interrupts a call of the same thread, every
    call except ``close`` raises RuntimeError. Rules: ``native/src/offload/runner.h``.

    Args:
        layout: Format of the records.
        gate: As in :func:`moe_forward`.
        layers: Expert layers; region i of the link holds the records [experts, blocks] of layer i.
        experts: Experts of a layer.
        pages: Pages of the near tier, of ``layout.record_bytes`` each; two are enough to make progress.
        targets: int32 [layers, 2]: experts that a layer keeps, and blocks of each.
        reserve: Pages that the targets must leave for blocks in transit; at least 1.
        policy: Ownership passes to the runner.
        link: Ownership passes to the runner.
        stall_seconds: Time without a finished transfer after which :meth:`finish` raises LinkError.
        whole_experts: Compute an expert only when all its blocks have arrived; prefetch whole experts only.
        populate: Commit the memory of all pages now.
        top_k: Experts that a token uses; sets how many places of a prediction :meth:`routing_counts` counts.
        activation_bits: As in :func:`moe_forward`.
        near_memory: Address of ``pages`` pages in device memory, which must outlive :meth:`close`; 0: the
            runner allocates host memory.
        far_records: uint8 ``[n * blocks * record_bytes]`` of each layer, in host memory, from which the
            CPU can compute blocks that are missing on the device; empty: the CPU computes none.
        far_experts: int32 ``[n]`` of each layer: the experts whose records ``far_records`` has, in that
            order; empty: it has all, in ascending order.
        layer_layouts: The layout of every layer, if their encodings differ: with the sizes of ``layout``.
        layer_gates: The gate of every layer, if they differ.
        admit: As for :class:`SplitExpertCache`; ``victims`` too.
        adaptive: Experts that an adaptive step fetches for a layer (ExpertFlow, section 3.2); 0: the step is
            not adaptive.
        adaptive_most: Most layers ahead of such a step; of a timeline, its ``lookahead``.
        mapped_records: uint8 ``[experts * blocks * record_bytes]`` of each layer, mapped from its file;
            empty: all experts are in pages.
        mapped_experts: int32 ``[n]`` of each layer: the experts that are read from ``mapped_records`` and
            never get a page.

    Raises:
        ValueError: Sizes are inconsistent or out of range, or ``policy`` or ``link`` already has an owner.
            Both are consumed even then.
        RuntimeError: The memory could not be allocated.
    """

    def __init__(
        self,
        layout: BlockLayout,
        gate: Gate,
        *,
        layers: int,
        experts: int,
        pages: int,
        targets: _I32,
        reserve: int,
        policy: EvictionPolicy,
        link: Link,
        stall_seconds: float = 30.0,
        whole_experts: bool = False,
        populate: bool = False,
        top_k: int = 1,
        activation_bits: int = 16,
        near_memory: int = 0,
        far_records: Sequence[_U8] = (),
        far_experts: Sequence[_I32] = (),
        layer_layouts: Sequence[BlockLayout] = (),
        layer_gates: Sequence[Gate] = (),
        admit: str = "key",
        victims: str = "farthest",
        adaptive: float = 0.0,
        adaptive_most: int = 8,
        mapped_records: Sequence[_U8] = (),
        mapped_experts: Sequence[_I32] = (),
    ) -> None: ...
    @property
    def pages(self) -> int: ...
    @property
    def page_bytes(self) -> int: ...
    @property
    def resident_bytes(self) -> int:
        """Bytes of the slab that are in memory, as the system reports them; slow."""
    @property
    def huge_bytes(self) -> int:
        """Bytes of the slab that are in huge pages."""
    def begin(self, layer: int, top_k_index: _I64, top_k_weights: _F32, miss: str = "fetch") -> None:
        """Begin a layer with the router's choice: queue missing blocks, cancel stale prefetches.

        Drops a layer that was begun and not finished.

        Args:
            layer: Expert layer.
            top_k_index: int64 [tokens, k], C order; an index outside the layer selects no expert.
            top_k_weights: [tokens, k], C order.
            miss: Treatment of missing blocks in :meth:`finish_on_device`. ``fetch``: the link transfers them.
                ``compute``: the CPU computes them, except those that the targets keep. ``both``: link and CPU
                share them by their recent rates when both work. ``cpu``: the CPU computes them. ``seldom``:
                it does, too, but the link fills free pages, and replaces an expert by one that is clearly
                expected sooner, with ``stay`` very much sooner (``native/src/offload/far_share.h``). Experts
                of more than 8 tokens, and those that are not in ``far_records``, are always fetched.

        Raises:
            ValueError: Shapes or types do not match, or the layer does not exist; nothing has changed.
        """
    def prefetch(
        self, layer: int, scores: _F32 | None, experts: int, max_bytes: int | None, later: bool = False
    ) -> int:
        """Queue missing blocks of ``layer`` into pages that are free or surplus.

        Blocks without a page are queued by :meth:`finish` as it releases pages of the current layer.

        Args:
            layer: Expert layer.
            scores: [experts], C order; the highest are fetched first, NaN last. ``None``: all experts, in
                ascending order.
            experts: Number of best experts to prefetch, including resident ones; ignored without scores.
            max_bytes: Most bytes; ``None`` sets no limit.
            later: Queue at priority LATER instead of NEXT.

        Returns:
            Bytes queued now; 0 if the link has failed.

        Raises:
            ValueError: Shapes or types do not match, a number is negative, or the layer does not exist.
        """
    def prefetch_ahead(
        self,
        layers: _I32,
        experts: _I32,
        scores: _F32 | None = None,
        max_bytes: int | None = None,
        stays: bool = False,
    ) -> int:
        """Queue missing blocks of experts, in this order across layers, in place of what an earlier call has
        queued and the link has not started. A few experts are queued at a time, the others as those arrive.

        Args:
            layers: int32 [n].
            experts: int32 [n].
            scores: As for :meth:`EvictionPolicy.predict_ahead`.
            max_bytes: Most bytes; ``None``: no limit.
            stays: The others are queued until the next call; else only until the next :meth:`begin`.

        Returns:
            Bytes queued now.

        Raises:
            ValueError: Wrong dtype or shape, or a layer or an expert does not exist.
        """
    def begin_request(self) -> None:
        """The passes that follow belong to another request."""
    def adaptive_layers(self) -> list[tuple[int, int]]:
        """Where the step is adaptive: distance and number of the layers to predict and :meth:`prefetch` now,
        after the router of the begun layer. Once for each layer.
        """
    def adaptive_step(self) -> tuple[int, float]:
        """The step, and its estimate before rounding; 0 and 0 where it is not adaptive."""
    def expect(self, shares: _F64) -> None:
        """Rank experts that no layer has accessed yet: float64 [layers, experts], shares of earlier tokens.

        Raises:
            ValueError: Wrong dtype or shape.
        """
    def preload(
        self, experts: _I32, most_bytes: int, replaceable: _I32 | None = None, to_targets: bool = False
    ) -> int:
        """Queue missing blocks of experts, in this order, into free pages beyond the reserve.

        They move behind everything else on the link, and are no accesses. To be called again and again
        between passes, from any thread.

        Args:
            experts: int32 [n, 2]: layer and expert.
            most_bytes: Most bytes on their way at a time.
            replaceable: int32 [m, 2]: other experts, which give up their pages for these, in this order.
            to_targets: No more blocks of an expert than the target of its layer; those above give some up.

        Returns:
            How many experts at the front are resident or on their way; all, if no pages are left or the link
            has failed.

        Raises:
            ValueError: An expert does not exist; wrong dtype or shape.
        """
    def keys(self) -> _F64:
        """Keys of the eviction policy, float64 [layers, experts]."""
    def stop_preload(self) -> None:
        """Cancel what :meth:`preload` has queued and the link has not started."""
    def finish(self, x: _F32, out: _F32) -> int:
        """Compute the current layer and release its experts; result as :func:`resident_forward`.

        Args:
            x: [tokens, hidden], C order, with the tokens of :meth:`begin`.
            out: [tokens, hidden], C order, overwritten; must not overlap ``x``.

        Returns:
            Bytes of block records read.

        Raises:
            LinkError: A block could not be read, or no transfer finished for ``stall_seconds``. The layer was
                dropped; the next :meth:`begin` tries again.
            KeyboardInterrupt: Ctrl-C while waiting or computing (or the exception that the signal handler
                raises); the layer was dropped.
            RuntimeError: No layer has begun.
            ValueError: Shapes or types do not match; the layer stays begun.
        """
    def rows(self) -> tuple[_I32, _I32, _I32, _F32]:
        """Tokens of the current layer, grouped by expert; copies.

        Returns:
            Experts ``[rows]``, ascending; first item of each row ``[rows + 1]``; token ``[items]``, ascending
            within a row; router weight ``[items]``.

        Raises:
            RuntimeError: No layer has begun.
        """
    def item_lists(self, lists: _I32) -> tuple[int, int, int, int, int]:
        """Write the (row, token) items of the current layer in the form that the kernels read.

        Args:
            lists: int32 ``[n]``, overwritten from its beginning; the order is that of
                ``native/src/offload/device_lists.h``.

        Returns:
            Elements written, rows, items, most items of a token (at least 1), most items of a row.

        Raises:
            RuntimeError: No layer has begun.
            ValueError: ``lists`` is too short.
        """
    def finish_on_device(
        self,
        stream: int,
        tokens: int,
        work: int,
        lists: _I32,
        first: int,
        launch: Callable[[int, int, int, int, int], int],
        x: _F32 | None = None,
        out: _F32 | None = None,
    ) -> int:
        """Compute the current layer on a device, and release its experts.

        Args:
            stream: CUstream that ``launch`` queues its kernels in; ignored by links without stream ordering,
                for which ``launch`` must return when its kernels have finished.
            tokens: Tokens of the layer, as in :meth:`begin`.
            work: Most (token, block) pairs of a launch; a single block with more pairs is still launched.
            lists: int32 ``[n]``: filled with the lists of each launch before it is called.
            first: Index at which the lists of the first launch begin.
            launch: Called with the begin and end of its lists and the numbers of blocks, rows and (token,
                block) pairs; returns the index at which the next lists begin. Over all calls, every block
                that the CPU does not compute occurs once, the blocks of a row in ascending order.
            x: ``[tokens, hidden]``, C order: input of the CPU; required if ``miss`` in :meth:`begin` was not
                ``fetch``.
            out: ``[tokens, hidden]``, C order: the CPU's part of the sum; written only if the CPU computed
                blocks (see :meth:`far_blocks`).

        Returns:
            Bytes of block records launched.

        Raises:
            DeviceLostError: The GPU failed; the runner can only be closed.
            LinkError, KeyboardInterrupt, RuntimeError, ValueError: As :meth:`finish`.
            Exception: An exception of ``launch``; the layer was dropped.
        """
    def far_blocks(self) -> int:
        """Number of blocks of the last layer that the CPU computed in the far tier."""
    def keep_page_table(self, least_share: float) -> bool:
        """Keep a table of the pages for kernels that look them up; see ``native/src/offload/page_table.h``.

        Args:
            least_share: :meth:`look_ahead` pays where a layer has lately lacked nothing in that share of the
                decoded tokens.

        Returns:
            False: the link does not order copies and kernels, and there is no table.
        """
    def page_changes(self, changes: _I32) -> int:
        """Entries of the GPU's table ``[layers, experts, blocks]`` that have to change.

        Args:
            changes: int32 ``[2, n]``: filled with indices and pages; -1: none.

        Returns:
            How many there are; fewer than n: no more have to change.

        Raises:
            RuntimeError: There is no table.
        """
    def complete(self) -> bool:
        """Whether every block is ready, and was in the table at the last changes."""
    def look_ahead(self, layer: int, stream: int, changes: _I32) -> int:
        """Whether the GPU may compute a layer of a token before the host knows what is missing.

        If so, copies into pages that the table has are put behind the kernels of the stream, until
        :meth:`end_ahead`.

        Args:
            layer: The layer.
            stream: CUstream of the kernels.
            changes: As in :meth:`page_changes`, to be made before the layer's kernels.

        Returns:
            Number of changes; -1: it does not pay, since the layer often lacks a block.
        """
    def end_ahead(self) -> None:
        """Kernels that look pages up have ended, or will find that they must not."""
    def account(
        self,
        reports: _I32,
        first: int,
        count: int,
        picks: int,
        places: _I32,
        *,
        predicted: int,
        experts: int,
        max_bytes: int | None,
        ahead: str,
        lookahead: int,
        stream_tokens: int,
        miss: str,
    ) -> int:
        """Make the decisions of :meth:`begin`, :meth:`prefetch` and finish for layers that the GPU computed.

        Args:
            reports: int32 ``[layers, n]``: of each layer the experts of the token, as many words that mean
                nothing here, and the bits of the scores ``[experts]`` of each of its places.
            first: The first layer.
            count: Number of layers.
            picks: Experts of the token.
            places: int32 ``[layers, p, 2]``: distance and number of the layers that scores are for; distance
                0: there is none.
            predicted: Most layers ahead that are predicted.
            experts: As in :meth:`prefetch`, for layers that are predicted.
            max_bytes: As in :meth:`prefetch`.
            ahead: As in :func:`plan_speculation`, for whole layers; so ``lookahead`` and ``stream_tokens``.
            lookahead: See ``ahead``.
            stream_tokens: See ``ahead``.
            miss: As in :meth:`begin`.

        Returns:
            Bytes of block records computed.

        Raises:
            LinkError, DeviceLostError: As :meth:`finish_on_device`.
            ValueError: Shapes do not match, or an expert or layer does not exist.
        """
    def abort(self) -> None:
        """Drop the current layer, if any, and cancel its queued transfers."""
    def set_targets(self, targets: _I32) -> None:
        """New targets int32 [layers, 2]; no block moves, protection follows at once.

        Raises:
            ValueError: As for the constructor; nothing has changed.
        """
    def withhold(self, pages: int) -> int:
        """Give the memory of so many pages in all to the system, or take it back.

        Between passes: a layer that has begun is aborted.

        Returns:
            How many are withheld now: fewer where others are on their way or protected.

        Raises:
            ValueError: The targets need more than the other pages; nothing has changed.
        """
    def stats(self) -> dict[str, float]:
        """Return counters since the last reset.

        ``hits_*`` and ``prefill_hits_*`` for ``full``, ``prefetch``, ``top``, ``miss``: (expert, pass)
        pairs of passes with one token, and with more. In blocks: ``blocks_wanted``, ``blocks_resident``,
        ``blocks_prefetched``, ``fetched_demand``, ``fetched_prefetch``, ``prefetch_wasted``, ``evicted``,
        ``preloaded`` (by :meth:`preload`, in no other count),
        ``blocks_staged``, ``blocks_far`` (computed by the CPU in the far tier, in ``far_seconds``);
        ``admitted`` in experts. ``link_bytes``, its parts ``link_bytes_*`` and
        ``link_transfers_*`` by ``demand``, ``next``, ``later``, and the others of :meth:`Link.stats` with
        prefix ``link_``. ``compute_seconds``; ``stall_seconds`` waiting for the link with nothing to
        compute; ``begin_seconds`` of bookkeeping. ``layers_run``, ``kernel_calls``, ``activations``
        ((token, expert) pairs), ``bytes_computed``. ``pages``, ``pages_peak`` (most pages in use),
        ``page_bytes``.
        """
    def reset_stats(self) -> None: ...
    def routing_counts(self) -> _RoutingCounts:
        """Return routing statistics since the last reset, copies; see :meth:`RoutingCounter.counts`.

        Counts passes of one token, and predictions one layer ahead that had scores.
        """
    def reset_routing_counts(self) -> None: ...
    def hard_activations(self) -> int:
        """Return the activations so far, in passes of one token, of experts that no cache would have had that
        keeps as many experts in each layer as an even share of the pages holds. Never reset.
        """

    def hurry_link(self, on: bool) -> None:
        """Make a simulated link copy at memory speed while this is on; for filling a cache."""

    def drain(self) -> None:
        """Wait until nothing is queued or in flight.

        Raises:
            LinkError: No transfer finished for ``stall_seconds``.
            KeyboardInterrupt: As in :meth:`finish`.
        """
    def residency(self) -> npt.NDArray[np.int16]:
        """Number of leading blocks that are ready, [layers, experts], a copy."""
    def places(self) -> tuple[npt.NDArray[np.int16], npt.NDArray[np.int16], npt.NDArray[np.uint8]]:
        """Where all experts are, [layers, experts] each, copies.

        A block that has landed counts from the next :meth:`begin` or :meth:`finish`.

        Returns:
            Leading blocks that are ready; the same with those on their way; 1 where the CPU computed a part
            of an expert of a device in the far tier, at its last use.
        """
    def activations(self) -> tuple[int, _I64]:
        """The tokens and the activations [layers, experts] of :meth:`routing_counts`, without its other
        arrays; a copy.
        """
    def check(self) -> str:
        """Return the first inconsistency in the cache, or an empty string; slow."""
    def close(self) -> None:
        """Stop the link and free the memory after calls in other threads have returned; idempotent."""

def plan_speculation(
    ahead: str, lookahead: int, stream_tokens: int, layer: int, layers: int, tokens: int
) -> tuple[int | None, list[tuple[int, int]]]:
    """Choose the layers to prefetch after the router of ``layer``: the rule of engine and simulator.

    Args:
        ahead: As for :class:`Timeline`.
        lookahead: As for :class:`Timeline`.
        stream_tokens: As for :class:`Timeline`.
        layer: The layer at work.
        layers: Number of expert layers.
        tokens: Tokens of the pass.

    Returns:
        A layer to prefetch whole, or ``None``; and distance and number of the layers to predict.

    Raises:
        ValueError: ``ahead`` is unknown, or there is no such layer.
    """

class AdaptiveStep:
    """How many layers ahead experts are fetched (ExpertFlow, section 3.2), for tests.

    Source: ``native/src/offload/adaptive_step.h``.

    Args:
        layers: Expert layers.
        experts: Experts of a layer.
        expert_bytes: Bytes of an expert.
        wanted: Experts that are fetched for a layer, at first.
        stalls: Layers that waited for an expert that was predicted, until the step grows.
        ready: Layers that did not, until it falls.
        most: Its upper bound.
    """

    def __init__(
        self,
        layers: int,
        experts: int,
        expert_bytes: float,
        wanted: float,
        stalls: int = 4,
        ready: int = 16,
        most: int = 8,
    ) -> None: ...
    def want(self, experts: float) -> None:
        """The best experts that make up 85 % of a predicted distribution are so many."""
    def measure(self, layer_seconds: float, link_rate: float) -> None:
        """A layer took so many seconds, and the link moves so many bytes in a second."""
    def turn(self, late: bool) -> None:
        """A layer has begun whose experts were predicted; ``late``: one of them was not there."""
    @property
    def step(self) -> int: ...
    @property
    def estimate(self) -> float:
        """Before rounding and correction."""

class Timeline:
    """Simulates decoding with :class:`ExpertRunner` on a virtual clock.

    Source: ``native/src/simulate/timeline.h``. Not thread-safe. Times are seconds.

    Args:
        layers: Expert layers.
        experts: Experts of a layer.
        blocks: Blocks of an expert.
        block_bytes: Bytes of a block.
        pages: Pages of the slab.
        targets: int32 [layers, 2], as for :class:`ExpertRunner`.
        reserve: As for :class:`ExpertRunner`.
        policy: Ownership passes to the timeline.
        whole_experts: As for :class:`ExpertRunner`.
        miss: As for :meth:`ExpertRunner.begin`.
        ahead: ``none``, ``prompts`` (only the next layer of long passes), ``ranked`` (by the rankings of
            :meth:`run`), ``adaptive`` (the same of one layer, at a distance that follows link and layers),
            ``queued`` (by the queues of :meth:`run`) or ``whole-layer``.
        lookahead: Most layers ahead.
        ahead_experts: Most experts prefetched for a layer.
        ahead_bytes: Most bytes prefetched for a layer; ``None``: no limit.
        stream_tokens: Passes with at least this many tokens prefetch the whole next layer; 0: none does.
        group_items: (token, expert) pairs that are summed at a time; 0: all of a pass.
        attention: Time of a layer without its experts.
        head: Time of the output head, once a pass.
        call: Near tier: fixed time of a computing call.
        compute: Near tier: times of n = 1, 2, ... (token, block) pairs; extrapolated by the last step.
        far_block: Far tier: time of one block.
        far_block_shared: The same while the link is busy.
        latency: Time from the start of a transfer to its first byte.
        link: Times of n = 1, 2, ... adjacent blocks, up to the most that are moved at once.
        link_shared: The same while the far tier computes; empty: as ``link``.
        in_flight_bytes: Most bytes in flight.
        far_threads: Threads of the far tier; they set the size of its shares of a layer.
        far_call: Time of handing a layer's input to the far tier and its sums back.
        near_slowdown: Factor of the near tier's times while the link is busy, at least 1.
        launch: ``host``: blocks are computed as they arrive. ``card``: resident blocks are launched first,
            then the others behind their copies, and demands are copied at once. ``graphs``: as a card that
            holds every block and waits for the host at no layer.
        counts_hard: Count hard activations; see :meth:`ExpertRunner.hard_activations`.
        calls: Of a card: times of the launching thread and of small copies, by the names of
            :class:`moechat.configurator.gpu_pattern.GpuCalls`; those that are left out are 0.
        admit: As for :class:`ExpertRunner`; ``victims`` and ``adaptive`` too.

    Raises:
        ValueError: A size or a time is out of range, or a name is unknown.
    """

    def __init__(
        self,
        *,
        layers: int,
        experts: int,
        blocks: int,
        block_bytes: int,
        pages: int,
        targets: _I32,
        reserve: int,
        policy: EvictionPolicy,
        whole_experts: bool,
        miss: str,
        ahead: str,
        lookahead: int,
        ahead_experts: int,
        ahead_bytes: int | None,
        stream_tokens: int,
        group_items: int,
        attention: float,
        head: float,
        call: float,
        compute: Sequence[float],
        far_block: float,
        far_block_shared: float,
        latency: float,
        link: Sequence[float],
        link_shared: Sequence[float],
        in_flight_bytes: int,
        far_threads: int = 1,
        far_call: float = 0.0,
        near_slowdown: float = 1.0,
        launch: str = "host",
        counts_hard: bool = False,
        calls: Mapping[str, float] = ...,
        admit: str = "key",
        victims: str = "farthest",
        adaptive: float = 0.0,
    ) -> None: ...
    def adaptive_step(self) -> tuple[int, float]:
        """See :meth:`ExpertRunner.adaptive_step`."""
    def switch_to(
        self,
        *,
        targets: _I32,
        miss: str,
        ahead: str,
        lookahead: int,
        ahead_experts: int,
        ahead_bytes: int | None,
        stream_tokens: int,
    ) -> None:
        """Go on from the next pass with other targets and another way to load; arguments as at first.

        Raises:
            ValueError: A size is out of range; nothing has changed.
        """
    def preload(self, layer: int, experts: _I32, blocks: int) -> int:
        """Place the first blocks of experts int32 [n] in free pages at no cost; returns their number."""
    def start_warm(self, shares: _F64, experts: _I32, replaceable: _I32 | None = None) -> None:
        """As the engine after a start with statistics, or at any time between passes, in no time.

        See :meth:`ExpertRunner.expect` and :meth:`ExpertRunner.preload`.

        Raises:
            ValueError: Wrong dtype or shape, or an expert does not exist.
        """
    def start_like(self, other: Timeline) -> None:
        """Take over, in no time, which blocks lie in which pages of another timeline; protection follows the
        targets and the policy of this one.

        Args:
            other: Nothing may be on its way there: see :meth:`drain`.

        Raises:
            ValueError: Sizes differ, blocks are on their way there, or something is loaded here already.
        """
    def copy_policy(self) -> EvictionPolicy:
        """A policy in the state of this timeline's."""
    def run(
        self,
        experts: _I32,
        starts: npt.NDArray[np.int64],
        rankings: _I32 | None,
        start: int = 0,
        stop: int | None = None,
        hurried: bool = False,
        queues: _I32 | None = None,
        queue_scores: _F32 | None = None,
        requests: _I64 | None = None,
    ) -> dict[str, npt.NDArray[np.float64]]:
        """Simulate passes ``start`` to ``stop`` of a trace.

        Args:
            experts: int32 [tokens, layers, k].
            starts: int64 [passes + 1]: first token of each pass, and the end of the last one.
            rankings: int32 [depths, tokens, layers, width]: experts predicted for a token and layer one, two,
                ... layers before, best first; -1 for none.
            start: First pass.
            stop: End of the passes, exclusive; ``None``: all.
            hurried: All operations take no time.
            queues: int32 [tokens, 1 + layers, queued]: experts that are fetched ahead before the first layer
                of a token, and after each router, as layer * experts + expert; most urgent first, -1: none.
            queue_scores: float32, the same shape; see :meth:`EvictionPolicy.predict_ahead`.
            requests: int64 [n], ascending: first tokens of requests.

        Returns:
            float64 [stop - start] each: ``seconds``, ``stall`` (the part of them in which the near tier had
            nothing to compute), ``demand_bytes`` and ``prefetch_bytes`` over the link.

        Raises:
            ValueError: Shapes do not match, or an expert does not exist.
            KeyboardInterrupt: Ctrl-C (or the exception that the signal handler raises); the timeline is
                unusable afterwards.
        """
    def drain(self) -> None:
        """Advance the clock until no transfer is queued or in flight."""
    def stats(self) -> dict[str, float]:
        """Return counters since the last reset: those of :meth:`ExpertRunner.stats`, and the clock ``now``.

        ``compute_seconds`` are the near tier's; ``stall_seconds`` are the rest of the time of expert layers.
        """
    def reset_stats(self) -> None: ...
    def residency(self) -> npt.NDArray[np.int16]:
        """Number of leading blocks that are ready, [layers, experts], a copy."""
    def check(self) -> str:
        """Return the first inconsistency in the cache, or an empty string; slow."""

def draw_routing(weights: _F64, top_k: int, tokens: int, seed: int) -> _I32:
    """Draw experts for :func:`moechat.simulate.drawn_routing.draw_routing`; drops the GIL.

    A token takes places of its layer's order of last use without replacement, with probabilities in
    proportion to the weights of the places; its experts move to the front.

    Args:
        weights: float64 [layers, experts], C order, positive: of the places of that order, the front first.
        top_k: Experts of a token.
        tokens: Number of tokens. More of them begin with the same ones.
        seed: 0 to 2**64 - 1.

    Returns:
        int32 [tokens, layers, top_k].

    Raises:
        ValueError: A shape or a value is out of range.
        KeyboardInterrupt: Ctrl-C (or the exception that the signal handler raises).
    """

def draw_rankings(
    experts: _I32,
    weights: _F32 | None,
    right: _F64,
    popularity: _F64,
    width: int,
    seed: int,
    stream: int,
    first_token: int,
) -> _I32:
    """Draw rankings for :func:`moechat.routing.drawn_predictions.draw_rankings`; drops the GIL.

    A row depends on the seed, the stream and the numbers of its token and layer; how it begins does not
    depend on the width.

    Args:
        experts: int32 [tokens, layers, k], C order: chosen experts, none twice in a row.
        weights: float32, of the same shape, positive: those with large ones are ranked first. ``None``: in
            random order.
        right: float64 [layers, experts], C order. The first k ranks: probability that the expert there is a
            chosen one. Ranks after them: probability of each chosen expert that is not ranked yet to be
            ranked there.
        popularity: float64 [layers, experts], C order, positive: of experts that are ranked wrongly.
        width: Ranks, at most the number of experts.
        seed: 0 to 2**64 - 1.
        stream: Number of this drawing of the trace, 0 to 2**64 - 1.
        first_token: Number of the first token in the whole trace.

    Returns:
        int32 [tokens, layers, width], best first.

    Raises:
        ValueError: A shape or a value is out of range, or an expert is named twice.
        KeyboardInterrupt: Ctrl-C (or the exception that the signal handler raises).
    """

def prediction_depth(experts: int, top_k: int) -> int:
    """Ranks of a prediction that are counted: ``4 * top_k`` within 16 to 64, at most ``experts``."""

class RoutingCounter:
    """Counts the hits of recorded routing for every cache size, and correct predictions.

    Calls from several threads are serialised. Definitions: ``native/src/cache/routing_counter.h``.

    Args:
        policy: Ownership passes to the counter.
        top_k: Experts that a token uses, at least 1.

    Raises:
        ValueError: ``top_k`` is out of range, or the policy already has an owner.
    """

    def __init__(self, policy: EvictionPolicy, top_k: int) -> None: ...
    @property
    def layers(self) -> int: ...
    @property
    def experts(self) -> int: ...
    @property
    def depth(self) -> int:
        """Number of ranks of a prediction that are counted; see :func:`prediction_depth`."""
    @property
    def top_k(self) -> int: ...
    @property
    def policy(self) -> str: ...
    def run(self, experts: _I32, predictions: _I32 | None = None, passes: _I64 | None = None) -> None:
        """Process recorded routing, pass by pass and layer by layer; drops the GIL.

        Args:
            experts: int32 [tokens, layers, k], C order: chosen experts.
            predictions: int32 [tokens, layers, n], C order: predicted experts of each token and layer, best
                first; the policy receives the first ``top_k``.
            passes: int64 [n]: tokens of each pass, with the sum ``tokens``; one each if not given. Passes of
                more than one token reach the policy, but are not counted.

        Raises:
            ValueError: Shapes do not match, or an expert does not exist; earlier tokens are counted.
            KeyboardInterrupt: Ctrl-C (or the exception that the signal handler raises); earlier tokens are
                counted.
        """
    def counts(self) -> _RoutingCounts:
        """Return counts since the last reset, copies.

        Returns:
            Passes of one token, then int64 arrays: predicted accesses [layers], activations [layers,
            experts], activations by cache rank [layers, experts], correct predictions by predicted rank
            [layers, depth], predictions by predicted rank and cache rank [layers, depth, experts]. An expert
            of cache rank r is a hit in caches of more than r experts.
        """
    def reset(self) -> None:
        """Set the counts to 0; the policy keeps its state."""

class LayerPlan:
    """Evaluates allocations: the inner loops of the configurator (``native/src/plan/layer_plan.h``).

    All arrays are in C order. All methods raise ValueError as the constructor does.

    Args:
        miss: 0: MoEpic's equations 5 to 7. The engine's model: 1 fetch, 2 compute, 3 both.
        top_k: K, at least 1.
        times: Seconds: attention, moe, head, load, latency, far tier, and link and far tier (two values)
            while both work.
        grain: Share of an expert that is computed at a time.
        shares: float64 [outcomes, layers, experts + 1]: H.
        chances: float64 [outcomes, layers, experts + 1]: probability of each outcome.
        accuracy: float64 [layers, depth]: P.
        cached: float64 [outcomes, layers, experts + 1, depth]: PH.

    Raises:
        ValueError: Shapes do not match, or a number is out of range.
    """

    def __init__(
        self,
        miss: int,
        top_k: int,
        times: Sequence[float],
        grain: float,
        shares: _F64,
        chances: _F64,
        accuracy: _F64,
        cached: _F64,
    ) -> None: ...
    def evaluate(self, experts: _I64, theta: _F64, more: float) -> tuple[_F64, _F64, _F64, _F64]:
        """Evaluate several allocations layer by layer; drops the GIL.

        Args:
            experts: int64 [candidates, layers].
            theta: float64 [candidates, layers]; 0 where there are no experts.
            more: Increase of a window, in loads, from which its price is computed.

        Returns:
            m, exposed seconds, windows and their prices, each [candidates, layers].
        """
    def split(self, volumes: _F64, theta: float) -> tuple[_I64, _F64, _F64, _F64]:
        """Run MoEpic's ExpertSplit for several sets of volumes; drops the GIL.

        Args:
            volumes: float64 [variants, layers], in experts.
            theta: Theta of every layer; below 0: chosen for each layer.

        Returns:
            Experts, m, exposed seconds and windows, each [variants, layers].
        """
    def option_costs(self, experts: _I64, theta: _F64, windows: _F64, prices: _F64, tie: float) -> _F64:
        """Cost of options in every layer: exposed time minus the remaining window's value; drops the GIL.

        Args:
            experts: int64 [pairs].
            theta: float64 [pairs].
            windows: float64 [layers], seconds.
            prices: float64 [layers].
            tie: Seconds added for every missing expert, to break ties.

        Returns:
            float64 [layers, pairs].
        """

class RmsNorm:
    """Computes ``out = (offset + weight) * x / sqrt(mean(x^2) + eps)`` row by row.

    Addresses, here and in the classes below, are neither checked nor kept alive. They must point to CPU
    memory of the given type and size, contiguous except for the given strides.

    Args:
        type: ``float32``, ``bfloat16`` or ``float16``, of inputs, weight and result.
        weight: Address of [cols].
        cols: Elements of a row.
        eps: Added to the mean.
        offset: 0 or 1.
        round_first: Round the normalised row to the type before it is multiplied.

    Raises:
        ValueError: A number is out of range or a name is unknown; as for all classes below.
    """

    def __init__(
        self, type: str, weight: int, cols: int, eps: float, offset: float, round_first: bool
    ) -> None: ...
    def __call__(self, x: int, out: int, rows: int) -> None:
        """Normalise ``x`` into ``out``, addresses of [rows, cols]; drops the GIL, as all calls below."""

class GatedDelta:
    """Tokens of linear attention by the gated delta rule; see :mod:`moechat.models.decode.gated_delta`.

    Args:
        type: As for :class:`RmsNorm`, of everything but the state.
        k_heads: Heads of queries and of keys.
        group: Heads of values for each.
        k_dim: Elements of a query or a key.
        v_dim: Elements of a value: a multiple of 16.
        taps: Tokens of the convolution, the new one included: at most 8.
        places: Of queries, keys, values, gates, betas and decays in their rows: elements before those of the
            first head of keys, and from one head to the next.
        eps: Of the norm.
        weights: Address of [channels, taps].
        log_rates: Address of [k_heads * group].
        biases: Likewise, of the decays.
        norm: Address of [v_dim].
        by_channel: Each element of a key has a decay of its own, with a bias each; gates are sigmoids, the
            norm is rounded once, and rates and biases are float32. ``group`` is 1 then.

    Raises:
        ValueError: A size is not possible.
    """

    def __init__(
        self,
        type: str,
        k_heads: int,
        group: int,
        k_dim: int,
        v_dim: int,
        taps: int,
        places: Sequence[tuple[int, int]],
        eps: float,
        weights: int,
        log_rates: int,
        biases: int,
        norm: int,
        by_channel: bool = False,
    ) -> None: ...
    def __call__(
        self, mixed: int, gate: int, beta: int, decay: int, before: int, state: int, out: int
    ) -> None:
        """Compute a token.

        Args:
            mixed: Address of the row with queries, keys and values.
            gate: Of the row with gates.
            beta: Of the row with betas.
            decay: Of the row with decays.
            before: Of the last elements of each channel, [channels, taps]; they move on by one.
            state: Of float32 [k_heads * group, k_dim, v_dim], which is overwritten.
            out: Of [k_heads * group * v_dim].
        """
    def many(
        self, tokens: int, rows: Sequence[int], cols: Sequence[int], before: int, state: int, out: int
    ) -> None:
        """Compute the tokens of a prompt, with the results that they have one by one.

        Args:
            tokens: At least 1.
            rows: Addresses of the rows of the first token, in the order of :meth:`__call__`.
            cols: Of each, elements from the row of a token to that of the next.
            before: As of :meth:`__call__`; the elements move on by ``tokens``.
            state: As of :meth:`__call__`.
            out: Of [tokens, k_heads * group * v_dim].
        """

class Attention:
    """Attention of the query tokens of one sequence over its keys.

    Sums are made in parts of 128 keys, in prompts of 64, in order: the result does not depend on the number
    of threads. In prompts a token's result does not depend on the other tokens either.

    Args:
        type: Element type of queries, keys, values and the result.
        kv_heads: Heads of keys and values.
        group: Query heads of each KV head.
        key_dim: Elements of a key, without its tail.
        tail_dim: Elements of the key part that all heads share; 0: none. Queries have key_dim + tail_dim.
        value_dim: Elements of a value.
        scale: Factor of the query-key products.
        sinks: Address of float32 [kv_heads * group], logits added to the softmax denominator only; or 0.
    """

    def __init__(
        self,
        type: str,
        kv_heads: int,
        group: int,
        key_dim: int,
        tail_dim: int,
        value_dim: int,
        scale: float,
        sinks: int,
    ) -> None: ...
    def __call__(
        self,
        query: int,
        query_head: int,
        query_token: int,
        tokens: int,
        key: int,
        key_head: int,
        key_token: int,
        tail: int,
        tail_token: int,
        value: int,
        value_head: int,
        value_token: int,
        context: int,
        visible: int,
        visible_token: int,
        out: int,
        prompt: bool = False,
    ) -> bool:
        """Compute attention. Arguments are addresses, each followed by its strides in elements.

        Args:
            query: [heads, tokens, key_dim + tail_dim].
            query_head: Stride.
            query_token: Stride.
            tokens: Query tokens.
            key: [kv_heads, context, key_dim].
            key_head: Stride.
            key_token: Stride.
            tail: [context, tail_dim], or 0.
            tail_token: Stride.
            value: [kv_heads, context, value_dim].
            value_head: Stride.
            value_token: Stride.
            context: Keys.
            visible: bool [tokens, context], or 0: every token sees every key; in a prompt each sees the keys
                up to its own, the last token that of the last key.
            visible_token: Stride.
            out: [tokens, heads, value_dim].
            prompt: Use the code for many tokens.

        Returns:
            False, with nothing computed, if this is a prompt and the keys that some token sees are not one
            range, there is a tail, or a KV head has more than 64 query heads.
        """

class TokenPass:
    """Computes all layers of a model for one token of each of several conversations.

    Args:
        layers: Of each layer its step, and its experts or, if the step has no router, its feed-forward part;
            if it ends with its mixer, any of these.

    Raises:
        ValueError: Layers differ in type or hidden size.
    """

    def __init__(
        self,
        layers: Sequence[
            tuple[LayerStep | LatentStep | _StateStep | FeedLayer, ResidentExperts | Mlp | FeedStep]
        ],
    ) -> None: ...
    def run(
        self,
        hidden: int,
        angles: Sequence[tuple[int, int]],
        places: Sequence[Sequence[tuple[int, ...]]],
        tokens: int,
        out: int,
    ) -> int:
        """Compute the layers. Not from two threads at once.

        Args:
            hidden: Address of [tokens, hidden].
            angles: Of each layer, addresses of cosines and sines; 0 if it does not rotate.
            places: Of each layer, of each token, as for ``route`` of the layer's step.
            tokens: 1 to :data:`MOST_STEP_TOKENS`.
            out: Address of [tokens, hidden], written: the hidden states behind the last layer.

        Returns:
            Bytes of experts that were read.

        Raises:
            ValueError: Lengths do not match, or places are not those of the step's class.
            KeyboardInterrupt: On Ctrl-C, between layers.
        """

    def measure(self, on: bool) -> None:
        """Begin or end to measure."""

    def seconds(self) -> dict[str, float]:
        """Seconds in experts, and in feed-forward parts without a router, since :meth:`measure`."""

class LatentAttention:
    """Attention of one token over latents, which are not expanded; see :mod:`moechat.models.decode.latent`.

    Args:
        type: Element type of everything.
        heads: Heads of queries.
        plain: Elements of a query or key that are not rotated.
        rotated: Those that are.
        rank: Elements of a latent.
        value_dim: Elements of a value.
        weight: Address of [heads, plain + value_dim, rank]: what makes keys and values of latents. Not read
            if :meth:`packed` follows.
        scale: Factor of the query-key products.
    """

    def __init__(
        self,
        type: str,
        heads: int,
        plain: int,
        rotated: int,
        rank: int,
        value_dim: int,
        weight: int,
        scale: float,
    ) -> None: ...
    def packed(
        self, layout: LinearLayout, data: npt.NDArray[np.uint8], activation_bits: int
    ) -> LatentAttention:
        """The same with packed weights, which it keeps alive.

        Args:
            layout: Of [heads * (plain + value_dim), rank], in 4, 6 or 8 bits.
            data: [layout.nbytes].
            activation_bits: 8, 16 or 32: of the sums of latents that are multiplied to values. Queries are
                multiplied as float32.

        Raises:
            ValueError: plain or value_dim is not a multiple of 16, or the layout does not fit.
        """

    def __call__(
        self,
        query: int,
        query_head: int,
        latents: int,
        latent_token: int,
        turned: int,
        turned_token: int,
        context: int,
        out: int,
    ) -> None:
        """Attend to the whole context. Addresses, and strides in elements.

        Args:
            query: [heads, plain + rotated].
            query_head: Stride of the heads.
            latents: [context, rank].
            latent_token: Stride of the tokens.
            turned: [context, rotated], rotated parts of the keys.
            turned_token: Stride of the tokens.
            context: At least 1.
            out: [heads, value_dim], written.
        """

class Routing:
    """A router: computes logits, the top-k experts and their weights.

    Args:
        type: Element type of hidden states, and of weight and bias unless ``wide``.
        weight: Address of [experts, hidden].
        bias: Address of [experts], or 0.
        experts: Experts of the layer.
        hidden: Width of the hidden states.
        scoring: ``softmax``, ``sigmoid``, or ``softmax-chosen`` (softmax over the chosen experts only).
        chosen: Top-k, the experts of a token.
        correction: Address of float32 [experts], added to the scores for the choice only; or 0.
        normalise: Scale the weights of a token to the sum ``scale``.
        scale: Factor of the weights.
        weight_type: Element type of the resulting weights.
        logits_type: Element type of the logits: ``float32`` or as ``type``.
        rounds_scores: Round the scores to ``logits_type`` before the choice.
        wide: Weight and bias are float32, whatever ``type`` is.
    """

    def __init__(
        self,
        type: str,
        weight: int,
        bias: int,
        experts: int,
        hidden: int,
        scoring: str,
        chosen: int,
        correction: int,
        normalise: bool,
        scale: float,
        weight_type: str,
        logits_type: str,
        rounds_scores: bool = False,
        wide: bool = False,
    ) -> None: ...
    def scaled(self, norm: RmsNorm, inputs: int, input: float, experts: int) -> Routing:
        """The same router behind a norm, with more factors; ``x`` is what the norm takes then.

        Args:
            norm: Of hidden states.
            inputs: Address of [hidden]: factors of the elements of a normalised row, which is rounded then.
            input: Factor of all of them; rounded again.
            experts: Address of float32 [experts]: factors of the weights.

        Raises:
            ValueError: The norm has another width or type, or the weights are not float32.
        """

    def __call__(self, x: int, tokens: int, logits: int, index: int, weights: int) -> None:
        """Route ``x`` [tokens, hidden]; all arrays are given by address.

        Writes ``logits`` [tokens, experts], and int64 ``index`` and ``weights`` [tokens, chosen].
        """

class HyperConnection:
    """Weights that mix the residual streams of a token; see :mod:`moechat.models.decode.hyper_connection`.

    Args:
        type: Element type of the streams.
        streams: At most 8.
        hidden: Elements of each.
        weight: Address of float32 [(2 + streams) * streams, streams * hidden].
        base: Of float32 [(2 + streams) * streams].
        scale: Of float32 [3].
        norm_eps: Added to the mean square of all elements.
        eps: Added to weights and sums.
        rounds: Of the matrix's division by the sums of its rows and columns; the first by those of columns.

    Raises:
        ValueError: A size is not possible.
    """

    def __init__(
        self,
        type: str,
        streams: int,
        hidden: int,
        weight: int,
        base: int,
        scale: int,
        norm_eps: float,
        eps: float,
        rounds: int,
    ) -> None: ...
    def __call__(self, x: int, post: int, comb: int, collapsed: int) -> None:
        """Compute a token.

        Args:
            x: Address of its streams, [streams, hidden].
            post: Of float32 [streams], written.
            comb: Of float32 [streams, streams], written.
            collapsed: Of [hidden], written.
        """

class DenseProduct:
    """A dense layer for the steps of decoder layers; keeps its weights and bias alive."""

    def __call__(self, type: str, x: int, tokens: int, out: int) -> None:
        """Multiply a few tokens, each as it would be alone.

        Args:
            type: Element type of inputs and results: ``float32``, ``bfloat16`` or ``float16``.
            x: Address of [tokens, cols].
            tokens: 1 to :data:`MOST_STEP_TOKENS`.
            out: Of [tokens, rows], written.

        Raises:
            ValueError: Another number of tokens.
        """

def packed_product(
    layout: LinearLayout,
    data: npt.NDArray[np.uint8],
    bias: npt.NDArray[np.float32] | None,
    activation_bits: int,
) -> DenseProduct:
    """A dense layer computed by :func:`linear_forward`."""

def rows16_product(
    weights: npt.NDArray[np.uint16], is_fp16: bool, bias: npt.NDArray[np.float32] | None
) -> DenseProduct:
    """A dense layer computed by :func:`rows16_forward`."""

MOST_STEP_TOKENS: int
"""Most tokens of the step of a decoder layer."""
DELTA_UNIT_EPS: float
"""Added to the sum of squares of a query or a key in :class:`GatedDelta`."""

class DeltaMixer:
    """Linear attention with its dense products, for one token.

    Args:
        delta: Between the products.
        inputs: Products of the hidden state.
        sources: Of these, those with queries, keys and values; with gates; with betas; with decays.
        output: The last product.

    Raises:
        ValueError: The products do not have the sizes of ``delta``.
    """

    def __init__(
        self,
        delta: GatedDelta,
        inputs: Sequence[DenseProduct],
        sources: Sequence[int],
        output: DenseProduct,
    ) -> None: ...
    def __call__(self, hidden: int, before: int, state: int, out: int) -> None:
        """Compute a token.

        Args:
            hidden: Address of the hidden state, of the type of ``delta``.
            before: As of :meth:`GatedDelta.__call__`, as ``state``.
            state: See there.
            out: Of the result.
        """

class Mlp:
    """``down(activation(gate(x)) * up(x))``, or ``down(activation(up(x)))``, for a few tokens, rounded to its
    type after each step.

    Args:
        type: As for :class:`RmsNorm`.
        gate: The product that is activated; ``None``: there is none.
        up: The product that it multiplies, or that is activated.
        down: The last product.
        activation: ``silu`` or ``gelu_tanh``; without a gate ``relu2``.
        joined: The rows of ``up`` are first those of the gate.

    Raises:
        ValueError: The products do not fit together, or there is no such activation.
    """

    def __init__(
        self,
        type: str,
        gate: DenseProduct | None,
        up: DenseProduct,
        down: DenseProduct,
        activation: str = "silu",
        joined: bool = False,
    ) -> None: ...
    def __call__(self, x: int, tokens: int, out: int) -> None:
        """Compute tokens, each as it would be alone.

        Args:
            x: Address of their inputs.
            tokens: 1 to :data:`MOST_STEP_TOKENS`.
            out: Of their outputs.

        Raises:
            ValueError: Another number of tokens.
        """

class FeedStep:
    """What follows the mixer of a decoder layer, up to its routed experts: norm, router and shared expert.

    Args:
        after: Norm.
        routing: Router; ``None``: the step ends with the norm.
        shared: Shared expert, only with a router.
        gate: Product of one row; its sigmoid multiplies the shared expert's result.
        norms: With a shared expert: norms of the residual for the routed experts, of the shared expert's
            result, of the routed experts' and of the sum of both; and the address of one element that
            multiplies the layer's result.
        routed_scale: With a shared expert: factor of the routed experts' result.
        ends: The layer ends with its mixer, and has none of these; ``after`` is any norm of its width.
        scale: Factor of the whole result, before it is added.

    Raises:
        ValueError: The parts do not fit together.
    """

    def __init__(
        self,
        after: RmsNorm,
        routing: Routing | None,
        shared: Mlp | None,
        gate: DenseProduct | None,
        norms: tuple[RmsNorm, RmsNorm, RmsNorm, RmsNorm, int] | None = None,
        routed_scale: float = 1.0,
        ends: bool = False,
        scale: float = 1.0,
    ) -> None: ...
    def add(self, x: int, shared: int, residual: int, tokens: int) -> None:
        """Add ``x``, the routed experts' result as float32 [tokens, hidden], rounded to the element type, to
        ``residual``; first ``shared`` to it, if there is a shared expert. With norms as these say.
        """

class LayerStep:
    """Computes a decoder layer with attention, up to its experts, for a token of each of several attention
    caches; as its parts in turn, bitwise except for torch's sigmoids. A token's results do not depend on the
    others.

    Args:
        type: Element type of hidden states and KV cache.
        before: Norm before attention.
        query: Query projection.
        key: Key projection.
        value: Value projection; ``None``: values are what ``key`` gives.
        output: Projection of the attention's result.
        gated: ``query`` gives each head its query and then its gates, whose sigmoids multiply the result of
            attention.
        head_norms: Norms of queries and keys, of each head or of all heads as one row; or ``None``.
        attention: Attention of the layer, without a tail.
        angles: Rotary angles of a token; 0: it does not rotate.
        width: Elements of a head that are rotated: ``angles``, or twice as many.
        feed: What follows attention.
        value_norm: Norm of the values of each head, or ``None``.
        output_norm: Norm of what ``output`` gives, or ``None``.
        gate: Product of hidden states whose results multiply what attention gives, one for each element or
            for each head, and whether their activation is softplus instead of sigmoid; or ``None``.
        scale: Factor of what ``output`` gives, before it is added.

    Raises:
        ValueError: The parts do not fit together.
    """

    def __init__(
        self,
        type: str,
        before: RmsNorm,
        query: DenseProduct,
        key: DenseProduct,
        value: DenseProduct | None,
        output: DenseProduct,
        gated: bool,
        head_norms: tuple[RmsNorm, RmsNorm] | None,
        attention: Attention,
        angles: int,
        width: int,
        feed: FeedStep,
        value_norm: RmsNorm | None = None,
        output_norm: RmsNorm | None = None,
        gate: tuple[DenseProduct, bool] | None = None,
        scale: float = 1.0,
    ) -> None: ...
    def route(
        self,
        hidden: int,
        cos: int,
        sin: int,
        places: Sequence[tuple[int, int, int, int, int, bool]],
        residual: int,
        x: int,
        index: int,
        weights: int,
        shared: int,
    ) -> None:
        """Compute the layer up to the choice of its router and its shared expert. Addresses.

        Args:
            hidden: [tokens, hidden].
            cos: [tokens, angles].
            sin: [tokens, angles].
            places: Of each token; at most :data:`MOST_STEP_TOKENS`. Keys [kv_heads, more than held, key_dim],
                of which the token's are written, and the stride of their heads; the same for values; tokens
                held before this one; whether both are packed rows (:func:`pack_rows`), with strides in bytes
                in place of elements.
            residual: [tokens, hidden], written: ``hidden`` and the attention's result.
            x: float32 [tokens, hidden], written: input of the experts.
            index: int64 [tokens, chosen], written.
            weights: float32 [tokens, chosen], written.
            shared: [tokens, hidden], written if the step has a shared expert: its result.

        Raises:
            ValueError: The step has no router, or it was given another number of tokens.
        """

    def normalise(
        self,
        hidden: int,
        cos: int,
        sin: int,
        places: Sequence[tuple[int, int, int, int, int, bool]],
        residual: int,
        normed: int,
    ) -> None:
        """Compute as :meth:`route` a step without a router; writes ``normed`` [tokens, hidden]."""

    def mix(
        self,
        hidden: int,
        cos: int,
        sin: int,
        places: Sequence[tuple[int, int, int, int, int, bool]],
        residual: int,
    ) -> None:
        """Compute as :meth:`route` a step that ends with its mixer; ``residual`` is its result."""

    def measure(self, on: bool) -> None:
        """Begin to add up the times of the parts, from 0, or end it."""

    def seconds(self) -> dict[str, float]:
        """Seconds since :meth:`measure` by part: ``norms``, ``projections``, ``cache`` (rotary embedding, and
        appending keys and values), ``attention``, ``router`` and ``shared`` (the shared expert); empty while
        it is not measured.
        """

class MambaMixer:
    """A Mamba-2 mixer with its projections; see :mod:`moechat.models.decode.mamba2`.

    Args:
        type: As for :class:`RmsNorm`, of everything but the state.
        heads: Heads.
        head_dim: Elements of a head.
        groups: Of heads with the same keys and queries.
        state_size: Elements of a key.
        taps: Tokens of the convolution, the new one included: at most 8.
        norm_group: Elements that are normed together.
        eps: Of the norm.
        weights: Address of [channels, taps].
        conv_biases: Address of [channels], or 0.
        log_rates: Address of [heads].
        step_biases: Likewise.
        skips: Likewise.
        norm: Address of [heads * head_dim].
        input: The first projection.
        output: The last one.

    Raises:
        ValueError: A size is not possible, or the parts do not fit together.
    """

    def __init__(
        self,
        type: str,
        heads: int,
        head_dim: int,
        groups: int,
        state_size: int,
        taps: int,
        norm_group: int,
        eps: float,
        weights: int,
        conv_biases: int,
        log_rates: int,
        step_biases: int,
        skips: int,
        norm: int,
        input: DenseProduct,
        output: DenseProduct,
    ) -> None: ...
    def __call__(self, hidden: int, before: int, state: int, out: int) -> None:
        """Compute a token.

        Args:
            hidden: Address of the hidden state.
            before: Of [channels, taps], the last elements of each channel; written.
            state: Of float32 [heads, head_dim, state_size]; written.
            out: Of the result.
        """
    def many(
        self, tokens: int, rows: int, before: int, state: int, out: int, limits: tuple[float, float]
    ) -> None:
        """Compute the tokens of a prompt between the projections, with the results that they have one by one,
        but for the limits.

        Args:
            tokens: At least 1.
            rows: Address of what the first projection gives, [tokens, rows of it].
            before: As of :meth:`__call__`.
            state: As of :meth:`__call__`.
            out: Of what the last projection gets, [tokens, heads * head_dim].
            limits: Least and largest step.
        """

class LatentStep:
    """As :class:`LayerStep`, of a layer with latent attention (DeepSeek-V3, GLM-4.7-Flash).

    Args:
        before: Norm of the hidden state.
        shortened: The first of two projections of queries, and the norm of its results; ``None``: there is
            one projection.
        query: Projection to the queries of all heads: of each ``plain`` elements, then ``rotated`` ones.
        latent: Projection to a latent and the rotated part of a key.
        latent_norm: Norm of the latent.
        attention: Attention of the layer.
        angles: Rotary angles of a token.
        neighbours: Neighbouring elements are pairs, each rotated by one angle; behind the rotation the first
            ones of all come first.
        output: Projection of the attention's result.
        feed: What follows attention.

    Raises:
        ValueError: The parts do not fit together.
    """

    def __init__(
        self,
        before: RmsNorm,
        shortened: tuple[DenseProduct, RmsNorm] | None,
        query: DenseProduct,
        latent: DenseProduct,
        latent_norm: RmsNorm,
        attention: LatentAttention,
        angles: int,
        neighbours: bool,
        output: DenseProduct,
        feed: FeedStep,
    ) -> None: ...
    def route(
        self,
        hidden: int,
        cos: int,
        sin: int,
        places: Sequence[tuple[int, int, int, int, int, bool]],
        residual: int,
        x: int,
        index: int,
        weights: int,
        shared: int,
    ) -> None:
        """As :meth:`LayerStep.route`; keys of a place are latents [more than held, rank], values rotated
        parts of keys. They are not packed, and strides of heads are not used.
        """

    def normalise(
        self,
        hidden: int,
        cos: int,
        sin: int,
        places: Sequence[tuple[int, int, int, int, int, bool]],
        residual: int,
        normed: int,
    ) -> None:
        """Compute as :meth:`route` a step without a router; writes ``normed`` [tokens, hidden]."""

    def mix(
        self,
        hidden: int,
        cos: int,
        sin: int,
        places: Sequence[tuple[int, int, int, int, int, bool]],
        residual: int,
    ) -> None:
        """Compute as :meth:`route` a step that ends with its mixer; ``residual`` is its result."""

    def measure(self, on: bool) -> None:
        """As of :class:`LayerStep`."""

    def seconds(self) -> dict[str, float]:
        """As of :class:`LayerStep`."""

class _StateStep:
    """As :class:`LayerStep`, of a layer whose mixer keeps states."""

    def route(
        self,
        hidden: int,
        states: Sequence[tuple[int, ...]],
        residual: int,
        x: int,
        index: int,
        weights: int,
        shared: int,
    ) -> None:
        """Compute as :meth:`LayerStep.route`.

        Args:
            hidden: [tokens, hidden].
            states: Of each token, ``before`` and ``state`` of the mixer's ``__call__``. Then may follow the
                addresses of copies of both that are made before the token is computed, and their bytes; the
                copies have the layout of the states, and do not overlap with any.
            residual: As there, as all that follow.
            x: See there.
            index: See there.
            weights: See there.
            shared: See there.
        """

    def normalise(self, hidden: int, states: Sequence[tuple[int, int]], residual: int, normed: int) -> None:
        """Compute as :meth:`route` a step without a router; writes ``normed`` [tokens, hidden]."""

    def mix(self, hidden: int, states: Sequence[tuple[int, int]], residual: int) -> None:
        """Compute as :meth:`route` a step that ends with its mixer; ``residual`` is its result."""

    def measure(self, on: bool) -> None:
        """As of :class:`LayerStep`."""

    def seconds(self) -> dict[str, float]:
        """As of :class:`LayerStep`."""

class DeltaStep(_StateStep):
    """A step of a layer with linear attention by the gated delta rule.

    Args:
        before: Norm of the hidden state.
        mixer: Linear attention.
        feed: What follows it.
        scale: Factor of the mixer's result, before it is added.

    Raises:
        ValueError: The parts do not fit together.
    """

    def __init__(self, before: RmsNorm, mixer: DeltaMixer, feed: FeedStep, scale: float = 1.0) -> None: ...

class MambaStep(_StateStep):
    """As :class:`DeltaStep`, of a layer with a Mamba-2 mixer."""

    def __init__(self, before: RmsNorm, mixer: MambaMixer, feed: FeedStep, scale: float = 1.0) -> None: ...

class ShortConvMixer:
    """A gated short convolution with its projections, for one token; see
    :mod:`moechat.models.decode.short_conv`.

    Args:
        type: As for :class:`RmsNorm`, of everything.
        channels: Channels.
        taps: Tokens of the convolution, the new one included: at most 8.
        weights: Address of [channels, taps].
        biases: Address of [channels], or 0.
        input: The first projection.
        output: The last one.

    Raises:
        ValueError: A size is not possible, or the parts do not fit together.
    """

    def __init__(
        self,
        type: str,
        channels: int,
        taps: int,
        weights: int,
        biases: int,
        input: DenseProduct,
        output: DenseProduct,
    ) -> None: ...
    def __call__(self, hidden: int, before: int, state: int, out: int) -> None:
        """Compute a token.

        Args:
            hidden: Address of the hidden state.
            before: Of [channels, taps], the last elements of each channel, overwritten.
            state: Unused.
            out: Of the result.
        """

class ShortConvStep(_StateStep):
    """As :class:`DeltaStep`, of a layer with a gated short convolution, whose ``state`` is 0."""

    def __init__(
        self, before: RmsNorm, mixer: ShortConvMixer, feed: FeedStep, scale: float = 1.0
    ) -> None: ...

class FeedLayer:
    """A step of a layer that has no mixer.

    Args:
        feed: All that the layer has.

    Raises:
        ValueError: That is nothing.
    """

    def __init__(self, feed: FeedStep) -> None: ...
    def route(
        self,
        hidden: int,
        places: Sequence[object],
        residual: int,
        x: int,
        index: int,
        weights: int,
        shared: int,
    ) -> None:
        """Compute as :meth:`LayerStep.route`.

        Args:
            hidden: [tokens, hidden].
            places: One object for each token; what it is does not matter.
            residual: As there, as all that follow.
            x: See there.
            index: See there.
            weights: See there.
            shared: See there.
        """

    def normalise(self, hidden: int, places: Sequence[object], residual: int, normed: int) -> None:
        """Compute as :meth:`route` a step without a router; writes ``normed`` [tokens, hidden]."""

    def measure(self, on: bool) -> None:
        """As of :class:`LayerStep`."""

    def seconds(self) -> dict[str, float]:
        """As of :class:`LayerStep`."""

def rotate(
    type: str,
    x: int,
    token_stride: int,
    head_stride: int,
    out: int,
    tokens: int,
    heads: int,
    dim: int,
    cos: int,
    sin: int,
    angles: int,
    width: int,
) -> None:
    """Apply the rotary embedding: rotate pairs (i, i + width / 2) of the first ``width`` elements of a head.

    Args:
        type: Element type of all arrays.
        x: Address of [tokens, heads, dim], with the strides that follow, in elements.
        token_stride: Stride.
        head_stride: Stride.
        out: Address of [tokens, heads, dim].
        tokens: Tokens.
        heads: Heads.
        dim: Elements of a head.
        cos: Address of [tokens, angles].
        sin: Address of [tokens, angles].
        angles: ``width``, or half of it if both elements of a pair share an angle.
        width: Elements rotated; the others are copied.
    """

def packed_row_bytes(dim: int) -> int:
    """Bytes of a packed row of ``dim`` elements: 8 bits each, and a byte for every 32 of them."""

def pack_rows(
    type: str,
    plain: int,
    plain_head: int,
    plain_token: int,
    heads: int,
    tokens: int,
    dim: int,
    packed: int,
    packed_head: int,
) -> None:
    """Make packed rows of elements, the same on every instruction set.

    Of 32 elements the largest gets a code of 64 to 127, so none changes by more than a 128th of the largest.

    Args:
        type: Element type.
        plain: Address of [heads, tokens, dim].
        plain_head: Stride of the heads, in elements.
        plain_token: Stride of the tokens, in elements.
        heads: Heads.
        tokens: Tokens.
        dim: Elements of a row.
        packed: Address of [heads, tokens, packed_row_bytes(dim)], written.
        packed_head: Stride of its heads in bytes.
    """

def unpack_rows(
    type: str, packed: int, packed_head: int, heads: int, tokens: int, dim: int, plain: int
) -> None:
    """Write the elements of packed rows to ``plain``, contiguous; arguments as of :func:`pack_rows`."""

def largest_logit(logits: _F32) -> int:
    """Index of the first of the largest logits [vocabulary]; -1 if one is NaN."""

def sample(logits: _F32, temperature: float, top_k: int, top_p: float, min_p: float, where: float) -> int:
    """Draw a token.

    Args:
        logits: [vocabulary].
        temperature: Above 0.
        top_k: Tokens kept, with all that tie with the last of them; 0: all.
        top_p: Probability mass of the likeliest tokens that are kept; 1: all.
        min_p: Least probability relative to the likeliest token; 0: no limit.
        where: Uniform random number in [0, 1) that selects the token.

    Returns:
        The token; -1 if a logit is NaN or plus infinity.
    """
