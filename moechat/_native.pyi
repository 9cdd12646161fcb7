"""Native core: block layout, packing, CPU expert kernels, links and the split-expert cache (``native/``).

Every call that computes drops the GIL. Calls from several threads are safe; they take the one thread pool
in turns.
"""

from collections.abc import Callable, Sequence
from typing import Final, Literal, TypeAlias

import numpy as np
import numpy.typing as npt

BLOCK_FORMAT_VERSION: Final[int]
DEMAND: Final[int]
NEAR: Final[int]
FAR: Final[int]

_F32: TypeAlias = npt.NDArray[np.float32]
_F16: TypeAlias = npt.NDArray[np.float16]
_U8: TypeAlias = npt.NDArray[np.uint8]
_I32: TypeAlias = npt.NDArray[np.int32]
_I64: TypeAlias = npt.NDArray[np.int64]
_U16: TypeAlias = npt.NDArray[np.uint16]
_U32: TypeAlias = npt.NDArray[np.uint32]
_U64: TypeAlias = npt.NDArray[np.uint64]
_F64: TypeAlias = npt.NDArray[np.float64]
_Biases: TypeAlias = tuple[_F32, _F32, _F32]
_RoutingCounts: TypeAlias = tuple[int, _I64, _I64, _I64, _I64, _I64]
_HitKind: TypeAlias = Literal["full", "prefetch", "top", "miss"]
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
    """Kernel builds that can run here, slowest first.

    ``"portable"``, ``"avx2"``, ``"avx2-vnni"``, ``"avx512"``, ``"avx512-vnni"``.
    """

def active_isa() -> str:
    """The kernel build in use: the last of :func:`available_isas`, or what ``MOECHAT_ISA`` names.

    Raises:
        RuntimeError: ``MOECHAT_ISA`` names something unknown or impossible here.
    """

def huge_empty(nbytes: int) -> _U8:
    """Uint8 ``[nbytes]``, all 0, in huge pages where the system gives them; for large, lasting buffers.

    It begins at a multiple of 4096 bytes, or of 2 MiB if it is at least that long, and takes memory where it
    is written to. Freed with the last array that shows it; a forked child has it too.

    Raises:
        ValueError: ``nbytes`` is negative or above 2**46.
        MemoryError: The system refused.
    """

def prefer_huge_pages(data: _U8) -> None:
    """Ask for huge pages for what of a mapped array is read from its file from now on.

    Args:
        data: Contiguous uint8, any shape.
    """

def read_ahead(data: _U8) -> None:
    """Read what of a mapped array is not in memory.

    Args:
        data: Contiguous uint8, any shape. Of memory that is no mapped file nothing is read.
    """

def prewake() -> None:
    """Let sleeping worker threads get ready: a call that computes comes within some 100 microseconds.

    Costs a system call if one sleeps, else next to nothing.
    """

def available_cores() -> int:
    """Physical cores that affinity mask and control group leave to this process now; at least 1."""

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
    activation_bits: int = 16,
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
        activation_bits: 16 or 8: ``x`` and the activations are quantised to so many bits, in groups of 64
            (``native/src/kernels/kernel_api.h``), and meet the codes of the weights as integers; 32: both
            stay float32, as always where the weights have 16 bits.

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

class LinearLayout:
    """Byte map of a quantised matrix [rows, cols] outside the experts (``native/src/kernels/linear.h``).

    Args:
        rows: 1 to 2^20.
        cols: 1 to 2^20.
        bits: 2, 3, 4 or 8.

    Raises:
        ValueError: A size or ``bits`` is out of range.
    """

    def __init__(self, rows: int, cols: int, bits: int) -> None: ...
    @property
    def rows(self) -> int: ...
    @property
    def cols(self) -> int: ...
    @property
    def bits(self) -> int: ...
    @property
    def sz(self) -> int:
        """Offset of scales and zeros; the codes lie at 0."""
    @property
    def nbytes(self) -> int: ...

def pack_linear(layout: LinearLayout, matrix: _Weights, threads: int = 0) -> _U8:
    """Quantise a matrix with the solver of :func:`pack_expert`.

    Args:
        layout: Of the result.
        matrix: [rows, cols], any strides: float32, float16, or uint16 holding bfloat16 patterns.
        threads: Most worker threads; 0 sets no limit.

    Returns:
        uint8 [layout.nbytes], at a multiple of 64 bytes. Kept elsewhere, it should lie at one again.

    Raises:
        ValueError: A weight is not finite or above 65504, shapes or types do not match.
        RuntimeError: ``MOECHAT_ISA`` cannot be honoured.
    """

