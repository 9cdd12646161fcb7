"""The predictor of experts by the prompt: scores, the file, damaged files, and the cost of a prompt."""

from __future__ import annotations

import time
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from moechat.errors import MoechatWarning
from moechat.models.threads import torch_threads
from moechat.predict.preload import (
    MOST_TOKENS,
    PRELOAD_FILE,
    PreloadPredictor,
    embedding_width,
    mean_embedding,
)

LAYERS, EXPERTS, SIZE, HIDDEN = 3, 8, 16, 12
KIND = f"version 1 for {LAYERS} layers of {EXPERTS} experts"
TABLE = torch.randn(40, SIZE, generator=torch.Generator().manual_seed(1))


def embed(ids: torch.Tensor) -> torch.Tensor:
    return TABLE[ids]


def predictor(seed: int = 0) -> PreloadPredictor:
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    rows = LAYERS * EXPERTS
    return PreloadPredictor(
        (draw(HIDDEN, SIZE), draw(HIDDEN)), (draw(rows, HIDDEN), draw(rows)), LAYERS, embed
    )


def load(path: Path, **changes: int) -> PreloadPredictor | None:
    return PreloadPredictor.load(path, **{"layers": LAYERS, "experts": EXPERTS, **changes}, embed=embed)


def test_scores_are_those_of_two_layers_over_the_mean_embedding(tmp_path: Path) -> None:
    found = predictor()
    found.save(tmp_path / PRELOAD_FILE)
    weights = load_file(tmp_path / PRELOAD_FILE)
    mean = TABLE[[3, 7, 7, 9]].mean(0)
    hidden = (weights["hidden.weight"] @ mean + weights["hidden.bias"]).relu()
    expected = (weights["scores.weight"] @ hidden + weights["scores.bias"]).reshape(LAYERS, EXPERTS)
    scores = found.scores([3, 7, 7, 9])
    assert (scores.dtype, scores.shape) == (np.float32, (LAYERS, EXPERTS))
    np.testing.assert_allclose(scores, expected.numpy(), rtol=1e-5, atol=1e-5)


def test_only_the_end_of_a_long_prompt_counts() -> None:
    found = predictor()
    end = [at % 40 for at in range(MOST_TOKENS)]
    assert np.array_equal(found.scores([1] * 5000 + end), found.scores(end))
    assert not np.array_equal(found.scores(end[1:]), found.scores(end))


def test_an_empty_prompt_has_scores() -> None:
    assert np.isfinite(predictor().scores([])).all()


def test_a_saved_predictor_is_read_with_the_same_scores(tmp_path: Path) -> None:
    found = predictor()
    found.save(tmp_path / PRELOAD_FILE)
    for path in (tmp_path, tmp_path / PRELOAD_FILE):
        read = load(path)
        assert read is not None
        assert np.array_equal(read.scores([1, 2]), found.scores([1, 2]))
        assert (read.layers, read.experts, read.embedding_size) == (LAYERS, EXPERTS, SIZE)


