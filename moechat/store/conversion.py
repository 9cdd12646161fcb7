"""Writes the files of a store that a conversion has not finished yet."""

from __future__ import annotations

import mmap
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from moechat import _native
from moechat.errors import COPY_AGAIN, CheckpointError
from moechat.geometry import ExpertGeometry
from moechat.store.calibrated import Calibration, PackExpert
from moechat.store.checkpoint import Checkpoint
from moechat.store.encoded_file import dense_chunks
from moechat.store.expert_refs import ExpertRef, VectorRef
from moechat.store.manifest import mtp_ordinal
from moechat.store.outline import DenseFile, ExpertsFile, PlannedFile, SideFile, StoreOutline
from moechat.store.progress import ConvertProgress, ProgressCallback
from moechat.store.quantizer import Biases, Matrices, Packer, choose_solver, make_packer, relative_loss
from moechat.store.reread import require_digest
from moechat.store.shard_supply import Supply
from moechat.store.side_by_side import Advance, write_side_by_side
from moechat.store.workspace import Workspace

_COPY_CHUNK = 8 << 20
# One thread hashes a file, which limits how fast it is written; and there is more to do while one is synced.
_FILES_AT_ONCE = 4
_EXPERTS_AT_ONCE_BYTES = 512 << 20


class Report:
    """Sends progress to the caller's callback, if there is one."""

    def __init__(self, callback: ProgressCallback | None, total: int) -> None:
        self._callback = callback
        self._total = total

    def at(self, stage: str, done: int, detail: str) -> None:
        """Report a stage with the bytes done so far."""
        if self._callback is not None:
            self._callback(ConvertProgress(stage, done, self._total, detail))

    def notice(self, text: str) -> None:
        """Report a remark for the user."""
        self.at("notice", 0, text)

    def waiting(self) -> None:
        """Report that another process converts the same model."""
        self.at("waiting", 0, "another process is converting this model")