def unpack_linear(layout: LinearLayout, data: _U8) -> _F32:
    """The values of a packed matrix, float32 [rows, cols].

    Args:
        layout: Of the data.
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
    """``out = x @ W.T + bias`` over a packed matrix.

    A row of ``out`` depends on its row of ``x`` only, bit by bit, for any number of threads.

    Args:
        layout: Of the data.
        data: uint8 [layout.nbytes].
        x: [tokens, cols], C order.
        bias: [rows] or None.
        out: [tokens, rows], C order, overwritten; must not overlap ``x``.
        activation_bits: As in :func:`moe_forward`.

    Raises:
        ValueError: Shapes, types or ``activation_bits`` do not match.
        RuntimeError: ``MOECHAT_ISA`` cannot be honoured.
    """

ROWS16_MAX_TOKENS: int

def rows16_forward(weights: _U16, is_fp16: bool, x: _F32, bias: _F32 | None, out: _F32) -> None:
    """``out = x @ weights.T + bias`` over rows of 16-bit floats as a checkpoint holds them.

    Products and sums are float32. A row of ``out`` depends on its row of ``x`` only, bit by bit, for any
    number of threads (``native/src/kernels/rows16.inc.h``).

    Args:
        weights: uint16 [rows, cols], C order: bfloat16 or float16 patterns.
        is_fp16: They are float16.
        x: [tokens, cols], C order; at most ``ROWS16_MAX_TOKENS`` tokens.
        bias: [rows], or ``None``.
        out: [tokens, rows], C order, overwritten; must not overlap the others.

    Raises:
        ValueError: Shapes or types do not match, or there are too many tokens.
        RuntimeError: ``MOECHAT_ISA`` cannot be honoured.
    """

def stream_read_rate(data: _U8, threads: int, seconds: float) -> float:
    """Bytes a second at which memory is read, the fastest of several passes; Ctrl-C ends it between two.

    Args:
        data: uint8, C-contiguous, at least 4096 bytes; what fits into caches gives the speed of caches.
        threads: Threads that read a part each, at most :func:`num_threads`.
        seconds: Passes go on for so long; there are at least two.

    Raises:
        ValueError: An argument is out of range, or ``data`` has another type.
        KeyboardInterrupt: Ctrl-C (whatever the signal's handler raises).
    """

class Link:
    """Moves block records from the far tier into pages; made by `file_link` and `sim_link`.

    An `ExpertRunner` takes the link out of this object; until then the calls below work, afterwards they
    raise ValueError. A transfer is named by its slot, a number below the ``slots`` of `open`: two unfinished
    transfers never share one, and a transfer is unfinished until `poll` has handed its completion out.
    Queued transfers start in the order DEMAND (0), NEAR (1), FAR (2), within one priority in the order in
    which they were submitted. All calls are safe from any thread; those that wait drop the GIL. Contract:
    ``native/src/link/link.h``.
    """

    def name(self) -> str:
        """``file (io_uring)``, ``file (threads)`` or ``sim``."""
    def describe(self, region: int, offset: int) -> str:
        """Where these bytes come from, for messages: ``FILE at byte N``.

        Raises:
            IndexError: There is no such region.
        """
    def regions(self) -> int:
        """How many regions the link was made with; they are numbered from 0."""
    def region_bytes(self, region: int) -> int:
        """Bytes of a region.

        Raises:
            IndexError: There is no such region.
        """
    def open(self, slots: int) -> None:
        """Makes slots 0 to ``slots`` - 1 available; once, before the first `submit`.

        Raises:
            RuntimeError: The link is open already.
            ValueError: ``slots`` is not positive.
        """
    def submit(self, transfers: Sequence[tuple[int, int, int, int, int]], target: _U8) -> None:
        """Queues transfers into rows of ``target``, and starts what there is room for.

        Args:
            transfers: (slot, region, offset, bytes, priority) each; the bytes go to ``target[slot]``.
            target: uint8 [slots, page_bytes], C-contiguous, writable; kept alive by the link, which writes
                to it until the completion of the transfer. Direct reads want rows at multiples of 4096.

        Raises:
            ValueError: A transfer is impossible or its slot is taken; nothing was queued.
            RuntimeError: The link is not open, has failed, or was stopped.
        """
    def cancel(self, slot: int) -> bool:
        """True: the transfer had not started and never will; there will be no completion."""
    def promote(self, slot: int, priority: int) -> None:
        """Moves a queued transfer to the end of a higher priority's queue; otherwise nothing happens."""
    def poll(self) -> list[tuple[int, int]]:
        """Completions since the last call, (slot, error) each; error is 0 or an errno."""
    def wait(self, seconds: float) -> bool:
        """Waits until `poll` has something (True), the limit has passed, or the link stopped or failed."""
    def failure(self) -> str:
        """Empty, or why the whole link has failed."""
    def stats(self) -> dict[str, float]:
        """Counters since the start.

        ``bytes_*`` and ``transfers_*`` (finished without an error) for ``demand``, ``near``, ``far``;
        ``operations`` (reads or copies issued), ``errors``, ``cancelled``, ``queued`` (now), ``in_flight``
        (bytes, now), ``busy_seconds`` (with at least one transfer in flight), ``bandwidth`` (bytes a second
        while busy, a moving estimate).
        """
    def fills_first(self, stream: int, slots: _U32, seconds: float) -> bool:
        """What a stream is given from now on comes after the transfers into these slots; on the card.

        Args:
            stream: CUstream.
            slots: uint32 [n], submitted and not cancelled; those that are over, well or not, count as done.
            seconds: How long to wait for all of them to have started.

        Returns:
            False: they have not, and nothing was ordered.

        Raises:
            RuntimeError: The link has failed or was stopped.
            ValueError: The link copies into host memory.
        """
    def reads_first(self, stream: int, slots: _U32) -> None:
        """Transfers into these slots that are submitted from now on come after all that a stream was given.

        Args:
            stream: CUstream.
            slots: uint32 [n].

        Raises:
            RuntimeError: The link has failed.
            ValueError: The link copies into host memory.
        """
    def stop(self, seconds: float) -> bool:
        """Cancels what is queued and waits until nothing is in flight.

        Returns:
            True: nothing will be written to any target any more. False: something is stuck.
        """

def file_link(
    regions: Sequence[tuple[str, int, int]],
    io: str = "auto",
    direct: bool = True,
    in_flight_bytes: int = 0,
    operation_bytes: int = 0,
    reader_threads: int = 0,
) -> Link:
    """A link that reads files.

    Args:
        regions: (path, offset, bytes) each; offset and bytes in multiples of 4096.
        io: ``uring``, ``threads``, or ``auto``: io_uring where it is to be had.
        direct: Read past the page cache (O_DIRECT) where the file system allows it.
        in_flight_bytes: Most bytes in flight; 0: a measured default.
        operation_bytes: Most bytes of one read, up to which neighbours merge; 0: a measured default.
        reader_threads: With ``threads``; 0: default.

    Raises:
        OSError: A file cannot be opened (``filename`` says which), or ``uring`` is not to be had
            (``filename`` is ``io_uring``).
        ValueError: A region is not aligned or lies beyond its file; an option is out of range.
    """

class CudaUnavailableError(RuntimeError):
    """There is no NVIDIA driver, no card, or the driver cannot be used; the text says which."""

class CudaError(RuntimeError):
    """A call to the driver failed.

    Attributes:
        code: The driver's number.
        sticky: This process can compute nothing on the card any more.
    """

    code: int
    sticky: bool

def cuda_driver_version() -> int:
    """Version of CUDA that the driver is for, such as 12080.

    Raises:
        CudaUnavailableError: There is no usable driver.
    """

def cuda_memory(device: int = 0) -> tuple[int, int]:
    """Free and all bytes of a card's memory.

    Raises:
        CudaUnavailableError: There is no usable driver or no such card.
        CudaError: The driver does not say.
    """

def cuda_pin(memory: _U8, device: int = 0) -> None:
    """Lock host memory in place, so that the card reads it by itself; unpin it before it is freed.

    Args:
        memory: uint8, C-contiguous, writable.
        device: Number of the card.

    Raises:
        CudaUnavailableError: There is no usable driver or no such card.
        CudaError: The system refuses.
    """

def cuda_unpin(memory: _U8, device: int = 0) -> None:
    """Undo :func:`cuda_pin`, for the same array."""

def cuda_link(
    regions: Sequence[tuple[_U8 | None, int, bool, str, int]],
    device: int = 0,
    in_flight_bytes: int = 0,
    buffer_bytes: int = 0,
    buffers: int = 0,
    threads: int = 0,
) -> Link:
    """A link into a card's memory; the rules are in ``native/src/link/cuda_link.h``.

    Args:
        regions: (memory, bytes, pinned, path, offset) each. Without memory, ``bytes`` of the file from
            ``offset`` on are read; with it, path and offset are for messages. Kept alive.
        device: Number of the card.
        in_flight_bytes: Most bytes of prefetches under way; 0: default.
        buffer_bytes: Of one pinned buffer, for regions that are not pinned; at least the largest transfer.
        buffers: How many; 0: default.
        threads: That fill them; 0: default.

    Raises:
        CudaUnavailableError: There is no usable driver or no such card.
        CudaError: The driver refuses, to pin the buffers for example.
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
    """A link out of host memory with a programmed speed, for tests and measurements.

    Args:
        regions: uint8, C-contiguous, of any shape; kept alive.
        bandwidth: Bytes a second; 0: as fast as memory.
        latency: Seconds from the start of a transfer to its first byte, overlapping with other transfers.
        jitter: Up to that many more seconds for each transfer, drawn from ``seed``.
        seed: Of everything that is drawn.
        reorder: Up to that many started transfers finish in a drawn order; 1: in order.
        in_flight_bytes: Most bytes in flight; 0: default.
        copy: False: time passes, bytes do not move.
        fault_rate: Share of transfers that end with EIO, half of their bytes written.
        fail_after: The whole link fails after that many transfers; -1: never.
        stall_after: After that many transfers nothing finishes any more, until `Link.stop`; -1: never.

    Raises:
        ValueError: An option is out of range, or a region is not a contiguous uint8 array.
    """

def policy_names() -> list[str]:
    """Names that :class:`EvictionPolicy` knows."""

def demand_hits(policy: EvictionPolicy, experts: _I32, capacities: list[int], admit: bool = False) -> _I64:
    """Hits of a cache of whole experts that is filled on demand only, for several sizes in one pass.

    After each token a layer keeps the highest keys of what it held and what was chosen.

    Args:
        policy: Taken over, and told of every token.
        experts: int32 [tokens, layers, top_k], no expert twice for a token.
        capacities: Experts of a layer that fit, 0 to all.
        admit: What was chosen stays until the layer's next token, whatever its key, as far as it fits.

    Returns:
        int64 [capacities, layers]: of tokens * top_k choices, those that were there.

    Raises:
        IndexError: An expert does not exist, or a capacity is out of range.
        ValueError: Wrong dtype or shape, or the policy was taken already.
    """

class EvictionPolicy:
    """Which experts of a layer are worth keeping: bookkeeping over (layer, expert), never over pages.

    A cache or a runner takes the policy that it is made with; every later call raises ValueError.

    Args:
        name: ``forecast`` and ``blend`` (ours), ``lcp`` (MoEpic, section 3.3), ``lru``, ``lfu``, ``discount``
            (MELINOE, definition C.1), ``two_level_lru`` (ExpertFlow, section 3.3.1), ``static``, ``belady``.
        layers: Expert layers.
        experts: Experts of a layer.
        omega: ``lcp``: tokens in which an unused expert's priority falls by the factor ``rho``; above 0.
        rho: ``lcp``: above 0, at most 1.
        gamma: ``discount``: factor of the counts at each token; above 0, at most 1.
        ranks: ``static``: float64 [layers, experts]; experts of higher rank are kept.
        future: ``belady``: int32 [tokens, layers, top_k], the experts that will be chosen; -1 for none. Each
            layer's clock is its position in the future.

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
    ) -> None: ...
    @property
    def name(self) -> str: ...
    @property
    def layers(self) -> int: ...
    @property
    def experts(self) -> int: ...
    def access(self, layer: int, experts: _I32, tokens: _I32, pass_tokens: int = 1) -> None:
        """The router of ``layer`` has chosen experts [n], no two alike; its clock goes on by ``pass_tokens``.

        Args:
            layer: Expert layer.
            experts: int32 [n].
            tokens: int32 [n], tokens of the pass that chose each expert, at least 1.
            pass_tokens: Tokens of the pass, at least 1.

        Raises:
            IndexError: A layer or an expert does not exist.
            ValueError: A count below 1; wrong dtype or shape.
        """
    def predict(self, layer: int, experts: _I32) -> None:
        """These experts [n], best first, are expected at the next access of ``layer``.

        Raises:
            IndexError: A layer or an expert does not exist.
            ValueError: Wrong dtype or shape.
        """
    def keys(self, layer: int) -> _F64:
        """Finite keys [experts] of a layer, a copy; the lowest goes first.

        Raises:
            IndexError: The layer does not exist.
        """
    def reset(self) -> None:
        """Forget everything, as after construction."""

