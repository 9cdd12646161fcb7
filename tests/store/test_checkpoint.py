from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from store_support import write_mixtral, write_safetensors

from moechat.errors import CheckpointError, ModelNotFoundError, UnsupportedModelError
from moechat.store.checkpoint import Checkpoint
from moechat.store.checkpoint_files import INDEX_FILE
from moechat.store.expert_refs import ExpertRef, MatrixRef, VectorRef


def floats(array: np.ndarray) -> np.ndarray:
    """float32 values of a bf16 array (as uint16)."""
    return (array.astype(np.uint32) << 16).view(np.float32)


def checkpoint_of(directory: Path, tensors: dict[str, tuple[str, np.ndarray]]) -> Checkpoint:
    directory.mkdir(exist_ok=True)
    (directory / "config.json").write_text("{}")
    write_safetensors(directory / "model.safetensors", tensors)
    return Checkpoint.open(directory)


def edit_index(directory: Path, change: object) -> None:
    path = directory / INDEX_FILE
    content = json.loads(path.read_text())
    change(content)  # type: ignore[operator]
    path.write_text(json.dumps(content))


def test_a_sharded_checkpoint_of_transformers_is_read_as_safetensors_reads_it(real_mixtral: Path) -> None:
    import torch
    from safetensors import safe_open

    checkpoint = Checkpoint.open(real_mixtral)
    assert len(list(real_mixtral.glob("*.safetensors"))) > 1
    assert checkpoint.config["model_type"] == "mixtral"
    seen = set()
    for shard in real_mixtral.glob("*.safetensors"):
        with safe_open(shard, "pt") as reference:
            for key in reference.keys():  # noqa: SIM118 - no dictionary
                tensor = reference.get_tensor(key)
                assert checkpoint.info(key) == ("BF16", tuple(tensor.shape))
                array = checkpoint.array(key)
                assert array.dtype == np.uint16
                assert np.array_equal(array, tensor.view(torch.uint16).numpy())
                seen.add(key)
    assert seen == set(checkpoint.keys())


def test_a_missing_shard_is_named(mixtral: Path) -> None:
    (mixtral / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"lacks model-00002-of-00003.safetensors \(1 of 3"):
        Checkpoint.open(mixtral)


def test_a_shard_cut_short_is_named(mixtral: Path) -> None:
    shard = mixtral / "model-00003-of-00003.safetensors"
    os.truncate(shard, shard.stat().st_size - 1)
    with pytest.raises(CheckpointError, match=r"model-00003-of-00003\.safetensors is damaged"):
        Checkpoint.open(mixtral)


@pytest.mark.parametrize(
    "name", ["../evil.safetensors", "/etc/evil.safetensors", "a/../../evil.safetensors", "..\\e.safetensors"]
)
def test_an_index_that_points_outside_is_refused(mixtral: Path, name: str) -> None:
    write_safetensors(
        mixtral.parent / "evil.safetensors", {"lm_head.weight": ("F32", np.zeros((32, 64), "f4"))}
    )
    edit_index(mixtral, lambda content: content["weight_map"].update({"lm_head.weight": name}))
    with pytest.raises(CheckpointError, match="outside of its directory"):
        Checkpoint.open(mixtral)


@pytest.mark.parametrize(
    "value", [{}, [], None, {"a": 1}, {"a": ""}, {"a": None}, {"a": ["x"]}, {"a": "x.json"}]
)
def test_a_malformed_weight_map_is_refused(mixtral: Path, value: object) -> None:
    edit_index(mixtral, lambda content: content.update(weight_map=value))
    with pytest.raises(CheckpointError, match=re.escape(INDEX_FILE)):
        Checkpoint.open(mixtral)


def test_an_index_that_promises_a_tensor_of_another_shard_is_refused(mixtral: Path) -> None:
    edit_index(mixtral, lambda c: c["weight_map"].update({"ghost": "model-00001-of-00003.safetensors"}))
    with pytest.raises(CheckpointError, match="no tensor 'ghost'"):
        Checkpoint.open(mixtral)


def test_a_tensor_missing_from_the_index_is_read(mixtral: Path) -> None:
    edit_index(mixtral, lambda content: content["weight_map"].pop("lm_head.weight"))
    assert "lm_head.weight" in Checkpoint.open(mixtral).keys()  # noqa: SIM118 - the public way