def test_without_a_file_there_is_no_predictor_and_no_warning(tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert load(tmp_path) is None
        assert load(tmp_path / "none.safetensors") is None


@pytest.mark.parametrize("changes", [{"layers": 4}, {"experts": 4}, {"layers": 6, "experts": 4}])
def test_a_file_of_another_model_is_not_used(tmp_path: Path, changes: dict[str, int]) -> None:
    predictor().save(tmp_path / PRELOAD_FILE)
    with pytest.warns(
        MoechatWarning, match="no experts are loaded by the prompt: it is version 1 for 3 layers of 8"
    ):
        assert load(tmp_path, **changes) is None


def test_a_file_for_other_embeddings_is_not_used(tmp_path: Path) -> None:
    predictor().save(tmp_path / PRELOAD_FILE)
    with pytest.warns(MoechatWarning, match="embeddings of 16; the model has 5"):
        found = PreloadPredictor.load(
            tmp_path, layers=LAYERS, experts=EXPERTS, embed=lambda ids: torch.zeros(len(ids), 5)
        )
    assert found is None


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("hidden.bias", torch.full((HIDDEN,), float("nan")), "not finite"),
        ("hidden.bias", torch.zeros(HIDDEN + 1), "do not fit together"),
        ("hidden.weight", torch.zeros(HIDDEN * SIZE), "do not fit together"),
        ("hidden.weight", torch.zeros(0, SIZE), r"is F32 \[0, 16\]"),
        ("scores.bias", torch.zeros(LAYERS * 4), "do not fit together"),
        ("scores.weight", torch.zeros(LAYERS * EXPERTS, HIDDEN, dtype=torch.float16), "is F16"),
        ("other", torch.zeros(1), "holds other tensors"),
    ],
)
def test_a_file_with_wrong_tensors_is_not_used(
    tmp_path: Path, name: str, value: torch.Tensor, said: str
) -> None:
    path = tmp_path / PRELOAD_FILE
    predictor().save(path)
    save_file(
        {**load_file(path), name: value}, path, metadata={"moechat_preload": "1", "layers": str(LAYERS)}
    )
    with pytest.warns(MoechatWarning):
        assert load(path) is None


def test_a_file_of_another_version_is_not_used(tmp_path: Path) -> None:
    path = tmp_path / PRELOAD_FILE
    predictor().save(path)
    save_file(load_file(path), path, metadata={"moechat_preload": KIND.replace("1", "2", 1)})
    with pytest.warns(MoechatWarning, match="it is version 2 .* needs version 1"):
        assert load(path) is None


@settings(deadline=None, max_examples=80, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_a_damaged_file_is_as_good_as_none(tmp_path: Path, data: st.DataObject) -> None:
    path = tmp_path / PRELOAD_FILE
    predictor().save(path)
    content = bytearray(path.read_bytes())
    header = 8 + int.from_bytes(content[:8], "little")
    if data.draw(st.booleans()):
        del content[data.draw(st.integers(0, len(content) - 1)) :]
    else:
        at = data.draw(st.integers(0, header - 1))
        content[at] ^= data.draw(st.integers(1, 255))
    path.write_bytes(content)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        read = load(path)
    if read is None:
        assert [warning.category for warning in caught] == [MoechatWarning]
    else:  # names of the metadata's other entries do not matter
        assert np.array_equal(read.scores([1, 2]), predictor().scores([1, 2]))


def test_weights_that_do_not_fit_together_are_refused() -> None:
    zeros = torch.zeros
    with pytest.raises(ValueError, match="do not fit together"):
        PreloadPredictor((zeros(4, 2), zeros(3)), (zeros(6, 4), zeros(6)), 2, embed)
    with pytest.raises(ValueError, match="cannot be divided among 4 layers"):
        PreloadPredictor((zeros(4, 2), zeros(4)), (zeros(6, 4), zeros(6)), 4, embed)


def test_a_prompt_costs_less_than_a_millisecond() -> None:
    """With embeddings of 1,024 and 32 layers of 16 experts; in processor time, as the machine may be busy."""
    table = torch.zeros(1000, 1024)
    found = PreloadPredictor(
        (torch.zeros(1024, 1024), torch.zeros(1024)),
        (torch.zeros(512, 1024), torch.zeros(512)),
        32,
        table,
    )
    prompt = list(range(300))
    times = []
    with torch_threads(1):  # several would wait for each other on a busy machine
        for _ in range(100):
            start = time.thread_time()
            found.scores(prompt)
            times.append(time.thread_time() - start)
    assert min(times) < 1e-3


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_table_of_embeddings_is_as_good_as_a_function(dtype: torch.dtype) -> None:
    table = TABLE.to(dtype)
    prompt = [3, 3, 39, 0]
    expected = mean_embedding(lambda ids: table[ids], prompt, SIZE)
    torch.testing.assert_close(mean_embedding(table, prompt, SIZE), expected)
    assert embedding_width(table) == embedding_width(lambda ids: table[ids]) == SIZE