class CachePlan:
    """What :meth:`SplitExpertCache.plan` has decided."""

    @property
    def version(self) -> int:
        """Version of the cache that the plan was made for."""
    @property
    def prefetch(self) -> bool: ...
    @property
    def satisfied(self) -> int:
        """Leading experts of the want that have all their blocks once the plan is committed."""
    @property
    def victims(self) -> list[tuple[int, int, int]]:
        """(layer, expert, blocks): so many blocks go, from the last one down."""
    @property
    def fetches(self) -> list[tuple[int | None, int, int, int]]:
        """(page, layer, expert, block); the page is ``None`` until the plan is committed."""

class SplitExpertCache:
    """Which blocks of which experts lie in which page: the state machine that the runner works with.

    For tests and simulation: transfers are up to the caller, who reports what became of them. Rules and
    invariants are in ``native/src/cache/split_cache.h``.

    Args:
        layers: Expert layers.
        experts: Experts of a layer.
        blocks: Blocks of an expert.
        pages: Pages of the slab, one block each.
        page_bytes: Bytes of a page, a multiple of 4096.
        policy: Taken over by the cache.
        targets: int32 [layers, 2]: experts that a layer keeps, and blocks of each.
        reserve: Pages that the targets must leave for blocks on their way; at least 1.

    Raises:
        ValueError: Sizes out of range, targets that take more than ``pages - reserve`` pages, or a policy for
            other sizes or taken already.
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
        """Rises with every change."""
    def resident(self, layer: int, expert: int) -> int:
        """Leading blocks that are ready. IndexError: no such expert; so for the next three."""
    def assigned(self, layer: int, expert: int) -> int:
        """Leading blocks that have a page, ready or being filled."""
    def is_protected(self, layer: int, expert: int) -> bool: ...
    def pins(self, layer: int, expert: int) -> int: ...
    def page(self, layer: int, expert: int, block: int) -> int | None:
        """Page of a block; ``None`` where it has none.

        Raises:
            IndexError: There is no such block.
        """
    def free_pages(self) -> int: ...
    def available(self) -> int:
        """Pages that a demand could have at once: free, or surplus of experts that are not pinned."""
    def in_flight(self) -> int:
        """Pages whose transfer has not been reported back, orphans and staging included."""
    def staging(self) -> int: ...
    def orphans(self) -> int:
        """Pages that nobody wants any more and whose transfer has not finished."""
    def counters(self) -> dict[str, int]:
        """``hits_*`` and ``prefill_hits_*`` by hit kind, and the other fields of ``CacheCounters``."""
    def reset_counters(self) -> None: ...
    def targets(self) -> _I32:
        """[layers, 2], a copy."""
    def check(self) -> str:
        """Empty, or what is inconsistent; recounts everything."""
    def keys(self, layer: int) -> _F64:
        """As :meth:`EvictionPolicy.keys` of the cache's policy."""
    def predict(self, layer: int, experts: _I32) -> None:
        """As :meth:`EvictionPolicy.predict` of the cache's policy."""
    def access(
        self, layer: int, experts: _I32, tokens: _I32 | None = None, pass_tokens: int = 1
    ) -> list[_HitKind]:
        """The router has chosen experts [n]: tells the policy, counts hits, pins the experts.

        Args:
            layer: Expert layer.
            experts: int32 [n], no two alike.
            tokens: int32 [n], tokens of the pass that chose each expert; ``None``: one each.
            pass_tokens: Tokens of the pass; hits of passes with one token are counted apart.

        Raises:
            ValueError: A number is out of range, or an expert is named twice; nothing has changed.
        """
    def release(self, layer: int, expert: int) -> None:
        """Unpin an expert of an access and let it in if its key is high enough.

        Raises:
            RuntimeError: The expert is not pinned.
            ValueError: There is no such expert.
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
    ) -> CachePlan:
        """Decide how the missing blocks of experts [n] get pages; changes nothing.

        Args:
            layer: Whose experts.
            experts: int32 [n], no two alike; without ``prefetch`` they must be pinned.
            at: The layer at work; ``None``: ``layer``.
            prefetch: Speculation, which takes only what it may.
            max_blocks: Most fetches; ``None`` sets no limit.
            whole: An expert of which not all missing blocks get a page gets none.

        Raises:
            ValueError: A number is out of range, an expert is named twice, or a demanded one is not pinned.
        """
    def commit(self, plan: CachePlan) -> list[tuple[int | None, int, int, int]]:
        """Do what the plan says; returns its fetches, now with their pages.

        Raises:
            RuntimeError: The cache has changed since the plan was made; nothing has changed.
        """
    def take_staging(self, at: int) -> int | None:
        """A page that belongs to no expert, in flight until reported; ``None`` when none is available.

        Raises:
            ValueError: The layer does not exist.
        """
    def give_staging(self, page: int) -> None:
        """Give a staging page back; while it is in flight it becomes an orphan.

        Raises:
            RuntimeError: This is no staging page.
        """
    def landed(self, page: int, error: int = 0) -> bool:
        """The transfer into ``page`` has finished; False if the page was an orphan or staging.

        Raises:
            RuntimeError: The page is not being filled.
        """
    def cancelled(self, page: int) -> None:
        """The transfer into ``page`` was cancelled before it started.

        Raises:
            RuntimeError: The page is not being filled.
        """
    def filling(self, page: int) -> bool:
        """Whether the page's transfer has not been reported back. IndexError: no such page."""
    def stale_prefetches(self, layer: int) -> list[tuple[int, int, int, int]]:
        """Fetches of prefetches for unpinned experts of ``layer``, in the order in which to cancel them.

        Raises:
            ValueError: The layer does not exist.
        """
    def set_targets(self, targets: _I32) -> None:
        """New targets int32 [layers, 2]; no block moves, protection follows at once.

        Raises:
            ValueError: As for the constructor; nothing has changed.
        """

