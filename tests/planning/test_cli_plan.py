"""``moechat plan`` as people and scripts use it."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from cli_support import Cli
from tiny import tiny_config

GPU = ("--gpu", "rtx3060-12g")

pytestmark = pytest.mark.usefixtures("short_simulations")


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A file that is no model, only its sizes."""
    sizes = {"hidden_size": 1024, "moe_intermediate_size": 512, "num_experts": 32, "num_hidden_layers": 24}
    path = tmp_path_factory.mktemp("config") / "many.json"
    tiny_config("qwen3_moe", 0, **sizes).to_json_file(path)
    return str(path)


def test_a_missing_model_is_reported_before_the_machine_is_examined(cli: Cli) -> None:
    result = cli.call("plan", "./missing.json", "--vram", "12G")
    assert result.status == 3
    assert "missing.json" in result.err
    assert "needs a GPU" not in result.err


def test_a_plan_shows_memory_targets_and_speed(cli: Cli) -> None:
    result = cli.call("plan", "mixtral", "--vram", "12G", "-v", *GPU)
    assert (result.status, result.err) == (0, "")
    text = result.out.decode()
    for words in (
        "mixtral-8x7b: 46.7 billion parameters, 12.7 billion for a token",
        "VRAM               11.4 GiB  available",
        "12 GiB of graphics memory were given, but only 11.4 GiB are available: the CUDA context of 448 MiB "
        "and 95 % of the 11.6 GiB free beside it; other programs may need the rest",
        "dense weights     3.0 GiB  counted",
        "CUDA context      448 MiB  estimate",
        "experts, pinned  23.6 GiB  100 % of all",
        "experts kept in VRAM: C of 8 a layer, θ of each",
        "expected speed: estimate, not measured",
        "tokens a second",
        "RAM to GPU 25.6 GB/s, estimate",
        "routing          assumed for models like mixtral, none recorded here: defaults rest on "
        "recordings of gpt-oss-20b and DeepSeek-V2-Lite",
        "this plan",
        "no speed of it has been measured yet",
    ):
        assert words in text
    assert "\x1b" not in text
    assert not any(line != line.rstrip() for line in text.splitlines())
    assert max(map(len, text.splitlines())) <= 200


def test_a_plan_begins_with_what_the_owner_of_a_machine_wants_to_know(cli: Cli) -> None:
    whole = cli.call("plan", "mixtral", "--vram", "12G", "-v", *GPU).out.decode().splitlines()
    short = cli.call("plan", "mixtral", "--vram", "12G", *GPU).out.decode().splitlines()
    title, fits, speed, limit, note, more = short
    assert title == "mixtral-8x7b with 4 bits on Desktop with a GeForce RTX 3060 12 GB, 32 GB of DDR4-3200"
    assert re.match(r"fits +23 % of the experts in 11.4 GiB of VRAM, all of them in RAM; 11,520 tokens", fits)
    about = re.match(r"speed +about ([\d.]+) tokens a second, ([\d.]+) to ([\d.]+) \(an estimate", speed)
    assert about is not None
    assert float(about[2]) < float(about[1]) < float(about[3])
    assert re.match(r"limit +missing experts, .*: \d+ % of a token's time", limit)
    assert re.match(r"note +12 GiB of graphics memory were given, but only 11.4 GiB", note)
    assert more.startswith("-v shows")
    assert whole[:5] == short[:5]
    assert len(whole) > 30
    all_near = cli.call("plan", "olmoe", "--vram", "12G", *GPU).out.decode()
    assert re.search(r"fits +all experts in [\d.]+ GiB of 11.4 GiB of VRAM", all_near)
    unmeasured = cli.call("plan", "demo").out.decode()
    assert re.search("speed +this machine has not been measured, .*`moechat profile`", unmeasured)


