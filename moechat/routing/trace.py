"""Routing traces: the experts that the routers of a model chose for each token.

A trace is an ``.npz`` file (``numpy.savez``) without pickled objects, with these arrays; others are ignored:

- ``experts``, integers ``[tokens, layers, k]``: experts of each token and expert layer, in the model's
  order, best first if known; no expert twice for one token.
- ``offsets``, integers ``[sequences + 1]``, ascending from 0 to ``tokens``: sequence i is rows ``offsets[i]``
  to ``offsets[i + 1] - 1``. Optional; default: one sequence.
- ``num_experts``, one integer: experts in a layer. Optional; default: the largest index plus 1.
- ``weights``, ``[tokens, layers, k]``: weights of the experts' outputs: floating point, or uint8 in steps of
  1/255. Optional; ``probs_u8``, the name in some published traces, is read too.
- ``tokens``, integers ``[tokens]``: token ids. Optional.
- ``prompt_lengths``, integers ``[sequences]``: number of leading rows of a sequence that are its prompt,
  computed in passes of many tokens; the rows after it are answers, one token per pass. Optional.
- ``gates``, ``embedding_ids`` and ``embeddings``: see :mod:`moechat.routing.trace_gates`. Optional.
"""

from __future__ import annotations

import zipfile
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from moechat.atomic_file import replacing
from moechat.errors import UsageError
from moechat.routing.trace_gates import ARRAYS, MAX_GATES, TraceGates, gates_of

# 1 GiB of int32: 10 million tokens with 27 choices each. A larger file is an error or an attack.
MAX_CHOICES = 1 << 28
MAX_EXPERTS = 1 << 20
_MAX_SEQUENCES = 1 << 24
_ALIKE_CHUNK = 8192
_NPY_HEADER_BYTES = 1 << 12
_KNOWN = ("experts", "offsets", "num_experts", "weights", "tokens", "prompt_lengths")
_OTHER_WEIGHTS = "probs_u8"