class LinkError(RuntimeError):
    """A demanded block could not be read, or nothing has arrived for the stall limit."""

class DeviceLostError(RuntimeError):
    """The link into a card has failed: this process can compute nothing there any more."""

def resident_forward(
    layout: BlockLayout,
    activation: str,
    alpha: float,
    limit: float,
    records: _U8,
    x: _F32,
    top_k_index: _I64,
    top_k_weights: _F32,
    out: _F32,
    activation_bits: int = 16,
) -> int:
    """Weighted sum of each token's experts when all records of a layer lie in memory.

    ``out[t] = ((0 + acc_1) + acc_2) + ...`` over the token's experts in ascending order, where ``acc_e`` is
    the chain of fused multiply-adds over the blocks of ``e`` from 0: bit by bit what
    :meth:`ExpertRunner.finish` computes, whatever lies where.

    Args:
        layout: Of the records.
        activation: As in :func:`moe_forward`.
        alpha: As in :func:`moe_forward`.
        limit: As in :func:`moe_forward`.
        records: uint8 [experts, blocks, record_bytes], C order.
        x: [tokens, hidden], C order.
        top_k_index: int64 [tokens, k], C order; an index outside the layer selects no expert.
        top_k_weights: [tokens, k], C order.
        out: [tokens, hidden], C order, overwritten; must not overlap ``x``.
        activation_bits: As in :func:`moe_forward`.

    Returns:
        Bytes of block records walked.

    Raises:
        ValueError: Shapes or types do not match.
        RuntimeError: ``MOECHAT_ISA`` cannot be honoured.
    """