def test_many_different_layers_are_drawn_as_a_picture(cli: Cli) -> None:
    # Without a choice of strategy, which may keep as many experts in every layer.
    result = cli.call("plan", "qwen3", "--vram", "4500M", "--system", "moepic", "-v", *GPU)
    assert result.status == 0, result.err
    lines = result.out.decode().splitlines()
    start = next(number for number, line in enumerate(lines) if line.startswith("experts kept in VRAM"))
    picture = lines[start + 1 : start + 4]
    assert [line.split()[0] for line in picture] == ["C", "θ", "hits"]
    for line in picture:
        glyphs = line[6:54]
        assert set(glyphs) <= set("▁▂▃▄▅▆▇█ "), glyphs
        assert len(glyphs) == 48
    assert lines[start + 4].startswith("layers 0 to 47")


def test_without_unicode_the_picture_is_ascii(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("moechat.cli.commands.plan._is_utf8", lambda: False)
    for model, vram in (("qwen3", "6G"), ("mixtral", "12G")):
        result = cli.call("plan", model, "--vram", vram, "-v", *GPU)
        assert result.status == 0, result.err
        assert set(result.out.decode()) - set(map(chr, range(128))) <= {"θ"}


def test_json_has_the_whole_plan(cli: Cli, config: str) -> None:
    command = f"$M plan {config} --vram 900M {' '.join(GPU)} --json | python3 -m json.tool"
    result = cli.shell(command, forked=True)
    assert (result.status, result.err) == (0, "")
    plan = json.loads(result.out)
    assert plan["machine"]["name"] == "rtx3060-12g"
    assert plan["memory"]["near"] == "vram"
    assert len(plan["layers"]) == 24
    assert plan["speed"]["basis"] == "estimate"


def test_dense_bits_count_on_a_gpu(cli: Cli, config: str) -> None:
    taken = {}
    for bits in (16, 8, 4):
        result = cli.call("plan", config, "--vram", "900M", "--dense-bits", str(bits), "--json", *GPU)
        assert result.status == 0, result.err
        plan = json.loads(result.out)
        assert plan["model"]["dense_bits"] == bits
        parts = {part["name"]: part["bytes"] for part in plan["memory"]["tiers"][0]["parts"]}
        taken[bits] = parts["dense weights"]
    assert taken[4] < taken[8] < taken[16]


def test_a_reader_that_closes_the_pipe_early_gets_no_error(cli: Cli) -> None:
    result = cli.shell("$M plan --list-gpus | head -c 40")
    assert (result.status, result.err) == (0, "")
    assert len(result.out) == 40


def test_a_closed_pipe_ends_the_command_quietly(cli: Cli, config: str) -> None:
    process = cli.start("plan", config, "--vram", "900M", *GPU, forked=True)
    assert process.stdout is not None
    process.stdout.close()
    assert process.stderr is not None
    assert process.stderr.read() == b""
    assert process.wait() == 0


def test_lines_are_not_truncated_on_a_terminal(cli: Cli, config: str) -> None:
    terminal = cli.terminal("plan", config, "--vram", "900M", "-v", *GPU, forked=True)
    terminal.expect("tokens a second")
    terminal.expect("this plan")
    terminal.expect("has been measured yet")
    terminal.wait()
    assert terminal.exitstatus == 0


@pytest.mark.parametrize(
    ("arguments", "status", "reason", "hint"),
    [
        (("mixtral", "--gpu", "rtx3060"), 2, "no hardware profile 'rtx3060'", "rtx3060-12g"),
        (("mixtral", "--gpu", "voodoo2"), 2, "no hardware profile 'voodoo2'", "rtx4090"),
        (("mixtral", "--vram", "12G"), 2, "--vram needs a GPU", "--list-gpus"),
        (("mixtral", "--vram", "12Q", *GPU), 2, "'12Q' is not a size", "12G"),
        (("mixtral", "--vram", "0", *GPU), 2, "--vram is 0", "leave it out"),
        (("mixtral", "--bits", "5", *GPU), 2, "--bits is 5", "choose one of: 2, 3"),
        (("mixtral", "--ctx", "1", *GPU), 2, "--ctx is 1", ""),
        (("mixtral", "--system", "best"), 2, "--system is 'best'", "auto"),
        (
            ("deepseek-v4-flash", "--dense-bits", "8", "--gpu", "ssd-only-16g"),
            4,
            "the least that works",
            "hint: insist on 1",
        ),
        (
            ("deepseek-v4", "--gpu", "ssd-only-16g"),
            3,
            "no model",
            "did you mean deepseek-v4-flash or deepseek-v2-lite?",
        ),
        ((), 2, "MODEL is missing", "moechat plan mixtral"),
        (("mixtrl", *GPU), 3, "there is no model 'mixtrl'", "mixtral"),
        (("nobody/nothing", *GPU), 3, "its shape is not among the known ones", "config.json"),
        (("mixtral", "--vram", "3G", *GPU), 4, "the least that works is", "--vram (vram=)"),
        (("mixtral", "--vram", "24G", *GPU), 4, "has 12288 MiB of memory", "another GPU"),
        (("mixtral", "--ctx", "32769", *GPU), 4, "the model was made for 32768", "at most 32768"),
        (("mixtral", "--ram", "1G", "--ctx", "512"), 4, "the least that works is", "--ram (ram=)"),
    ],
)
def test_invalid_requests_end_with_the_right_status(
    cli: Cli, arguments: tuple[str, ...], status: int, reason: str, hint: str
) -> None:
    result = cli.call("plan", *arguments)
    assert result.status == status, result.err
    assert result.out == b""
    first, *rest = result.err.splitlines()
    assert first.startswith("error: ")
    assert reason in first
    if hint:
        assert hint in "\n".join(line for line in rest if line.startswith("hint: "))


def test_a_broken_configuration_gives_an_error_and_a_hint(cli: Cli, tmp_path: Path, config: str) -> None:
    broken = tmp_path / "broken.json"
    values = json.loads(Path(config).read_text())
    for text in ("{}", json.dumps({**values, "hidden_size": 0})):
        broken.write_text(text)
        result = cli.call("plan", str(broken), *GPU)
        assert (result.status, result.out) == (3, b"")
        first, hint = result.err.splitlines()
        assert first.startswith("error: ")
        assert hint.startswith("hint: compare")
        assert "config.json" in hint


def test_reference_machines_are_listed(cli: Cli) -> None:
    result = cli.call("plan", "--list-gpus")
    assert (result.status, result.err) == (0, "")
    lines = result.out.decode().splitlines()
    assert lines[0].split() == ["name", "VRAM", "RAM", "machine"]
    names = [line.split()[0] for line in lines[1:]]
    assert names == sorted(names)
    assert "rtx3060-12g" in names


def test_a_machine_can_be_read_from_a_file(cli: Cli, tmp_path: Path, config: str) -> None:
    from moechat.hardware import profile_file

    shipped = Path(profile_file.__file__).parents[2] / "profiles" / "rtx3060-12g.toml"
    own = tmp_path / "my-pc.toml"
    own.write_text(shipped.read_text().replace("12288", "8192"))
    result = cli.call("plan", config, "--gpu", str(own), "--json")
    assert result.status == 0, result.err
    plan = json.loads(result.out)
    assert plan["machine"]["name"] == "my-pc"
    context = 448 << 20
    assert plan["memory"]["tiers"][0]["budget_bytes"] == context + int(0.95 * ((8 << 30) - context))


def test_figures_measured_elsewhere_are_not_used_for_this_machine(
    cli: Cli, tmp_path: Path, config: str
) -> None:
    from moechat.hardware import profile_file

    shipped = Path(profile_file.__file__).parents[2] / "profiles" / "rtx3060-12g.toml"
    text = shipped.read_text()
    for origin in ("estimate", "published", "datasheet"):
        text = text.replace(f'"{origin}"', '"measured"')
    own = tmp_path / "friends-pc.toml"
    own.write_text(text)
    result = cli.call("plan", config, "--vram", "900M", "--gpu", str(own), "-v")
    assert result.status == 0, result.err
    said = result.out.decode()
    # What its kernels reach is not in such a file.
    assert re.search(r"expected speed: estimate, \d+ of \d+ figures measured on friends-pc", said)
    assert "this machine" not in said


def test_the_plan_for_this_machine_is_the_plan_of_run(cli: Cli) -> None:
    result = cli.call("plan", "demo", "--json")
    assert result.status == 0, result.err
    plan = json.loads(result.out)
    assert plan["machine"]["name"] == "this machine"
    assert plan["model"]["weights"] == "store"
    assert plan["memory"]["near"] == "ram"
    assert plan["speed"] is None
    assert any("moechat profile" in note for note in plan["notes"])


def test_help_documents_the_keys(cli: Cli, config: str) -> None:
    result = cli.call("plan", "--help")
    assert result.status == 0
    text = " ".join(result.out.decode().split())
    assert "--list-gpus" in text
    keys = text.partition("--json: ")[2].partition("Units:")[0]
    plan = json.loads(cli.call("plan", config, "--vram", "900M", "--json", *GPU).out)
    for name, value in plan.items():
        listed = re.search(rf"\b{name}\b(?: \(([^)]*)\))?", keys)
        assert listed, name
        inner = value[0] if isinstance(value, list) else value
        if isinstance(inner, dict):
            assert (listed[1] or "").split(", ") == list(inner), name


def test_known_models_are_listed_with_the_best_choices_first(cli: Cli) -> None:
    result = cli.call("plan", "--list-models", "--ram", "16G", *GPU)
    assert (result.status, result.err) == (0, "")
    title, header, *lines = result.out.decode().splitlines()
    assert title.startswith("known models on ")
    assert title.endswith("RAM 16G; the best choices first")
    assert header.split("  ")[0] == "name"
    rows = lines[: lines.index("")]
    assert all(len(row) <= 80 for row in (header, *rows))
    assert {"mixtral", "qwen3.6", "olmoe"} <= {row.split()[0] for row in rows}
    assert any(line.startswith("not here: ") and "of VRAM at least" in line for line in lines)
    first = rows[0].split()[0]
    assert f"`moechat plan {first} --gpu rtx3060-12g --ram 16G`" in result.out.decode()


def test_a_machine_that_is_too_small_for_all_known_models_is_no_error(cli: Cli) -> None:
    result = cli.call("plan", "--list-models", "--ram", "100M")
    assert (result.status, result.err) == (0, "")
    assert re.search(
        r"none of the \d+ known models fits; the smallest is olmoe: it needs \S+ GiB of RAM",
        result.out.decode(),
    )
    found = json.loads(cli.call("plan", "--list-models", "--ram", "100M", "--json").out)
    assert [entry["speed"] for entry in found] == [None] * len(found)
    listed = ["name", "repository", "speed", "refused", "least_bytes"]
    assert all(list(entry) == listed for entry in found)
    text = " ".join(cli.call("plan", "--help").out.decode().split())
    assert "a list of name, repository, speed (as of search; low and high are null), refused" in text


def test_a_list_of_models_takes_no_model_and_no_missing_gpu(cli: Cli) -> None:
    for arguments, said in (
        (("mixtral", "--list-models"), "leave out MODEL"),
        (("--list-models", "--vram", "12G"), "--vram needs a GPU"),
        (("--list-models", "--gpu", "no-such-card"), "no-such-card"),
    ):
        result = cli.call("plan", *arguments)
        assert (result.status, result.out) == (2, b"")
        assert said in result.err


def test_a_list_of_models_needs_no_torch() -> None:
    code = (
        "import sys; from moechat.cli.main import main\n"
        "assert main(['plan', '--list-models', '--ram', '3G']) == 0\n"
        "assert not {'torch', 'transformers', 'huggingface_hub'} & set(sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "olmoe" in done.stdout
