"""Outlines from the package and the user's cache: those of a counted model, and no harm from other files."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from places import ROOT
from tiny import SHAPES, tiny_config

from moechat import kept_results
from moechat.errors import UsageError
from moechat.hub.known_shapes import shape_names
from moechat.models.outlining import known_config, outline_model
from moechat.models.skeleton import build_skeleton
from moechat.outline import find_outline as finding
from moechat.outline import kept_outlines, packaged_outlines
from moechat.outline.config_source import ConfigSource, config_in, known_shape
from moechat.outline.find_outline import count_outline, find_outline
from moechat.outline.kept_outlines import OutlineRequest, outline_key, read_outline, write_outline
from moechat.outline.packaged_outlines import (
    counted_with,
    packaged_file,
    packaged_outline,
    packaged_requests,
)
from moechat.outline.plain_values import from_plain, to_plain
from moechat.sizes.model_outline import ModelOutline
from moechat.store.tensor_headers import HeaderTable

REQUEST = OutlineRequest("0" * 64, "bfloat16")


@pytest.fixture(scope="module")
def outline() -> ModelOutline:
    return outline_model(tiny_config("mixtral", 0), torch.bfloat16, dense_bits="auto")


@pytest.fixture
def config(tmp_path: Path) -> ConfigSource:
    tiny_config("mixtral", 0).save_pretrained(tmp_path / "model")
    return config_in(tmp_path / "model")


_COUNTING = """
import json
from moechat.hub.known_shapes import shape_names
from moechat.outline.config_source import known_shape
from moechat.outline.find_outline import count_outline
from moechat.outline.packaged_outlines import packaged_requests
from moechat.outline.plain_values import to_plain
counted = {}
for number, name in enumerate(shape_names()):
    source = known_shape(name)
    requests = packaged_requests(source.digest)
    counted[name] = to_plain(count_outline(source, requests[number % len(requests)], None))