class ResidentExperts:
    """The records of one layer, checked once, for :func:`resident_forward` by addresses.

    Args:
        layout: As in :func:`resident_forward`, and so are all others; ``records`` is kept alive.

    Raises:
        ValueError: Shapes or types do not match.
    """

    def __init__(
        self,
        layout: BlockLayout,
        activation: str,
        alpha: float,
        limit: float,
        records: _U8,
        activation_bits: int = 16,
    ) -> None: ...
    def forward(self, x: int, top_k_index: int, top_k_weights: int, out: int, tokens: int, k: int) -> int:
        """Like :func:`resident_forward`; nothing is checked.

        Args:
            x: Address of float32 [tokens, hidden], C order, and so on as there.
            top_k_index: Of int64 [tokens, k].
            top_k_weights: Of float32 [tokens, k].
            out: Of float32 [tokens, hidden], not overlapping ``x``.
            tokens: Rows.
            k: Experts of a row.

        Returns:
            Bytes of block records walked.

        Raises:
            RuntimeError: ``MOECHAT_ISA`` cannot be honoured.
        """

class ExpertRunner:
    """Runs the experts of a layer over the split-expert cache and a link.

    For each layer of a pass: :meth:`begin`, then :meth:`prefetch` for layers to come, then :meth:`finish`.
    Resident blocks are computed while missing ones arrive. Calls from several threads take turns. After
    :meth:`close`, in a forked child, and from within a signal handler that interrupts a call of the same
    thread, every call but ``close`` raises RuntimeError. Rules: ``native/src/offload/runner.h``.

    Args:
        layout: Of the records.
        activation: As in :func:`moe_forward`.
        alpha: As in :func:`moe_forward`.
        limit: As in :func:`moe_forward`.
        layers: Expert layers; region i of the link holds the records [experts, blocks] of layer i.
        experts: Experts of a layer.
        pages: Pages of the near tier, of ``layout.record_bytes`` each; two are enough to make progress.
        targets: int32 [layers, 2]: experts that a layer keeps, and blocks of each.
        reserve: Pages that the targets must leave for blocks on their way; at least 1.
        policy: Taken over.
        link: Taken over.
        stall_seconds: How long nothing may arrive before :meth:`finish` gives up.
        whole_experts: Compute an expert once all of it has arrived, prefetch whole ones only.
        populate: Commit the memory of all pages now.
        top_k: Experts that a token uses; decides how much of a prediction :meth:`routing_counts` counts.
        activation_bits: As in :func:`moe_forward`.
        near_memory: Address of ``pages`` pages, in memory of a device, which the caller keeps until after
            :meth:`close`; 0: host memory of the runner's own.
        far_records: uint8 ``[experts * blocks * record_bytes]`` of each layer, in memory of the host, from
            which the CPU can compute what is missing on the device; empty: it computes nothing.

    Raises:
        ValueError: Sizes do not fit together or are out of range, or ``policy`` or ``link`` was taken
            already. Those that were given are used up.
        RuntimeError: The memory was refused.
    """

    def __init__(
        self,
        layout: BlockLayout,
        activation: str,
        alpha: float,
        limit: float,
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
    ) -> None: ...
    @property
    def pages(self) -> int: ...
    @property
    def page_bytes(self) -> int: ...
    @property
    def resident_bytes(self) -> int:
        """Bytes of the pages that lie in memory, as the system reports them; slow."""
    @property
    def huge_bytes(self) -> int:
        """Of these, in huge pages."""
    def begin(self, layer: int, top_k_index: _I64, top_k_weights: _F32, miss: str = "fetch") -> None:
        """The router of ``layer`` has spoken: what is missing is queued, stale prefetches are cancelled.

        A layer that had begun and was not finished is dropped.

        Args:
            layer: Expert layer.
            top_k_index: int64 [tokens, k], C order; an index outside the layer selects no expert.
            top_k_weights: [tokens, k], C order.
            miss: Of a layer for :meth:`finish_on_device`: ``fetch`` brings what is missing over the link,
                ``compute`` leaves it to the CPU but for what the targets keep, ``both`` shares it by the
                rates that link and CPU have lately had together. Experts of more than 8 tokens are always
                fetched; so is everything without ``far_records``.

        Raises:
            ValueError: Shapes or types do not match, or the layer does not exist; nothing has changed.
        """
    def prefetch(
        self, layer: int, scores: _F32 | None, experts: int, max_bytes: int | None, far: bool = False
    ) -> int:
        """Queue missing blocks of ``layer`` into pages that are free or surplus.

        What finds no page yet is queued by :meth:`finish` as the experts at work give theirs back.

        Args:
            layer: Expert layer.
            scores: [experts], C order: the best come first, NaN last; ``None``: all, in ascending order.
            experts: How many of the best, those that are resident included; ignored without scores.
            max_bytes: Most bytes; ``None`` sets no limit.
            far: At the lower of the two priorities of speculation.

        Returns:
            Bytes queued now; 0 if the link has failed.

        Raises:
            ValueError: Shapes or types do not match, a number is negative, or the layer does not exist.
        """
    def finish(self, x: _F32, out: _F32) -> int:
        """Compute the begun layer and release its experts; result as :func:`resident_forward`.

        Args:
            x: [tokens, hidden], C order, with the tokens of :meth:`begin`.
            out: [tokens, hidden], C order, overwritten; must not overlap ``x``.

        Returns:
            Bytes of block records walked.

        Raises:
            LinkError: A block could not be read, or nothing has arrived for ``stall_seconds``. The layer was
                dropped; the next :meth:`begin` tries again.
            KeyboardInterrupt: Ctrl-C while waiting or computing (whatever the signal's handler raises); the
                layer was dropped.
            RuntimeError: No layer has begun.
            ValueError: Shapes or types do not match; the layer stays begun.
        """
    def rows(self) -> tuple[_I32, _I32, _I32, _F32]:
        """The begun layer's tokens by expert, copies.

        Returns:
            Experts ``[rows]``, ascending; first item of each row ``[rows + 1]``; token ``[items]``, ascending
            within a row; router weight ``[items]``.

        Raises:
            RuntimeError: No layer has begun.
        """
    def item_lists(self, lists: _I32) -> tuple[int, int, int, int, int]:
        """Write the items of the begun layer as kernels read them.

        Args:
            lists: int32 ``[n]``, overwritten from its beginning; the order is that of
                ``native/src/offload/device_lists.h``.

        Returns:
            Elements written, rows, items, items of a token at most (at least 1), items of a row at most.

        Raises:
            RuntimeError: No layer has begun.
            ValueError: They do not fit.
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
        """Have the begun layer computed by a device, and release its experts.

        Args:
            stream: CUstream that ``launch`` puts its kernels into; ignored by links that do not order
                streams: with them ``launch`` returns when its kernels are done.
            tokens: Of :meth:`begin`.
            work: Most (token, block) pairs of a call; one block of a row is given even if it has more.
            lists: int32 ``[n]``: the lists of each launch are written there before it is called.
            first: Where those of the first one begin.
            launch: Called with the place at which its lists begin, the place behind them, and the numbers of
                blocks, rows and (token, block) pairs; returns where those of the next one begin. Over all
                calls every block comes once, those of a row in ascending order, but for those that the CPU
                computes.
            x: ``[tokens, hidden]``, C order: what the CPU computes from, after a :meth:`begin` with another
                ``miss`` than ``fetch``.
            out: ``[tokens, hidden]``, C order, the CPU's part of the sum; touched only if there is one (see
                :meth:`far_blocks`).

        Returns:
            Bytes of block records that were handed out.

        Raises:
            DeviceLostError: The card failed; the runner can only be closed.
            LinkError, KeyboardInterrupt, RuntimeError, ValueError: As :meth:`finish`.
            Exception: What ``launch`` raises; the layer was dropped.
        """
    def far_blocks(self) -> int:
        """Blocks of the last layer that the CPU computed where they lie."""
    def abort(self) -> None:
        """Drop the begun layer, if there is one; what it had queued is cancelled."""
    def set_targets(self, targets: _I32) -> None:
        """New targets int32 [layers, 2]; no block moves, protection follows at once.

        Raises:
            ValueError: As for the constructor; nothing has changed.
        """
    def stats(self) -> dict[str, float]:
        """Figures since the last reset.

        ``hits_*`` and ``prefill_hits_*`` for ``full``, ``prefetch``, ``top``, ``miss``: (expert, pass)
        pairs of passes with one token, and with more. In blocks: ``blocks_wanted``, ``blocks_resident``,
        ``blocks_prefetched``, ``fetched_demand``, ``fetched_prefetch``, ``prefetch_wasted``, ``evicted``,
        ``blocks_staged``, ``blocks_far`` (computed by the CPU where they lie, in ``far_seconds``);
        ``admitted`` in experts. ``link_bytes``, its parts ``link_bytes_*`` and
        ``link_transfers_*`` by ``demand``, ``near``, ``far``, and the other fields of :meth:`Link.stats` with
        ``link_`` before them. ``compute_seconds``; ``stall_seconds`` waiting for the link with nothing to
        compute; ``begin_seconds`` of bookkeeping. ``layers_run``, ``kernel_calls``, ``activations``
        (token, expert pairs), ``bytes_computed``. ``pages``, ``pages_peak`` (most that were not free),
        ``page_bytes``.
        """
    def reset_stats(self) -> None: ...
    def routing_counts(self) -> _RoutingCounts:
        """What routing has been like since the last reset, copies; see :meth:`RoutingCounter.counts`.

        Passes of one token count, and predictions one layer ahead that were given with scores.
        """
    def reset_routing_counts(self) -> None: ...
    def hurry_link(self, on: bool) -> None:
        """A simulated link moves at the speed of memory while this is on; for filling a cache."""

    def drain(self) -> None:
        """Wait until nothing is queued or in flight.

        Raises:
            LinkError: Nothing has arrived for ``stall_seconds``.
            KeyboardInterrupt: As in :meth:`finish`.
        """
    def residency(self) -> npt.NDArray[np.int16]:
        """[layers, experts] leading blocks that are ready, a copy."""
    def check(self) -> str:
        """Empty, or what is inconsistent in the cache; slow."""
    def close(self) -> None:
        """Stop the link and give the memory back, once calls in other threads have returned; idempotent."""

class Timeline:
    """Decoding over a near tier on a clock of its own: what :class:`ExpertRunner` would do, and when.

    ``native/src/simulate/timeline.h`` says how. One thread at a time. Times are seconds.

    Args:
        layers: Expert layers.
        experts: Of a layer.
        blocks: Of an expert.
        block_bytes: Bytes of one.
        pages: Of the slab.
        targets: int32 [layers, 2], as for :class:`ExpertRunner`.
        reserve: Likewise.
        policy: Taken: it belongs to the timeline from here on.
        whole_experts: As for :class:`ExpertRunner`.
        miss: ``fetch``, ``compute`` or ``both``: what becomes of missing blocks.
        ahead: ``none``, ``ranked`` (by the rankings of :meth:`run`) or ``whole-layer``.
        lookahead: Most layers ahead.
        ahead_experts: Most experts fetched ahead for a layer.
        ahead_bytes: Most bytes; ``None``: no limit.
        stream_tokens: Passes of so many tokens fetch the whole next layer ahead; 0: none do.
        group_items: (token, expert) pairs that are added up at a time; 0: all of a pass.
        attention: A layer without its experts.
        head: Once a pass.
        call: Near tier: for computing anything at all.
        compute: Near tier: n (token, block) pairs, n = 1, 2, ...; beyond, the last step goes on.
        far_block: Far tier: one block.
        far_block_shared: The same while the link is busy.
        latency: Of the link, from the start of a transfer to its first byte.
        link: n neighbouring blocks, n = 1, 2, ..., as many as are moved at once at most.
        link_shared: The same while the far tier computes; empty: as ``link``.
        in_flight_bytes: Most bytes in flight.

    Raises:
        ValueError: A size or a time is out of range.
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
    ) -> None: ...
    def preload(self, layer: int, experts: _I32, blocks: int) -> int:
        """Put the first blocks of these experts, int32 [n], into free pages, in no time; returns how many."""
    def run(
        self,
        experts: _I32,
        starts: npt.NDArray[np.int64],
        rankings: _I32 | None,
        start: int = 0,
        stop: int | None = None,
        hurried: bool = False,
    ) -> dict[str, npt.NDArray[np.float64]]:
        """Play passes ``start`` to ``stop`` of a trace.

        Args:
            experts: int32 [tokens, layers, k].
            starts: int64 [passes + 1]: first token of each pass, and the end of the last one.
            rankings: int32 [depths, tokens, layers, width]: experts expected of a token and layer one, two,
                ... layers before, best first; -1 for none.
            start: First pass.
            stop: The one after the last; ``None``: all.
            hurried: Nothing takes any time.

        Returns:
            float64 [stop - start] each: ``seconds``, ``stall`` (of these, with nothing to compute near),
            ``demand_bytes`` and ``prefetch_bytes`` over the link.

        Raises:
            ValueError: Shapes do not fit together, or an expert is named that there is not.
            KeyboardInterrupt: As the handler of a signal says; the timeline is of no use after it.
        """
    def drain(self) -> None:
        """Let everything that is on its way arrive."""
    def stats(self) -> dict[str, float]:
        """Figures since the last reset.

        ``hits_*``, ``prefill_hits_*``, ``blocks_*``, ``fetched_*``, ``prefetch_wasted``, ``evicted``,
        ``admitted``, ``link_bytes_*``, ``link_transfers_*``, ``link_operations``, ``link_cancelled``,
        ``link_busy_seconds``, ``kernel_calls``, ``pages_peak``, ``compute_seconds`` and ``stall_seconds`` as
        :meth:`ExpertRunner.stats`. ``blocks_computed`` near, ``far_blocks`` and ``far_seconds`` of the far
        tier; ``now``, the clock.
        """
    def reset_stats(self) -> None: ...
    def residency(self) -> npt.NDArray[np.int16]:
        """[layers, experts] leading blocks that are ready, a copy."""
    def check(self) -> str:
        """Empty, or what is inconsistent in the cache; slow."""