@dataclass(frozen=True)
class Trace:
    """Recorded routing of one or more sequences.

    Attributes:
        experts: int32 ``[tokens, layers, k]``; no expert twice for one token and layer.
        offsets: int64 ``[sequences + 1]``, ascending from 0 to ``tokens``.
        num_experts: Experts in a layer.
        weights: float16 ``[tokens, layers, k]`` weights of the routers, or ``None``.
        token_ids: int32 ``[tokens]``, or ``None``.
        prompt_lengths: int64 ``[sequences]``: leading rows of each sequence that are its prompt, or ``None``.
        gates: Distributions of the routers, or ``None``.

    Raises:
        ValueError: Shapes or values contradict each other.
    """

    experts: npt.NDArray[np.int32]
    offsets: npt.NDArray[np.int64]
    num_experts: int
    weights: npt.NDArray[np.float16] | None = None
    token_ids: npt.NDArray[np.int32] | None = None
    prompt_lengths: npt.NDArray[np.int64] | None = None
    gates: TraceGates | None = None

    def __post_init__(self) -> None:
        if self.experts.ndim != 3 or 0 in self.experts.shape:
            raise ValueError(f"experts has shape {list(self.experts.shape)}, not [tokens, layers, k]")
        offsets = self.offsets
        if offsets.ndim != 1 or len(offsets) < 2 or offsets[0] != 0 or offsets[-1] != len(self.experts):
            raise ValueError(f"offsets does not run from 0 to the number of tokens, {len(self.experts)}")
        if (np.diff(offsets) <= 0).any():
            raise ValueError("offsets is not strictly ascending")
        low, high = int(self.experts.min()), int(self.experts.max())
        if low < 0 or high >= self.num_experts:
            raise ValueError(f"experts runs from {low} to {high}; there are {self.num_experts} experts")
        at = _first_repeated(self.experts)
        if at is not None:
            raise ValueError(f"token {at[0]} names expert {self.experts[*at]} twice in layer {at[1]}")
        self._check_options()

    def _check_options(self) -> None:
        for name, array, shape in (
            ("weights", self.weights, self.experts.shape),
            ("tokens", self.token_ids, (self.tokens,)),
            ("prompt_lengths", self.prompt_lengths, (self.sequences,)),
        ):
            if array is not None and array.shape != shape:
                raise ValueError(f"{name} has shape {list(array.shape)}, not {list(shape)}")
        if self.weights is not None and not np.isfinite(self.weights).all():
            raise ValueError("weights holds a value that is not finite")
        if self.token_ids is not None and self.token_ids.min() < 0:
            raise ValueError("tokens holds a negative number")
        prompts = self.prompt_lengths
        if prompts is not None and ((prompts < 0) | (prompts > np.diff(self.offsets))).any():
            raise ValueError("prompt_lengths holds a number that is negative or more than its sequence has")
        shape = (self.tokens, self.layers, self.num_experts)
        if self.gates is not None and self.gates.gates.shape != shape:
            raise ValueError(f"gates has shape {list(self.gates.gates.shape)}, not {list(shape)}")

    @property
    def tokens(self) -> int:
        """Number of tokens (rows)."""
        return len(self.experts)

    @property
    def layers(self) -> int:
        """Number of expert layers."""
        return int(self.experts.shape[1])

    @property
    def top_k(self) -> int:
        """Experts per token and layer."""
        return int(self.experts.shape[2])

    @property
    def sequences(self) -> int:
        """Number of sequences."""
        return len(self.offsets) - 1

    @classmethod
    def read(cls, path: str | Path, *, gates: bool = False) -> Trace:
        """Read a trace file.

        Args:
            path: The file.
            gates: Also what :mod:`moechat.routing.trace_gates` describes; replaying a trace does not need it,
                and it is most of the file.

        Raises:
            UsageError: The file does not exist or is not a trace; the message gives the reason.
        """
        path = Path(path)
        try:
            if not zipfile.is_zipfile(path):
                path.stat()
                raise ValueError("it is not an .npz file")
            _require_small(path)
            with np.load(path, allow_pickle=False) as file:
                names = (*_KNOWN, *ARRAYS) if gates else _KNOWN
                arrays = {name: file[name] for name in names if name in file.files}
                if "weights" not in arrays and _OTHER_WEIGHTS in file.files:
                    arrays["weights"] = file[_OTHER_WEIGHTS]
                return _from_arrays(arrays)
        except FileNotFoundError:
            raise UsageError(f"there is no trace {path}") from None
        except (OSError, ValueError, EOFError, zipfile.BadZipFile, zlib.error) as problem:
            raise UsageError(
                f"{path} is not a routing trace: {problem}",
                hint="a trace is an .npz file with integers 'experts' [tokens, layers, k] and 'offsets'",
            ) from problem

    def write(self, path: str | Path) -> None:
        """Write a file for :meth:`read`, with the narrowest integer type for the experts.

        An existing file is replaced atomically.

        Raises:
            OSError: The file cannot be written.
        """
        arrays: dict[str, npt.NDArray[Any]] = {
            "experts": self.experts.astype(np.min_scalar_type(self.num_experts - 1)),
            "offsets": self.offsets,
            "num_experts": np.array(self.num_experts, dtype=np.int64),
        }
        if self.weights is not None:
            arrays["weights"] = self.weights
        if self.token_ids is not None:
            arrays["tokens"] = self.token_ids
        if self.prompt_lengths is not None:
            arrays["prompt_lengths"] = self.prompt_lengths
        if self.gates is not None:
            arrays |= self.gates.arrays()
        with replacing(Path(path)) as file:
            np.savez_compressed(file, **arrays)  # type: ignore[arg-type]

    def head(self, tokens: int, *, first_sequence: int = 0) -> Trace:
        """The first tokens from the beginning of a sequence, across the ends of sequences.

        Args:
            tokens: Most tokens.
            first_sequence: Sequence to start with.

        Raises:
            UsageError: The sequence does not exist, or ``tokens`` is less than 1.
        """
        if tokens < 1 or not 0 <= first_sequence < self.sequences:
            raise UsageError(
                f"{tokens} tokens from sequence {first_sequence} on: the trace has {self.sequences} sequences"
            )
        start = int(self.offsets[first_sequence])
        rows = slice(start, start + tokens)
        experts = self.experts[rows]
        inner = self.offsets[first_sequence:] - start
        offsets = np.append(inner[inner < len(experts)], len(experts))
        prompts = self.prompt_lengths
        if prompts is not None:
            prompts = np.minimum(prompts[first_sequence:][: len(offsets) - 1], np.diff(offsets))
        return Trace(
            np.ascontiguousarray(experts),
            offsets,
            self.num_experts,
            None if self.weights is None else np.ascontiguousarray(self.weights[rows]),
            None if self.token_ids is None else self.token_ids[rows].copy(),
            prompts,
            None if self.gates is None else self.gates.rows(rows),
        )

    def locality(self) -> float:
        """Mean share of a token's experts that the previous token of the sequence used in the same layer.

        ``top_k / num_experts`` for random routing. NaN if no sequence has two tokens.
        """
        same_sequence = np.ones(self.tokens - 1, dtype=bool)
        same_sequence[self.offsets[1:-1] - 1] = False
        rows = np.flatnonzero(same_sequence)
        if not len(rows):
            return float("nan")
        shared = 0
        for start in range(0, len(rows), _ALIKE_CHUNK):
            chunk = rows[start : start + _ALIKE_CHUNK]
            now, before = self.experts[chunk + 1], self.experts[chunk]
            shared += int((now[..., :, None] == before[..., None, :]).any(axis=-1).sum())
        return shared / (len(rows) * self.layers * self.top_k)

    def entropy(self) -> float:
        """Entropy in bits of the distribution of activations over a layer's experts, mean of the layers.

        ``log2(num_experts)`` for equal use of all experts; 0 if only one is used.
        """
        shares = self.counts() / (self.tokens * self.top_k)
        logs = np.log2(shares, out=np.zeros_like(shares), where=shares > 0)
        return float(-(shares * logs).sum(axis=1).mean())

    def passes(self) -> npt.NDArray[np.int64]:
        """Tokens of each pass, int64 ``[n]``: a prompt is one pass, answers have one token per pass.

        Without :attr:`prompt_lengths` every token is one pass.
        """
        if self.prompt_lengths is None:
            return np.ones(self.tokens, dtype=np.int64)
        # The first token of a prompt gets the prompt's size, the others 0.
        sizes = np.ones(self.tokens, dtype=np.int64)
        for start, prompt in zip(self.offsets, self.prompt_lengths, strict=False):
            if prompt > 1:
                sizes[start] = prompt
                sizes[start + 1 : start + prompt] = 0
        return sizes[sizes > 0]

    def counts(self) -> npt.NDArray[np.int64]:
        """Number of activations of each expert: int64 ``[layers, num_experts]``."""
        flat = self.experts + np.arange(self.layers, dtype=np.int64)[None, :, None] * self.num_experts
        size = self.layers * self.num_experts
        return np.bincount(flat.reshape(-1), minlength=size).reshape(self.layers, self.num_experts)


