"""``moechat count``: tokens of a text as the engine counts them, from the tokenizer alone."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from cli_support import Cli
from gguf.constants import GGMLQuantizationType as Kind
from gguf_support import save_model, tensors_of, write_gguf
from transformers import AutoTokenizer

import moechat

DEMO = Path(moechat.__file__).parent / "hub" / "demo"
TEXT = "Once upon a time, in 漢字."


def test_the_number_is_that_of_the_engine(cli: Cli) -> None:
    with moechat.load("demo") as engine:
        plain = len(engine.encode(TEXT))
        chat = len(engine.encode([{"role": "user", "content": TEXT}]))
        context = engine.context_length
    assert cli.call("count", "demo", TEXT).out == f"{plain}\n".encode()
    assert cli.call("count", "demo", "--chat", stdin=f"{TEXT}\n".encode()).out == f"{chat}\n".encode()
    done = cli.call("count", "demo", TEXT, "--json")
    assert json.loads(done.out) == {
        "model": "demo", "tokens": plain, "characters": len(TEXT), "context": context
    }  # fmt: skip
    assert chat > plain


def test_a_checkpoint_is_not_converted(cli: Cli, model: str, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(model, copy)
    (copy / "model.safetensors").unlink()
    stores = sorted((cli.home / "data").glob("models/*"))
    done = cli.call("count", str(copy), "hello")
    assert (done.status, done.out) == (0, b"5\n"), done.err
    assert sorted((cli.home / "data").glob("models/*")) == stores


def test_a_gguf_file_is_read_as_it_is(cli: Cli, tmp_path: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(DEMO)
    config = save_model("olmoe", tmp_path / "source", vocab_size=len(tokenizer), num_hidden_layers=1)
    write_gguf(
        "olmoe", config, tensors_of(tmp_path / "source"), tmp_path / "m.gguf", lambda *_: Kind.F32,
        tokenizer=tokenizer,
    )  # fmt: skip
    done = cli.call("count", str(tmp_path / "m.gguf"), TEXT)
    assert done.out == f"{len(tokenizer(TEXT)['input_ids'])}\n".encode(), done.err


@pytest.mark.parametrize(
    ("arguments", "status", "said"),
    [
        (("nowhere", "hi"), 3, "there is no model 'nowhere'"),
        (("demo", " "), 2, "the prompt is empty"),
        (("org/name", "hi"), 3, "moechat download org/name"),
    ],
)
def test_what_cannot_be_counted_is_refused(
    cli: Cli, arguments: tuple[str, ...], status: int, said: str
) -> None:
    done = cli.call("count", *arguments)
    assert (done.status, done.out) == (status, b"")
    assert said in done.err


def test_without_a_chat_template_or_a_tokenizer_nothing_is_counted(cli: Cli, tmp_path: Path) -> None:
    bare = tmp_path / "bare"
    shutil.copytree(DEMO, bare, ignore=shutil.ignore_patterns("chat_template*", "manifest.json"))
    assert "has no chat template" in cli.call("count", str(bare), "hi", "--chat").err
    assert cli.call("count", str(bare), "hi").status == 0
    (bare / "tokenizer.json").unlink()
    assert "has no tokenizer" in cli.call("count", str(bare), "hi").err


def test_a_store_whose_tokenizer_differs_is_refused(cli: Cli, tmp_path: Path) -> None:
    store = tmp_path / "store"
    shutil.copytree(DEMO, store)
    tokenizer = store / "tokenizer.json"
    tokenizer.write_bytes(tokenizer.read_bytes().replace(b"a", b"b", 1))
    found = cli.call("count", str(store), "hi")
    assert found.status == 6
    assert "tokenizer.json" in found.err
    assert "is damaged" in found.err


def test_errors_come_before_torch_is_imported(cli: Cli) -> None:
    script = (
        "import sys\nfrom moechat.cli.main import main\nmain(['count', 'nowhere', 'hi'])\n"
        "assert 'torch' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", script], env=cli.environment, capture_output=True)
    assert done.returncode == 0, done.stderr.decode()