def prediction_depth(experts: int, top_k: int) -> int:
    """Places of a prediction that are counted: ``4 * top_k``, at least 16, at most 64 and ``experts``."""

class RoutingCounter:
    """Counts with how many cached experts the choices of recorded routing would have been hits.

    Calls from several threads take turns. What is counted: ``native/src/cache/routing_counter.h``.

    Args:
        policy: Taken over.
        top_k: Experts that a token uses, at least 1.

    Raises:
        ValueError: ``top_k`` is out of range, or the policy was taken already.
    """

    def __init__(self, policy: EvictionPolicy, top_k: int) -> None: ...
    @property
    def layers(self) -> int: ...
    @property
    def experts(self) -> int: ...
    @property
    def depth(self) -> int:
        """Places of a prediction that are counted; see :func:`prediction_depth`."""
    @property
    def top_k(self) -> int: ...
    @property
    def policy(self) -> str: ...
    def run(self, experts: _I32, predictions: _I32 | None = None, passes: _I64 | None = None) -> None:
        """Feed routing, pass by pass and layer by layer; drops the GIL.

        Args:
            experts: int32 [tokens, layers, k], C order: what was chosen.
            predictions: int32 [tokens, layers, n], C order: rankings, best first, that were made for each of
                these; the policy is told of the first ``top_k``.
            passes: int64 [n]: tokens of each pass, which add up to all; one each if not given. Passes of
                more than one token reach the policy, but are not counted.

        Raises:
            ValueError: Shapes do not match, or there is no such expert; what came before it is counted.
            KeyboardInterrupt: Ctrl-C (whatever the signal's handler raises); what came before it is counted.
        """
    def counts(self) -> _RoutingCounts:
        """Counts since the last reset, copies.

        Returns:
            Passes of one token, then int64 arrays: predicted accesses [layers], activations [layers,
            experts], activations by rank [layers, experts], correct predictions by place [layers, depth],
            predictions by place and rank [layers, depth, experts].
        """
    def reset(self) -> None:
        """Set the counts to 0; the policy remembers."""