def test_a_tensor_in_two_shards_that_the_index_does_not_resolve_is_refused(mixtral: Path) -> None:
    edit_index(mixtral, lambda content: content["weight_map"].pop("lm_head.weight"))
    shutil.copy(mixtral / "model-00001-of-00003.safetensors", mixtral / "extra.safetensors")
    edit_index(mixtral, lambda content: content["weight_map"].update({"lm_head.weight": "extra.safetensors"}))
    with pytest.raises(CheckpointError):
        Checkpoint.open(mixtral)


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    junk=st.binary(max_size=60) | st.text(alphabet='{}[]":,.0123weight_map/\\ ', max_size=60).map(str.encode)
)
def test_an_arbitrary_index_or_config_raises_only_checkpoint_errors(tmp_path: Path, junk: bytes) -> None:
    (tmp_path / "config.json").write_bytes(b"{}")
    (tmp_path / INDEX_FILE).write_bytes(junk)
    with pytest.raises(CheckpointError):
        Checkpoint.open(tmp_path)
    (tmp_path / "config.json").write_bytes(b"x" + junk)
    with pytest.raises(CheckpointError):
        Checkpoint.open(tmp_path)


def test_a_config_may_repeat_keys_and_hold_infinity_as_published_ones_do(mixtral: Path) -> None:
    (mixtral / "config.json").write_text('{"a": 1, "a": 2, "limit": Infinity}')
    assert Checkpoint.open(mixtral).config == {"a": 2, "limit": float("inf")}


@pytest.mark.parametrize("content", ["[]", "nope", "\udcff", "[" * 100_000, None])
def test_a_bad_or_missing_config_is_refused(mixtral: Path, content: str | None) -> None:
    (mixtral / "config.json").unlink()
    if content is not None:
        (mixtral / "config.json").write_bytes(content.encode("utf-8", "surrogateescape"))
    with pytest.raises(CheckpointError, match=r"config\.json"):
        Checkpoint.open(mixtral)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "consolidated.00.pth", "weights.CKPT"])
def test_pickled_weights_are_refused_without_reading_them(tmp_path: Path, name: str) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / name).write_bytes(b"cos\nsystem\n(S'false'\ntR.")
    with pytest.raises(UnsupportedModelError, match=f"pickle \\({name}\\)"):
        Checkpoint.open(tmp_path)


def test_an_index_over_pickles_is_refused(mixtral: Path) -> None:
    (mixtral / "pytorch_model.bin").write_bytes(b"x")
    edit_index(mixtral, lambda content: content.update(weight_map={"a": "pytorch_model.bin"}))
    with pytest.raises(UnsupportedModelError, match="pickle"):
        Checkpoint.open(mixtral)


