"""Transcripts of commands in pipes, and of every exit status that the manual documents."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import signal
import sys

from hub_checkpoint import write_hub_checkpoint
from stage import ROOT, Stage

_SUMMARY = "{text, finish_reason, answer_tokens: .statistics.output_tokens, seed: .statistics.seed}"


def pipes(stage: Stage) -> None:
    """Answers in pipes and files."""
    record = stage.record
    record.say("a reader that has enough: both statuses")
    done = stage.command(
        'moechat run demo "Tell me a story about a fox." --seed 1 -q | head -c 20; echo "|${PIPESTATUS[*]}"',
        "|0 0",
    )
    record.check(re.fullmatch(r"(?s).{20}\|0 0\n", done.out), "20 characters, then both statuses")
    record.check(not done.err, "nothing on stderr")

    record.say("one JSON object, and a program that reads it")
    question = 'moechat run demo "Who are you?" --seed 1 --json'
    if shutil.which("jq"):
        done = stage.command(f"{question} | jq '{_SUMMARY}'")
        told = json.loads(done.out)
        record.check(told["answer_tokens"] > 0 and told["seed"] == 1, "jq finds the statistics")
    else:
        stage.command(f"{question} | python -m json.tool | head -n 30", '"text"', '"finish_reason"')

    record.say("stdin and a prompt make one prompt, and so does -")
    text = "--completion --seed 1 --max-tokens 30 -q"
    first = stage.command(
        f"printf 'Once upon a time there was a fox.\\n' | moechat run demo 'The fox' {text}"
    )
    second = stage.command(
        f"printf 'Once upon a time there was a fox.\\n\\nThe fox\\n' | moechat run demo - {text}"
    )
    record.check(first.out.strip() and first.out == second.out, "both prompts have the same answer")

    record.say("a file of prompts, a JSON object for each; the last is longer than the context")
    (stage.work / "prompts.jsonl").write_text(
        '{"prompt": "Who are you?"}\n{"prompt": "Can I get a small latte, please?"}\n'
        + json.dumps({"prompt": "once upon a time " * 400})
        + "\n"
    )
    stage.command("cut -c 1-60 prompts.jsonl")
    done = stage.command(
        "moechat run demo --jsonl prompts.jsonl --seed 1 --max-tokens 40 > answers.jsonl", status=2
    )
    answers = [json.loads(line) for line in (stage.work / "answers.jsonl").read_text().splitlines()]
    record.check(len(answers) == 3, "an object for each prompt")
    stage.command("cut -c 1-110 answers.jsonl", "error")
    record.check(
        ["error" in answer for answer in answers] == [False, False, True], "only the last one is an error"
    )

    record.say("outputs that cannot be written, and one that nobody wants")
    stage.command("moechat run demo hello --max-tokens 9 > /dev/full", "No space left on device", status=1)
    stage.command("moechat run demo hello >&-", "standard output is closed", status=1)


def exits(stage: Stage) -> None:
    """One real command for every documented exit status."""
    record = stage.record
    documented = _documented()
    record.say("0: ok")
    stage.command('moechat run demo "Who are you?" --seed 1', status=0)

    record.say("1: an unexpected error, here an output that cannot be written")
    stage.command("moechat --version > /dev/full", "error:", status=1)

    record.say("2: usage")
    stage.command("moechat run demo hello --temperature hot", "error:", status=2)
    stage.command("moechat run demo < /dev/null", "the prompt is empty", status=2)
    stage.command(
        "printf 'ab\\xff' | moechat run demo", "stdin is not UTF-8: byte 0xff at offset 2", status=2
    )

    record.say("3: not found, or not in the library")
    stage.command("moechat run ./nowhere hello", "error:", status=3)
    stage.command("moechat show mixtrl", "error:", status=3)

    record.say("4: does not fit")
    stage.command("moechat run demo hello --ram 64M", "the memory budget is 64 MiB", status=4)
    stage.command("moechat run demo hello --ctx 99999", "99999", "1024", status=4)

    record.say("5: the network is needed")
    stage.command("HF_HUB_OFFLINE=1 moechat download mixtral", "HF_HUB_OFFLINE forbids the network", status=5)
    stage.command(
        "HF_HUB_OFFLINE=0 HF_ENDPOINT=http://127.0.0.1:9 moechat download mixtral",
        "cannot be reached",
        status=5,
    )

    record.say("6: a damaged store: a copy of the demo with one byte changed")
    stage.command(
        "cp -r \"$(moechat show demo --json | python -c 'import json, sys; "
        'print(json.load(sys.stdin)["path"])\')" damaged'
    )
    stage.command(
        "printf X | dd of=damaged/experts-00003.safetensors bs=1 seek=99999 conv=notrunc status=none"
    )
    stage.command("moechat run ./damaged hello", "experts-00003.safetensors", status=6)

    _failing_gpu(stage)

    record.say("8: in use by another program, here by one that holds the lock of a running model")
    stage.command("mkdir -p other/data/models && cp -r damaged other/data/models/used-4bit")
    stage.command(
        "MOECHAT_HOME=$PWD/other flock -s other/data/models/used-4bit/manifest.json moechat rm used-4bit -y",
        "is in use",
        status=8,
    )

    record.say("9: a file system that refuses: a conversion into /proc")
    write_hub_checkpoint(stage.work / "checkpoint")
    stage.command(
        "MOECHAT_HOME=/proc/nobody moechat run ./checkpoint hello --bits 8", "converting failed", status=9
    )

    record.say(
        "129, 130, 143: terminal closed, interrupted, terminated during an answer; what was written stays"
    )
    story = 'moechat run demo "Tell me a story about a fox." --seed 1'
    for number, status, named in (
        (signal.SIGHUP, 129, "SIGHUP after the first words"),
        (signal.SIGINT, 130, "Ctrl-C after the first words"),
        (signal.SIGTERM, 143, "SIGTERM after the first words"),
    ):
        done = stage.signalled(story, number, status=status, note=named)
        record.check(done.out.strip(), f"{named}: the words before it are there")
    shown = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 129, 130, 143}
    record.check(documented == shown, f"the manual documents {sorted(documented)}, shown are {sorted(shown)}")


def _failing_gpu(stage: Stage) -> None:
    """The command over a stand-in for the driver: no test machine has a GPU to break."""
    stage.record.say(
        "7: the GPU failed. The driver is a stand-in in host memory whose copies fail\n"
        "# (tests/support/failing_gpu_child.py), all else is the real program"
    )
    child = shlex.join([sys.executable, str(ROOT / "tests/support/failing_gpu_child.py")])
    stage.record.masks[sys.executable] = "python"
    stage.command(f"{child} 2 run demo hello --vram 1G -q", "the GPU has failed", status=7)


def _documented() -> set[int]:
    """The exit statuses of the manual's table."""
    page = (ROOT / "moechat/manual/exit-codes.md").read_text(encoding="utf-8")
    return {int(status) for status in re.findall(r"(?m)^\| (\d+) \|", page)}
