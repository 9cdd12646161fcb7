"""Transcript of names: a model of the hub by its alias, a search, and names and machines that do not do."""

from __future__ import annotations

import tempfile
from dataclasses import replace
from pathlib import Path

from stage import Stage

_MAKER, _FP8, _FILES = (
    "Qwen/Qwen3.6-35B-A3B",
    "Qwen/Qwen3.6-35B-A3B-FP8",
    "unsloth/Qwen3.6-35B-A3B-GGUF",
)
# More than this is not in the machines on which this runs: it is left out where there is.
_LARGE, _LARGE_REPOSITORY = "deepseek-v4-flash", "deepseek-ai/DeepSeek-V4-Flash"
_LARGE_GIB = 24


def names(stage: Stage) -> None:
    """An alias with a choice of sources, which tiny random models stand in for; a search; what goes wrong."""
    from local_hub import hub_with_model

    from moechat.hardware.memory import available_bytes

    with hub_with_model(stage) as (hub, stage), tempfile.TemporaryDirectory(prefix="mt-gguf-") as place:
        _write_files(Path(place))
        hub.repositories[_MAKER] = dict(next(iter(hub.repositories.values())))
        hub.repositories[_MAKER]["model-of-pictures.safetensors"] = bytes(16 << 20)
        hub.add(_FILES, Path(place))
        hub.tags[_FILES] = ["gguf", f"base_model:quantized:{_MAKER}"]

        stage.record.say(
            "An alias: the source for this machine is chosen, and described before anything comes"
        )
        with stage.terminal("moechat", "run", "qwen3.6") as terminal:
            terminal.wait("[Y/n]")
            stage.seen(terminal, "started", "left out", "source", "download", "memory", "speed", "[Y/n]")
            stage.left(terminal, "n\r", "n ⏎", status=3)
        stage.command(
            "moechat download qwen3.6 --dry-run",
            "the smallest of 3 downloads",
            "others:",
            "tokens a second",
        )
        stage.command('moechat run qwen3.6 --yes --completion "Once upon a time" --max-tokens 12')
        stage.command("moechat list", _FILES)
        stage.command('moechat run qwen3.6 --quiet --completion "Once upon a time" --max-tokens 12')

        stage.record.say("A search (the hub has few repositories)")
        stage.command("moechat search a3b", f"{_MAKER} (qwen3.6)", "tokens a second")

        stage.record.say("Names and machines that do not do")
        stage.command("moechat run qwen3.5 Hello", "did you mean qwen3.6", status=3)
        hub.repositories[_LARGE_REPOSITORY] = hub.repositories[_MAKER]
        if available_bytes() < _LARGE_GIB << 30:
            stage.command(f"moechat run {_LARGE} --yes Hello", "least that works", status=4)
        unreachable = replace(stage, extra={**stage.extra, "HF_ENDPOINT": "http://127.0.0.1:9"})
        unreachable.command("moechat run gemma4 --yes Hello", "cannot be reached", status=5)
        unreachable.command("moechat search gemma", "cannot be reached", status=5)
        offline = replace(stage, extra={**stage.extra, "HF_HUB_OFFLINE": "1"})
        offline.command("moechat search gemma", "forbids the network", status=5)


def _write_files(directory: Path) -> None:
    """GGUF files of a tiny random model, as people make them of larger ones."""
    from gguf.constants import GGMLQuantizationType as Kind
    from gguf_support import save_model, tensors_of, write_gguf
    from transformers import AutoTokenizer

    import moechat

    tokenizer = AutoTokenizer.from_pretrained(Path(moechat.__file__).parent / "hub" / "demo")
    with tempfile.TemporaryDirectory(prefix="mt-tiny-") as place:
        config = save_model("olmoe", Path(place), vocab_size=len(tokenizer))
        tensors = tensors_of(Path(place))
        for name, kind in (("Q8_0", Kind.Q8_0), ("Q4_0", Kind.Q4_0)):
            write_gguf(
                "olmoe",
                config,
                tensors,
                directory / f"Qwen3.6-35B-A3B-{name}.gguf",
                lambda tensor, shape, kind=kind: (
                    Kind.F32 if len(shape) == 1 or "gate_inp" in tensor else kind
                ),
                tokenizer=tokenizer,
            )