class Conversion:
    """Writes the files that are missing from a workspace.

    Attributes:
        solver: The solver of the experts; after :meth:`run` the one that was used.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        outline: StoreOutline,
        workspace: Workspace,
        solver: str,
        report: Report,
        supply: Supply | None,
        calibration: Calibration | None,
    ) -> None:
        """Create; nothing is written before :meth:`run`.

        Args:
            checkpoint: The source.
            outline: Files of the store.
            workspace: Keeps finished files.
            solver: Of the experts.
            report: Receives progress.
            supply: Provides the parts of the source; ``None`` if all are here.
            calibration: Measures inputs of experts, if ``solver`` is ``calibrated``.
        """
        self._checkpoint = checkpoint
        self._outline = outline
        self._workspace = workspace
        self.solver = solver
        self._report = report
        self._supply = supply
        self._calibration = calibration
        self._experts = [file for file in outline.files if isinstance(file, ExpertsFile)]
        self._provided = ""
        self._done = 0
        self._loss_noted = False

    def run(self) -> None:
        """Write them; the workspace records each that is finished."""
        self._workspace.recheck(self._outline, lambda name, size: self._advance(size, "checking", name))
        self._done = sum(record.bytes for record in self._workspace.finished.values())
        self._workspace.require_disk(self._outline)
        missing = [file for file in self._outline.files if file.name not in self._workspace.finished]
        if self._supply is not None:
            missing = self._supply.order(missing)
        at_once = self._files_at_once(missing)
        if at_once > 1:
            self._write_side_by_side(missing, at_once)
            return
        pack: PackExpert | None = None
        for planned in missing:
            of_layer = isinstance(planned, ExpertsFile) and mtp_ordinal(planned.name) is None
            if of_layer and self._calibration is not None:
                calibration, self._calibration = self._calibration, None
                self._provide(planned)
                if not calibration.run(self._convert_layer, self._last_missing_layer()):
                    self.solver = choose_solver("auto", self._outline.geometry.bits, calibrated=False)
            if planned.name in self._workspace.finished:
                continue  # written during the calibration
            if isinstance(planned, ExpertsFile) and pack is None and not self._outline.geometry.kept:
                pack = _numbered(make_packer(self._outline.geometry, self.solver))
            self._provide_and_write(planned, pack)

    def _files_at_once(self, missing: list[PlannedFile]) -> int:
        """How many files are written side by side.

        It is one where experts are quantised, because all threads work on one expert then, and where the
        source comes in parts, which are provided for one file after the other.
        """
        geometry = self._outline.geometry
        if not geometry.kept or not (self._supply is None or self._supply.is_one_part(missing)):
            return 1
        fitting = max(1, _EXPERTS_AT_ONCE_BYTES // geometry.expert_bytes)
        threads = _native.num_threads()
        return min(_FILES_AT_ONCE, 2 * threads if threads > 1 else 1, fitting, len(missing))

    def _write_side_by_side(self, files: list[PlannedFile], at_once: int) -> None:
        def write(planned: PlannedFile, advance: Advance) -> None:
            self._checkpoint.require_unchanged()
            self._write(planned, None, advance, threads=1)

        for planned in files:
            self._provide(planned)
        write_side_by_side(files, write, self._advance, at_once)
        # Only now: the part may be discarded when all that needs it is written.
        for planned in files:
            if self._supply is not None:
                self._supply.note_written(planned)

    def _provide_and_write(self, planned: PlannedFile, pack: PackExpert | None) -> None:
        self._provide(planned)
        self._write(planned, pack, self._advance)
        if self._supply is not None:
            self._supply.note_written(planned)

    def _last_missing_layer(self) -> int:
        """Ordinal of the last layer of the model, not of a head, whose experts are not written."""
        finished = self._workspace.finished
        return max(
            ordinal
            for ordinal, file in enumerate(self._experts)
            if file.name not in finished and mtp_ordinal(file.name) is None
        )

    def _convert_layer(self, ordinal: int, make: Callable[[], PackExpert]) -> NDArray[np.uint8]:
        """See :data:`moechat.store.calibrated.ConvertLayer`."""
        planned = self._experts[ordinal]
        if planned.name not in self._workspace.finished:
            self._provide_and_write(planned, make())
            later = (file for file in self._experts[ordinal:] if file.name not in self._workspace.finished)
            if (following := next(later, None)) is not None:
                self._provide(following)
        shape = self._outline.geometry.layer_shape
        path = self._workspace.path(planned.name)
        return np.memmap(path, np.uint8, "r", offset=len(planned.header), shape=shape)

    def _provide(self, planned: PlannedFile) -> None:
        """Make what a file is written from readable; again for the same file, do nothing."""
        if self._supply is not None and self._provided != planned.name:
            self._supply.provide(planned)
            self._provided = planned.name
        self._checkpoint.require_unchanged()

    def _write(
        self, planned: PlannedFile, pack: PackExpert | None, advance: Advance, threads: int | None = None
    ) -> None:
        sources = (planned.source,) if isinstance(planned, SideFile) else ()
        with self._workspace.create(planned.name, self._checkpoint.file_mode(*sources)) as file:
            if isinstance(planned, ExpertsFile):
                self._write_experts(planned, file.write, pack, advance, threads)
            elif isinstance(planned, DenseFile):
                self._write_dense(planned, file.write, advance)
            else:
                self._copy(planned, file.write, advance)
            size, digest = file.commit()
        for source in sources:
            require_digest(source, digest)
        self._checkpoint.require_readable()  # else it would count as finished when the conversion goes on
        self._require_size(planned, size)
        self._workspace.record(planned.name, size, digest)

    def _advance(self, size: int, stage: str, detail: str) -> None:
        self._done += size
        self._report.at(stage, self._done, detail)

    def _require_size(self, planned: PlannedFile, size: int) -> None:
        if size != planned.nbytes:
            raise CheckpointError(
                f"{planned.name} became {size} bytes instead of {planned.nbytes}: the source has changed"
            )

    def _copy(self, planned: SideFile, write: Callable[[bytes], None], advance: Advance) -> None:
        with open(planned.source, "rb") as source:
            while data := source.read(_COPY_CHUNK):
                write(data)
                advance(len(data), "files", planned.name)

    def _write_dense(self, planned: DenseFile, write: Callable[[bytes], None], advance: Advance) -> None:
        write(planned.header)
        advance(len(planned.header), "dense", planned.name)
        for tensor in planned.tensors:
            for data in dense_chunks(self._checkpoint.tensors, tensor):
                write(data)
                advance(memoryview(data).nbytes, "dense", tensor.name)
            if tensor.encoding is not None:  # others are released while they are read
                self._checkpoint.tensors.release([tensor.name])

    def _write_experts(
        self,
        planned: ExpertsFile,
        write: Callable[[object], None],
        pack: PackExpert | None,
        advance: Advance,
        threads: int | None,
    ) -> None:
        """Write the experts of a layer; without a packer, in the encodings of the source by ``threads``."""
        write(planned.header)
        advance(len(planned.header), "experts", f"layer {planned.source.layer}")
        geometry = self._outline.geometry
        ordinal = mtp_ordinal(planned.name)
        layout = geometry.layout_of(self._experts.index(planned) if ordinal is None else ordinal)
        buffer = _page_aligned(geometry)
        count = len(planned.source.experts)
        for number, expert in enumerate(planned.source.experts):
            matrices = None if pack is None else self._matrices(expert)
            try:
                if pack is None or matrices is None:
                    self._rearrange(layout, expert, buffer, threads)
                else:
                    pack(number, matrices, self._biases(expert), buffer)
            except ValueError as problem:
                raise self._damaged(expert, number, str(problem)) from problem
            if matrices is not None:
                self._note_loss(expert, matrices, buffer)
            write(buffer)
            self._checkpoint.release(expert)
            detail = f"layer {planned.source.layer}, expert {number + 1} of {count}"
            advance(buffer.nbytes, "experts", detail)

    def _damaged(self, expert: ExpertRef, number: int, problem: str) -> CheckpointError:
        """The error for an expert that cannot be packed; the problem begins with the name of the matrix."""
        name = problem.split(" ", 1)[0]
        matrix = dict(expert.matrices).get(name, expert.gate)
        return CheckpointError(
            f"{self._checkpoint.place(matrix.key)} is damaged, or cannot be stored with "
            f"{self._outline.geometry.title}: expert {number}, {problem}",
            hint=COPY_AGAIN,
        )

    def _note_loss(self, expert: ExpertRef, matrices: Matrices, record: NDArray[np.uint8]) -> None:
        """Report once how much a second quantisation changes the weights."""
        source = self._checkpoint.tensors.packed_as(expert.gate.key)
        if self._loss_noted or source is None:
            return
        self._loss_noted = True
        bits = self._outline.geometry.bits
        text = f"experts are {source} in the checkpoint; "
        if bits == 16:
            text += "they are stored with 16 bits, as the values that they stand for"
        else:
            loss = relative_loss(self._outline.geometry, matrices, record)
            text += (
                f"they are quantised again, to {bits} bits, which changes a weight by {100 * loss:.2g} % "
                "(root mean square of the first expert)"
            )
        self._report.notice(text)

    def _rearrange(
        self, layout: _native.BlockLayout, expert: ExpertRef, out: NDArray[np.uint8], threads: int | None
    ) -> None:
        """Write an expert with its values as they are in the source."""
        source = self._checkpoint
        gate, down = source.encoded_rows(expert.gate), source.encoded_rows(expert.down)
        up = None if expert.up is None else source.encoded_rows(expert.up)
        _native.pack_kept(layout, gate, up, down, self._biases(expert), out, threads)

    def _matrices(self, expert: ExpertRef) -> Matrices:
        source = self._checkpoint
        up = None if expert.up is None else source.matrix(expert.up)
        return source.matrix(expert.gate), up, source.matrix(expert.down)

    def _biases(self, expert: ExpertRef) -> Biases | None:
        if expert.gate_bias is None or expert.down_bias is None:
            return None
        up = None if expert.up_bias is None else self._finite(expert.up_bias)
        return self._finite(expert.gate_bias), up, self._finite(expert.down_bias)

    def _finite(self, ref: VectorRef) -> NDArray[np.float32]:
        values = self._checkpoint.vector(ref)
        if not np.isfinite(values).all():
            raise CheckpointError(
                f"{self._checkpoint.place(ref.key)} has values that are not finite", hint=COPY_AGAIN
            )
        return values


def _numbered(pack: Packer) -> PackExpert:
    """The packer of a layer that packs all experts alike."""
    return lambda _number, matrices, biases, out: pack(matrices, biases, out)


def _page_aligned(geometry: ExpertGeometry) -> NDArray[np.uint8]:
    """Uninitialised ``[blocks, record_bytes]`` for one expert, aligned to a page."""
    shape = (geometry.blocks_per_expert, geometry.record_bytes)
    memory = mmap.mmap(-1, geometry.expert_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return np.ndarray(shape, dtype=np.uint8, buffer=memory)