class LayerPlan:
    """What an allocation comes to: the configurator's inner loops (``native/src/plan/layer_plan.h``).

    Args:
        miss: 0: MoEpic's equations 5 to 7; 1, 2, 3: the engine's with fetching, computing, both.
        top_k: K, at least 1.
        times: Seconds: attention, moe, head, load, latency, far tier, link and far tier together.
        grain: Share of an expert that is computed at a time.
        shares: float64 [outcomes, layers, experts + 1], C order, as the others: H.
        chances: The same shape: of each outcome.
        accuracy: float64 [layers, depth]: P.
        cached: float64 [outcomes, layers, experts + 1, depth]: PH.

    Raises:
        ValueError: Shapes do not match, or a number is out of range; as for all methods.
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
        """Go through the layers of several allocations; drops the GIL.

        Args:
            experts: int64 [candidates, layers].
            theta: float64, the same shape; 0 where there are no experts.
            more: Loads by which a window is longer to see what it is worth.

        Returns:
            m, exposed seconds, windows and their prices, each [candidates, layers].
        """
    def split(self, volumes: _F64, theta: float) -> tuple[_I64, _F64, _F64, _F64]:
        """MoEpic's ExpertSplit for several sets of volumes; drops the GIL.

        Args:
            volumes: float64 [variants, layers], in experts.
            theta: Of every layer; below 0: free.

        Returns:
            Experts, m, exposed seconds and windows, each [variants, layers].
        """
    def option_costs(self, experts: _I64, theta: _F64, windows: _F64, prices: _F64, tie: float) -> _F64:
        """Cost of options for every layer: exposed time, less what the window left is worth; drops the GIL.

        Args:
            experts: int64 [pairs].
            theta: float64 [pairs].
            windows: float64 [layers], seconds.
            prices: float64 [layers].
            tie: Seconds for every missing expert.

        Returns:
            float64 [layers, pairs].
        """

class RmsNorm:
    """``out = (offset + weight) * x / sqrt(mean(x^2) + eps)``, row by row.

    As all that takes addresses here: what lies at an address is neither checked nor kept alive. Callers have
    made sure that it is on the CPU, has the type and the size named, and no gaps but those of a stride given.

    Args:
        type: ``float32``, ``bfloat16`` or ``float16``, of everything.
        weight: Address of [cols].
        cols: Elements of a row.
        eps: Added to the mean.
        offset: 0 or 1.
        round_first: Round the normalised row to the type before it is multiplied.

    Raises:
        ValueError: A number or a name is out of range; as for everything below.
    """

    def __init__(
        self, type: str, weight: int, cols: int, eps: float, offset: float, round_first: bool
    ) -> None: ...
    def __call__(self, x: int, out: int, rows: int) -> None:
        """Addresses of [rows, cols]; drops the GIL, as all calls below."""

class Attention:
    """Attention of few query tokens of one sequence over all its keys.

    Sums are made in parts of 128 keys, in order: the result does not depend on the number of threads.

    Args:
        type: Of queries, keys, values and the result.
        kv_heads: Heads of keys and values.
        group: Query heads of each.
        key_dim: Elements of a key, without its tail.
        tail_dim: Elements of a tail, which all heads share; 0: none. Queries have key_dim + tail_dim.
        value_dim: Elements of a value.
        scale: Multiplies the products.
        sinks: Address of float32 [kv_heads * group], logits that only the sum of the softmax sees; or 0.
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
    ) -> None:
        """Addresses, each followed by its strides in elements.

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
            visible: bool [tokens, context], or 0: every token sees every key.
            visible_token: Stride.
            out: [tokens, heads, value_dim].
        """