def _require_small(path: Path) -> None:
    """Reject archives whose directory announces more data than a trace can hold."""
    limits = {
        "experts": 8 * MAX_CHOICES,
        "offsets": 8 * _MAX_SEQUENCES,
        "num_experts": 8,
        "weights": 8 * MAX_CHOICES,
        _OTHER_WEIGHTS: 8 * MAX_CHOICES,
        "tokens": 8 * MAX_CHOICES,
        "prompt_lengths": 8 * _MAX_SEQUENCES,
        "gates": 4 * MAX_GATES,
        "embedding_ids": 8 * MAX_EXPERTS,
        "embeddings": 4 * MAX_GATES,
    }
    with zipfile.ZipFile(path) as archive:
        for entry in archive.infolist():
            limit = limits.get(entry.filename.removesuffix(".npy"))
            if limit is not None and entry.file_size > limit + _NPY_HEADER_BYTES:
                raise ValueError(f"{entry.filename} would unpack to {entry.file_size} bytes")


def _from_arrays(arrays: dict[str, npt.NDArray[Any]]) -> Trace:
    if "experts" not in arrays:
        raise ValueError("it has no array 'experts'")
    for name, array in arrays.items():
        if not isinstance(array, np.ndarray):  # numpy returns an entry that is no array as it is
            raise ValueError(f"{name} is no array")
        if name not in ("weights", *ARRAYS) and array.dtype.kind not in "iu":
            raise ValueError(f"{name} has type {array.dtype}, not integers")
    experts = arrays["experts"]
    if experts.ndim != 3 or 0 in experts.shape:
        raise ValueError(f"experts has shape {list(experts.shape)}, not [tokens, layers, k]")
    if experts.size > MAX_CHOICES:
        raise ValueError(f"experts has {experts.size} entries, more than {MAX_CHOICES}")
    # Checked before the conversion to int32, in which large values would wrap around.
    low, high = int(experts.min()), int(experts.max())
    if low < 0 or high >= MAX_EXPERTS:
        raise ValueError(f"experts runs from {low} to {high}; possible are 0 to {MAX_EXPERTS - 1}")
    offsets = arrays.get("offsets", np.array([0, len(experts)]))
    if offsets.size and int(offsets.max()) > len(experts):
        raise ValueError(f"offsets ends at {int(offsets.max())}; there are {len(experts)} tokens")
    num_experts = high + 1
    if "num_experts" in arrays:
        if arrays["num_experts"].size != 1:
            raise ValueError("num_experts is not one number")
        num_experts = int(arrays["num_experts"].reshape(-1)[0])
        if num_experts > MAX_EXPERTS:
            raise ValueError(f"num_experts is {num_experts}; possible are at most {MAX_EXPERTS}")
    return Trace(
        np.ascontiguousarray(experts, dtype=np.int32),
        np.asarray(offsets, dtype=np.int64),
        num_experts,
        _weights(arrays),
        _integers(arrays, "tokens", np.int32),
        _integers(arrays, "prompt_lengths", np.int64),
        gates_of(arrays, (*experts.shape[:2], num_experts)),
    )


