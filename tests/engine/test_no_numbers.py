"""Models whose numbers are no numbers: an error, and never a token, on every way to one."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from cli_support import Cli
from serve_support import serving
from store_support import overwrite, sign_again

import moechat
from moechat import _native
from moechat.errors import NotFiniteError
from moechat.models.sampling import Sampler, SamplingSettings, require_finite

DEMO = Path(moechat.__file__).parent / "hub" / "demo"
DENSE = "dense-00001.safetensors"
NAN, INFINITY, LARGEST = b"\xff\x7f", b"\x80\x7f", b"\x7f\x7f"
PROMPT = [{"role": "user", "content": "Hello"}]


def altered(directory: Path, tensor: str, pattern: bytes) -> Path:
    """The demo with a tensor of this content, signed as whoever gives it away would."""
    shutil.copytree(DEMO, directory)
    overwrite(directory / DENSE, tensor, pattern)
    sign_again(directory)
    return directory


@pytest.mark.parametrize("pattern", [NAN, INFINITY])
@pytest.mark.parametrize(
    "tensor",
    [
        "model.norm.weight",
        "model.layers.3.input_layernorm.weight",
        "model.layers.7.mlp.gate.weight",
        "model.layers.0.self_attn.q_norm.weight",
        "model.layers.0.self_attn.v_proj.weight",
    ],
)
def test_weights_of_a_store_that_are_no_numbers_are_named(
    tmp_path: Path, tensor: str, pattern: bytes
) -> None:
    name = tensor.removesuffix(".weight")
    with pytest.raises(moechat.UnsupportedModelError, match=re.escape(name)) as caught:
        moechat.load(altered(tmp_path / "m", tensor, pattern))
    assert "not finite" in str(caught.value)


@pytest.mark.parametrize("tensor", ["model.norm.weight", "model.layers.3.input_layernorm.weight"])
def test_a_model_that_computes_no_numbers_gives_no_token(tmp_path: Path, tensor: str) -> None:
    with moechat.load(altered(tmp_path / "m", tensor, LARGEST)) as engine:
        for settings in ({"temperature": 0.0}, {"temperature": 1.0}, {"temperature": 1.0, "top_p": 0.9}):
            with pytest.raises(NotFiniteError, match="logits are not finite") as caught:
                next(iter(engine.generate(PROMPT, **settings)))
            assert caught.value.exit_code == 3
        with pytest.raises(NotFiniteError):
            engine.logits([1, 2, 3])


def test_run_and_a_server_say_so(tmp_path: Path) -> None:
    model = altered(tmp_path / "m", "model.norm.weight", LARGEST)
    result = Cli(tmp_path, tmp_path / "home").call("run", str(model), "Hello", "--quiet")
    assert result.status == 3
    assert result.out == b""
    assert result.err.startswith("error: the model's logits are not finite: no token can be drawn\nhint: ")
    with serving(tmp_path, str(model)) as server, server.client() as client:
        for stream in (False, True):
            answer = client.post(
                "/v1/chat/completions", json={"model": model.name, "messages": PROMPT, "stream": stream}
            )
            body = answer.text
            if stream:
                assert '"content"' not in body.replace('"content":""', "")
            else:
                assert answer.status_code == 500
            found = json.loads(body.removeprefix("data: ").split("\n")[0]) if not stream else None
            assert "logits are not finite" in body
            assert found is None or found["error"]["type"] == "server_error"
        assert client.get("/v1/models").status_code == 200


@pytest.mark.parametrize("eps", [float("nan"), float("inf"), -1.0, 1e9])
def test_an_eps_of_norms_that_is_none_is_refused(tmp_path: Path, eps: float) -> None:
    directory = Path(shutil.copytree(DEMO, tmp_path / "m"))
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**config, "rms_norm_eps": eps}))
    sign_again(directory)
    with pytest.raises(moechat.UnsupportedModelError, match="rms_norm_eps is "):
        moechat.load(directory)


def drawn(logits: list[float], **settings: float) -> int:
    sampler = Sampler(SamplingSettings(**settings), seed=1)  # type: ignore[arg-type]
    return sampler.draw(torch.zeros((1, 1), dtype=torch.int64), torch.tensor(logits))


@pytest.mark.parametrize("settings", [{}, {"temperature": 1.0}, {"temperature": 1.0, "top_k": 2}])
@pytest.mark.parametrize(
    "logits",
    [
        [0.0, np.nan, 1.0],
        [np.nan] * 3,
        [0.0, np.inf, 1.0],
        [-np.inf] * 3,
        [0.0] * 40,
        [-1e9] * 3,
    ],
)
def test_no_token_is_drawn_from_such_logits(logits: list[float], settings: dict[str, float]) -> None:
    with pytest.raises(NotFiniteError):
        drawn(logits, **settings)


def test_tokens_that_a_model_excludes_are_no_error() -> None:
    assert drawn([-np.inf, 1.0, -np.inf]) == 1
    assert drawn([-np.inf, 1.0, -np.inf], temperature=1.0) == 1
    require_finite(torch.tensor([-torch.inf, 0.0]))


@pytest.mark.parametrize("count", [1, 15, 16, 17, 33])
def test_one_value_that_is_none_is_found_anywhere(count: int) -> None:
    check: Callable[[np.ndarray], int] = _native.largest_logit
    for place in range(count):
        for value in (np.nan, np.inf):
            logits = np.zeros(count, np.float32)
            logits[place] = value
            assert check(logits) == -1
    assert check(np.full(count, -np.inf, np.float32)) == -1