class Routing:
    """A router: logits, the choice of experts and their weights.

    Args:
        type: Of hidden states, weight and bias.
        weight: Address of [experts, hidden].
        bias: Address of [experts], or 0.
        experts: Experts of the layer.
        hidden: Width of the hidden states.
        scoring: ``softmax``, ``sigmoid``, or ``softmax-chosen``: over the chosen experts alone.
        chosen: Experts of a token.
        correction: Address of float32 [experts], added for the choice alone; or 0.
        normalise: Weights of a token sum up to ``scale``.
        scale: Multiplies the weights.
        weight_type: Of the weights given out.
        logits_type: Of the logits: ``float32`` or as ``type``.
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
    ) -> None: ...
    def __call__(self, x: int, tokens: int, logits: int, index: int, weights: int) -> None:
        """Addresses of [tokens, hidden], [tokens, experts], int64 and weights [tokens, chosen]."""

class DenseProduct:
    """A dense layer for :class:`LayerStep`; keeps what it reads alive."""

def packed_product(
    layout: LinearLayout,
    data: npt.NDArray[np.uint8],
    bias: npt.NDArray[np.float32] | None,
    activation_bits: int,
) -> DenseProduct:
    """As :func:`linear_forward`."""

def rows16_product(
    weights: npt.NDArray[np.uint16], is_fp16: bool, bias: npt.NDArray[np.float32] | None
) -> DenseProduct:
    """As :func:`rows16_forward`."""

class LayerStep:
    """One token through a decoder layer up to its experts, bit by bit as its parts one after the other.

    Args:
        type: Of hidden states and attention cache.
        before: Norm of the layer's inputs.
        query: Projection; key, value and output as well.
        key: Of keys.
        value: Of values.
        output: Of what attention gives.
        head_norms: Norms of queries and keys, of each head or of all heads as one row; or ``None``.
        attention: Of the layer, without a tail.
        angles: Angles of a token.
        width: Elements of a head that are rotated: ``angles``, or twice as many.
        after: Norm before the router.
        routing: ``None``: the step ends with this norm.

    Raises:
        ValueError: The parts do not fit together.
    """

    def __init__(
        self,
        type: str,
        before: RmsNorm,
        query: DenseProduct,
        key: DenseProduct,
        value: DenseProduct,
        output: DenseProduct,
        head_norms: tuple[RmsNorm, RmsNorm] | None,
        attention: Attention,
        angles: int,
        width: int,
        after: RmsNorm,
        routing: Routing | None,
    ) -> None: ...
    def route(
        self,
        hidden: int,
        cos: int,
        sin: int,
        keys: int,
        key_head: int,
        values: int,
        value_head: int,
        held: int,
        residual: int,
        x: int,
        index: int,
        weights: int,
    ) -> None:
        """Addresses and strides in elements, of one token.

        Args:
            hidden: [hidden].
            cos: [angles].
            sin: [angles].
            keys: [kv_heads, more than ``held``, key_dim]; the token's keys are written.
            key_head: Stride of the heads.
            values: As the keys.
            value_head: Stride of the heads.
            held: Tokens before this one.
            residual: [hidden], written: ``hidden`` and the attention's result.
            x: float32 [hidden], written: what the experts receive.
            index: int64 [chosen], written.
            weights: float32 [chosen], written.
        """
    def normalise(
        self,
        hidden: int,
        cos: int,
        sin: int,
        keys: int,
        key_head: int,
        values: int,
        value_head: int,
        held: int,
        residual: int,
        normed: int,
    ) -> None:
        """As :meth:`route`, for a step without a router; ``normed`` [hidden] is written."""
    def add(self, x: int, residual: int) -> None:
        """Adds float32 [hidden], rounded to the type, to ``residual``."""

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
    """Rotary embedding: pairs (i, i + width / 2) of the first ``width`` elements of each head are turned.

    Args:
        type: Of everything.
        x: Address of [tokens, heads, dim] by the strides that follow, in elements.
        token_stride: Stride.
        head_stride: Stride.
        out: Address of [tokens, heads, dim].
        tokens: Tokens.
        heads: Heads.
        dim: Elements of a head.
        cos: Address of [tokens, angles].
        sin: The same.
        angles: ``width``, or half of it where both of a pair share one.
        width: Elements turned; the others are copied.
    """

def largest_logit(logits: _F32) -> int:
    """The first of the largest of [vocabulary]; -1 where one is not a number."""

def sample(logits: _F32, temperature: float, top_k: int, top_p: float, min_p: float, where: float) -> int:
    """Draw a token.

    Args:
        logits: [vocabulary].
        temperature: Above 0.
        top_k: Tokens kept, and those equal to the last of them; 0: all.
        top_p: Mass of the likeliest tokens kept; 1: all.
        min_p: Least probability relative to the likeliest token; 0: none.
        where: Uniform in [0, 1): decides.

    Returns:
        The token; -1 where logits are neither finite nor minus infinity.
    """