print(json.dumps(counted))
"""


@pytest.fixture(scope="module")
def counted() -> Any:
    """Each known shape, counted for one of the requests, in a process of its own as a plan does."""
    done = subprocess.run([sys.executable, "-c", _COUNTING], capture_output=True, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("name", shape_names())
def test_the_package_has_the_outlines_of_known_shapes_as_they_are_counted(name: str, counted: Any) -> None:
    """If this fails after a change of what is counted, run scripts/outline_shapes."""
    source = known_shape(name)
    requests = packaged_requests(source.digest)
    content = packaged_file(name)
    if content["counted_with"] != counted_with():
        pytest.skip("the outlines of the package are of other versions of torch or transformers")
    assert [entry["request"]["config"] for entry in content["outlines"]] == [source.digest] * len(requests)
    request = requests[shape_names().index(name) % len(requests)]
    assert to_plain(packaged_outline(name, request)) == counted[name]
    assert packaged_outline(name, replace(requests[0], kv_bits=8)) is None
    found = packaged_outline(name, requests[0])
    assert found is not None
    assert found.cache.exact
    text = known_config(name).get_text_config()
    assert found.top_k == getattr(text, "num_experts_per_tok", None) or text.top_k_experts


def test_the_package_has_the_outlines_of_the_pinned_versions() -> None:
    pinned = dict(
        line.split("==")
        for line in (ROOT / "scripts" / "constraints.txt").read_text().splitlines()
        if line.startswith(("torch==", "transformers=="))
    )
    wanted = {name: ".".join(version.split(".")[:2]) for name, version in pinned.items()}
    assert {name: packaged_file(name)["counted_with"] for name in shape_names()} == dict.fromkeys(
        shape_names(), wanted
    )


def test_other_versions_of_the_libraries_count_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    (request, *_) = packaged_requests(known_shape("mixtral-8x7b").digest)
    made_with = packaged_file("mixtral-8x7b")["counted_with"]
    monkeypatch.setattr(packaged_outlines, "counted_with", lambda: made_with)
    assert packaged_outline("mixtral-8x7b", request) is not None
    monkeypatch.setattr(packaged_outlines, "counted_with", lambda: made_with | {"transformers": "5.17"})
    assert packaged_outline("mixtral-8x7b", request) is None


def test_a_model_is_counted_once(
    config: ConfigSource, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = tmp_path / "kept"
    first = find_outline(config, "bfloat16", directory=kept, keep=False)
    assert not kept.exists()
    assert find_outline(config, "bfloat16", directory=kept) == first
    assert [path.suffix for path in kept.iterdir()] == [".json"]
    monkeypatch.setattr(finding, "count_outline", lambda *_: pytest.fail("the model was counted"))
    assert find_outline(config, "bfloat16", directory=kept) == first


def test_the_headers_of_stored_weights_belong_to_a_request(config: ConfigSource, tmp_path: Path) -> None:
    state = build_skeleton(tiny_config("mixtral", 0), torch.float32).state
    for dtype in ("BF16", "F32"):
        headers = HeaderTable({name: (dtype, tuple(tensor.shape)) for name, tensor in state.items()})
        find_outline(config, "float32", dense_bits=16, headers=headers, directory=tmp_path / "kept")
    of_two, of_four = (
        find_outline(
            config,
            "float32",
            dense_bits=16,
            headers=HeaderTable({name: (dtype, tuple(tensor.shape)) for name, tensor in state.items()}),
            directory=tmp_path / "kept",
        )
        for dtype in ("BF16", "F32")
    )
    assert of_two.dense_bytes < of_four.dense_bytes
    assert len(list((tmp_path / "kept").iterdir())) == 2


CASES = [(family, number) for family, shapes in SHAPES.items() for number in range(len(shapes))]


@pytest.mark.parametrize(("family", "number"), CASES)
def test_an_outline_survives_a_file(family: str, number: int, tmp_path: Path) -> None:
    made = outline_model(tiny_config(family, number), torch.float32, dense_bits="auto")
    write_outline(tmp_path, REQUEST, made)
    assert read_outline(tmp_path, REQUEST) == made


@pytest.mark.parametrize(
    "change",
    [
        lambda content: content["cache"].update(fixed_bytes=-1),
        lambda content: content["cache"].update(appendable=1.5),
        lambda content: content["cache"].update(growing=[[1]]),
        lambda content: content["cache"].update(in_one_pass=None),
        lambda content: content["cache"].update(more=1),
        lambda content: content["cache"].pop("bits"),
        lambda content: content.pop("cache"),
        lambda content: content.update(chunk=0),
        lambda content: content.update(top_k=True),
        lambda content: content.update(expert_layers=5),
        lambda content: content.update(dtype="float8"),
        lambda content: content["experts"].update(bits=7),
        lambda content: content["experts"]["gate"].update(activation="tanh"),
        lambda content: content["sizes"].update(kv_heads=0),
        lambda content: content["sizes"].update(compressed=0),
        lambda content: content.update(expert_layers=[]),
        lambda content: content.update(live=10**400),
        lambda content: content["form"].update(itemsize=10**400),
    ],
)
def test_a_damaged_file_counts_as_missing_and_is_replaced(
    config: ConfigSource, tmp_path: Path, change: Any
) -> None:
    kept = tmp_path / "kept"
    made = find_outline(config, "bfloat16", directory=kept)
    (path,) = kept.iterdir()
    whole = path.read_bytes()
    request = OutlineRequest(config.digest, "bfloat16")
    assert path.name == f"{outline_key(request)}.json"
    content = json.loads(whole)
    change(content)
    for damaged in (json.dumps(content).encode(), whole[:-9], b"", b"\xff", b"[" * 100_000):
        path.write_bytes(damaged)
        assert read_outline(kept, request) is None
    assert find_outline(config, "bfloat16", directory=kept) == made
    assert path.read_bytes() == whole


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)


@given(st.data())
def test_any_change_of_a_value_is_refused_or_gives_an_outline(outline: ModelOutline, data: Any) -> None:
    content = to_plain(outline)
    place = content
    while True:
        key = data.draw(st.sampled_from(sorted(place) if isinstance(place, dict) else range(len(place))))
        if not isinstance(place[key], dict | list) or not place[key] or data.draw(st.booleans()):
            break
        place = place[key]
    place[key] = data.draw(_JSON)
    try:
        found = from_plain(ModelOutline, content)
    except (ValueError, OverflowError, UsageError):  # the reader takes these for a damaged file
        return
    assert from_plain(ModelOutline, to_plain(found)) == found


def test_other_inputs_and_other_code_have_other_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    changed: dict[str, Any] = {
        "config": "1" * 64,
        "dtype": "float32",
        "dense_bits": 8,
        "activation_bits": 16,
        "kv_bits": 8,
        "on_gpu": True,
        "headers": "2" * 64,
    }
    keys = {outline_key(replace(REQUEST, **{name: value})) for name, value in changed.items()}
    keys.add(outline_key(REQUEST))
    monkeypatch.setattr(kept_outlines.metadata, "version", lambda name: "9.9")
    keys.add(outline_key(REQUEST))
    monkeypatch.undo()
    monkeypatch.setattr(kept_results, "code_stamp", lambda code: [("changed.py", 1, 1)])
    keys.add(outline_key(REQUEST))
    assert len(keys) == len(changed) + 3


def test_a_directory_that_cannot_be_written_changes_nothing(config: ConfigSource, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert find_outline(config, "bfloat16", directory=tmp_path / "file").top_k == 2


def test_only_the_newest_outlines_are_kept(
    outline: ModelOutline, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kept_outlines, "_MOST_FILES", 2)
    for number in range(3):
        (tmp_path / f"{number}.json").write_text("{}")
    write_outline(tmp_path, REQUEST, outline)
    assert len(list(tmp_path.iterdir())) == 2
    assert (tmp_path / f"{outline_key(REQUEST)}.json").exists()


def torch_in(call: str) -> str:
    """What a plan in a process of its own has imported of torch and transformers."""
    script = (
        "import sys, moechat\n"
        f"moechat.{call}\n"
        "print(*sorted({'torch', 'transformers'} & set(sys.modules)))\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    return done.stdout.strip()


@pytest.mark.parametrize(
    "call",
    ["plan('mixtral', profile='rtx4090-24g', vram='12G')", "plan('gpt-oss', profile='ssd-only-16g')"],
)
def test_a_plan_of_a_known_shape_needs_no_torch(
    call: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if packaged_file("mixtral-8x7b")["counted_with"] != counted_with():
        pytest.skip("the outlines of the package are of other versions of torch or transformers")
    monkeypatch.setenv("MOECHAT_HOME", str(tmp_path))
    assert torch_in(call) == ""


def test_a_plan_of_what_was_counted_before_needs_no_torch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MOECHAT_HOME", str(tmp_path))
    assert torch_in("plan('demo')") == "torch transformers"
    assert torch_in("plan('demo')") == ""


def test_a_configuration_that_changes_while_it_is_counted_is_not_kept(
    config: ConfigSource, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def changed(*_: Any) -> ModelOutline:
        found = count_outline(*_)
        file = tmp_path / "model" / "config.json"
        file.write_text(file.read_text() + "\n")
        return found

    monkeypatch.setattr(finding, "count_outline", changed)
    find_outline(config, "bfloat16", directory=tmp_path / "kept")
    assert not (tmp_path / "kept").exists()


def test_libraries_that_do_not_tell_their_version_count_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> str:
        raise kept_outlines.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(kept_outlines.metadata, "version", missing)
    (request, *_) = packaged_requests(known_shape("mixtral-8x7b").digest)
    assert packaged_outline("mixtral-8x7b", request) is None
    assert outline_key(request)