def test_a_missing_directory_and_one_without_weights_have_different_errors(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(CheckpointError, match="neither"):
        Checkpoint.open(tmp_path)
    with pytest.raises(ModelNotFoundError):
        Checkpoint.open(tmp_path / "absent")


def test_a_hub_cache_of_links_works_and_gives_the_real_files(mixtral: Path, tmp_path: Path) -> None:
    repository = tmp_path / "models--org--name"
    blobs, snapshot = repository / "blobs", repository / "snapshots" / "abc"
    blobs.mkdir(parents=True)
    snapshot.mkdir(parents=True)
    for number, path in enumerate(sorted(mixtral.iterdir())):
        name = hashlib.sha1(bytes([number])).hexdigest()
        shutil.move(path, blobs / name)
        (snapshot / path.name).symlink_to(Path("../../blobs") / name)
    checkpoint = Checkpoint.open(snapshot)
    files = checkpoint.tokenizer_files()
    assert set(files) == {"generation_config.json", "tokenizer.json", "chat_template.jinja"}
    assert all(path.parent == blobs.resolve() for path in files.values())
    assert checkpoint.array("lm_head.weight").shape == (32, 64)


def test_only_listed_side_files_are_taken_and_never_code_or_pickles(mixtral: Path) -> None:
    wanted = {
        "tokenizer_config.json",
        "special_tokens_map.json",
        "merges.txt",
        "tokenizer.model",
        "qwen.tiktoken",
        "LICENSE",
        "LICENSE-MODEL",
        "LICENSE.txt",
        "README.md",
        "additional_chat_templates/rag.jinja",
    }
    unwanted = {
        "modeling_mixtral.py",
        "tokenization_x.py",
        "LICENSE.py",
        "LICENSE.bin",
        "tokenizer.pkl",
        "optimizer.pt",
        "trainer_state.json",
        "pytorch_model.bin",
        "additional_chat_templates/x.py",
        "notes.txt",
    }
    (mixtral / "additional_chat_templates").mkdir()
    for name in wanted | unwanted:
        (mixtral / name).write_text("x")
    (mixtral / "vocab.txt").mkdir()
    (mixtral / "vocab.json").symlink_to("gone")
    before = {"generation_config.json", "tokenizer.json", "chat_template.jinja"}
    assert set(Checkpoint.open(mixtral).tokenizer_files()) == wanted | before


def test_a_matrix_is_the_slice_that_its_reference_describes(tmp_path: Path) -> None:
    generator = np.random.default_rng(1)
    plain = generator.standard_normal((6, 4)).astype("f4")
    fused = generator.standard_normal((3, 8, 5)).astype("f2")
    turned = generator.integers(0, 1 << 16, (3, 5, 8), dtype=np.uint16)
    checkpoint = checkpoint_of(
        tmp_path / "c", {"plain": ("F32", plain), "fused": ("F16", fused), "turned": ("BF16", turned)}
    )
    cases = {
        MatrixRef("plain", None, 0, 1, 6): plain,
        MatrixRef("plain", None, 2, 1, 3): plain[2:5],
        MatrixRef("plain", None, 0, 1, 4, transposed=True): plain.T,
        MatrixRef("fused", 2, 0, 1, 4): fused[2, :4],
        MatrixRef("fused", 1, 4, 1, 4): fused[1, 4:],
        MatrixRef("turned", 0, 0, 2, 4, transposed=True): turned[0].T[0::2],
        MatrixRef("turned", 2, 1, 2, 4, transposed=True): turned[2].T[1::2],
    }
    for ref, expected in cases.items():
        matrix = checkpoint.matrix(ref)
        assert matrix.dtype == expected.dtype
        assert np.array_equal(matrix, expected)
        assert checkpoint.matrix_shape(ref) == expected.shape
        assert matrix.base is not None  # a view of the file


@pytest.mark.parametrize(
    "ref",
    [
        MatrixRef("absent", None, 0, 1, 1),
        MatrixRef("fused", None, 0, 1, 1),
        MatrixRef("plain", 0, 0, 1, 1),
        MatrixRef("fused", 3, 0, 1, 1),
        MatrixRef("plain", None, 0, 1, 7),
        MatrixRef("plain", None, 6, 1, 1),
        MatrixRef("plain", None, 1, 2, 4),
        MatrixRef("plain", None, 0, 1, 5, transposed=True),
        MatrixRef("odd", 0, 0, 1, 1),
        MatrixRef("half", 0, 0, 1, 1),
    ],
)
def test_a_reference_outside_of_its_tensor_is_refused_by_name(tmp_path: Path, ref: MatrixRef) -> None:
    checkpoint = checkpoint_of(
        tmp_path / "c",
        {
            "plain": ("F32", np.zeros((6, 4), "f4")),
            "fused": ("F32", np.zeros((3, 8, 5), "f4")),
            "odd_blocks": ("U8", np.zeros((2, 3, 4, 16), "u1")),
            "odd_scales": ("U8", np.zeros((2, 3, 5), "u1")),
            "half_blocks": ("U8", np.zeros((2, 3, 4, 16), "u1")),
        },
    )
    for read in (checkpoint.matrix_shape, checkpoint.matrix):
        with pytest.raises(CheckpointError, match=f"{ref.key}"):
            read(ref)


@pytest.mark.parametrize("dtype", ["F8_E4M3", "I8", "F64", "I32"])
def test_experts_of_other_types_are_refused_with_type_and_name(tmp_path: Path, dtype: str) -> None:
    width = {"F8_E4M3": "u1", "I8": "i1", "F64": "f8", "I32": "i4"}[dtype]
    checkpoint = checkpoint_of(tmp_path / "c", {"w1": (dtype, np.zeros((4, 4), width))})
    with pytest.raises(UnsupportedModelError, match=f"'w1' is {dtype}"):
        checkpoint.matrix(MatrixRef("w1", None, 0, 1, 4))
    with pytest.raises(UnsupportedModelError, match=f"'w1' is {dtype}"):
        checkpoint.vector(VectorRef("w1", 0, 0, 1, 4))


def test_a_bias_is_read_as_float32_from_every_float_type(tmp_path: Path) -> None:
    values = np.array([[1.5, -2.0, 0.25, 8.0], [3.0, 4.0, -5.0, 6.0]], "f4")
    bf16 = (values.view(np.uint32) >> 16).astype(np.uint16)
    checkpoint = checkpoint_of(
        tmp_path / "c", {"a": ("F32", values), "b": ("F16", values.astype("f2")), "c": ("BF16", bf16)}
    )
    for key in "abc":
        vector = checkpoint.vector(VectorRef(key, 1, 1, 2, 2))
        assert vector.dtype == np.float32
        assert vector.tolist() == [4.0, 6.0]
    with pytest.raises(CheckpointError, match="4 elements, the configuration needs at least 5"):
        checkpoint.vector(VectorRef("a", 1, 2, 2, 2))


def test_mxfp4_decodes_exactly_as_transformers_decodes_it(tmp_path: Path) -> None:
    import torch
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    generator = np.random.default_rng(0)
    blocks = generator.integers(0, 256, (2, 8, 3, 16), dtype=np.uint8)
    scales = generator.integers(100, 150, (2, 8, 3), dtype=np.uint8)
    checkpoint = checkpoint_of(tmp_path / "c", {"w_blocks": ("U8", blocks), "w_scales": ("U8", scales)})
    reference = convert_moe_packed_tensors(
        torch.from_numpy(blocks), torch.from_numpy(scales), dtype=torch.float32
    )
    for expert in range(2):
        expected = reference[expert].T.numpy()  # transformers stores [columns, rows]
        whole = checkpoint.matrix(MatrixRef("w", expert, 0, 1, 8))
        assert np.array_equal(floats(whole), expected)
        odd = checkpoint.matrix(MatrixRef("w", expert, 1, 2, 4))
        assert np.array_equal(floats(odd), expected[1::2])
        turned = checkpoint.matrix(MatrixRef("w", expert, 5, 1, 20, transposed=True))
        assert np.array_equal(floats(turned), expected.T[5:25])


def test_an_mxfp4_scale_that_is_no_number_is_refused(tmp_path: Path) -> None:
    blocks, scales = np.full((1, 2, 1, 16), 0x22, np.uint8), np.array([[[254], [255]]], np.uint8)
    checkpoint = checkpoint_of(tmp_path / "c", {"w_blocks": ("U8", blocks), "w_scales": ("U8", scales)})
    assert (floats(checkpoint.matrix(MatrixRef("w", 0, 0, 1, 1))) == 2.0**127).all()
    with pytest.raises(CheckpointError, match=r"'w' \(MXFP4\) has values that are not finite"):
        checkpoint.matrix(MatrixRef("w", 0, 1, 1, 1))


def test_unaligned_weights_are_copied_to_aligned_memory(tmp_path: Path) -> None:
    values = np.arange(24, dtype="f4").reshape(2, 3, 4)
    header = b'{"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},'
    header += b'"w":{"dtype":"F32","shape":[2,3,4],"data_offsets":[1,97]}}'
    header += b" " * (-len(header) % 8)
    (tmp_path / "config.json").write_text("{}")
    content = len(header).to_bytes(8, "little") + header + b"x" + values.tobytes()
    (tmp_path / "model.safetensors").write_bytes(content)
    checkpoint = Checkpoint.open(tmp_path)
    assert not checkpoint.array("w").flags.aligned
    matrix = checkpoint.matrix(MatrixRef("w", 1, 0, 1, 3))
    assert matrix.flags.aligned
    assert np.array_equal(matrix, values[1])


def test_releasing_an_expert_drops_its_pages_from_the_process(tmp_path: Path) -> None:
    weights = np.ones((4, 1024, 1024), "f4")
    checkpoint = checkpoint_of(tmp_path / "c", {"w": ("F32", weights)})

    def resident() -> int:
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("RssFile"):
                return int(line.split()[1]) * 1024
        raise AssertionError

    before = resident()
    experts = [ExpertRef(*[MatrixRef("w", expert, 0, 1, 1024)] * 3) for expert in range(4)]
    for expert in experts:
        assert checkpoint.matrix(expert.gate).sum() == 1 << 20
    assert resident() - before > 12 << 20
    for expert in experts:
        checkpoint.release(expert)
    assert resident() - before < 2 << 20
    assert checkpoint.matrix(experts[3].gate).sum() == 1 << 20


def test_the_fingerprint_depends_on_content_and_not_on_the_path(tmp_path: Path) -> None:
    shape = {"layers": 1, "experts": 2, "hidden": 64, "intermediate": 64}
    source = write_mixtral(tmp_path / "a", **shape)  # type: ignore[arg-type]
    shutil.copytree(source, tmp_path / "b")  # keeps the times
    first = Checkpoint.open(source).fingerprint()
    assert Checkpoint.open(tmp_path / "b").fingerprint() == first
    for name, change in {
        "config.json": lambda path: path.write_text('{"model_type": "mixtral2"}'),
        "tokenizer.json": lambda path: path.write_text("{}"),
        "model.safetensors": lambda path: os.utime(path, ns=(1, 1)),
    }.items():
        copy = tmp_path / f"c-{name}"
        shutil.copytree(source, copy)
        change(copy / name)
        assert Checkpoint.open(copy).fingerprint() != first


def test_documents_do_not_change_the_fingerprint(mixtral: Path) -> None:
    first = Checkpoint.open(mixtral)
    for name in ("README.md", "LICENSE", "LICENSE.txt", "NOTICE", "USE_POLICY.md"):
        (mixtral / name).write_text("new")
        assert name in Checkpoint.open(mixtral).tokenizer_files()
    assert Checkpoint.open(mixtral).fingerprint() == first.fingerprint()
    first.require_unchanged()
    (mixtral / "special_tokens_map.json").write_text("{}")
    assert Checkpoint.open(mixtral).fingerprint() != first.fingerprint()


@pytest.mark.parametrize("odd", ["\x1b[31m", "\x07", "\n", "\x9b", "\u202e", "\udcff"])
def test_side_files_whose_names_cannot_be_printed_are_left_out(mixtral: Path, odd: str) -> None:
    for name in (f"LICENSE.{odd}", f"{odd}.tiktoken"):
        (mixtral / name).write_text("x")
    (mixtral / "additional_chat_templates").mkdir()
    (mixtral / "additional_chat_templates" / f"{odd}.jinja").write_text("x")
    (mixtral / "日本.tiktoken").write_text("x")
    found = Checkpoint.open(mixtral).tokenizer_files()
    assert "日本.tiktoken" in found
    assert not [name for name in found if odd in name]


def test_a_source_that_changes_after_opening_is_detected(mixtral: Path) -> None:
    checkpoint = Checkpoint.open(mixtral)
    checkpoint.require_unchanged()
    shard = mixtral / "model-00001-of-00003.safetensors"
    shutil.copy2(shard, mixtral / "new")
    os.replace(mixtral / "new", shard)  # the same size and time, but not the file that is mapped
    with pytest.raises(CheckpointError, match="changed"):
        checkpoint.require_unchanged()


def test_a_configuration_that_was_read_wrongly_is_detected(mixtral: Path) -> None:
    config = mixtral / "config.json"
    content = config.read_bytes()
    times = config.stat().st_atime_ns, config.stat().st_mtime_ns

    def write(data: bytes) -> None:
        config.write_bytes(data)
        os.utime(config, ns=times)

    write(content.replace(b"mixtral", b"mixtram"))
    checkpoint = Checkpoint.open(mixtral)
    assert checkpoint.config["model_type"] == "mixtram"
    write(content)  # what the disk really has
    with pytest.raises(CheckpointError, match="changed"):
        checkpoint.require_unchanged()