def _weights(arrays: dict[str, npt.NDArray[Any]]) -> npt.NDArray[np.float16] | None:
    array = arrays.get("weights")
    if array is None:
        return None
    if array.dtype == np.uint8:
        return (array.astype(np.float32) / 255).astype(np.float16)
    if array.dtype.kind != "f":
        raise ValueError(f"weights has type {array.dtype}, neither floating point nor uint8")
    with np.errstate(over="ignore"):  # values too large for float16 become infinite and are rejected later
        return array.astype(np.float16)


def _integers(arrays: dict[str, npt.NDArray[Any]], name: str, kind: type[np.signedinteger[Any]]) -> Any:
    array = arrays.get(name)
    if array is None:
        return None
    if array.size and int(array.max()) > np.iinfo(kind).max:
        raise ValueError(f"{name} holds {int(array.max())}")
    return array.astype(kind)


def _first_repeated(experts: npt.NDArray[np.int32]) -> tuple[int, int, int] | None:
    """Token, layer and position of an expert that is listed twice, or ``None``."""
    for place in range(1, experts.shape[2]):
        for other in range(place):
            same = experts[:, :, place] == experts[:, :, other]
            if same.any():
                token, layer = np.unravel_index(int(same.argmax()), same.shape)
                return int(token), int(layer), place
    return None
