"""Presets and servers under names of the user's own: on the command line, in lists, and in errors."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pexpect
import pytest
from chat_support import ScriptedEngine
from cli_support import Cli
from serve_support import ServerProcess, serving

from moechat.chat.chat_options import ChatOptions
from moechat.cli.app import grammar
from moechat.cli.commands.chat_backend import ModelSlot
from moechat.cli.commands.model_choice import ModelChoice
from moechat.cli.commands.run_arguments import RunOptions
from moechat.cli.config.own_names import OwnNames
from moechat.cli.config.settings_file import Settings, parse_settings
from moechat.errors import ModelNotFoundError, MoechatError, UsageError

STORY = "Tell me a story about a fox."
PRESETS = """\
[presets.short]
model = "demo"
system = "You are a poet."
temperature = 0
max-tokens = 7
ctx = 300
"""


@pytest.fixture
def cli(cli: Cli, tmp_path: Path) -> Cli:
    """With a home of its own."""
    return replace(cli, home=tmp_path / "home")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    with serving(tmp_path_factory.mktemp("own-names"), "demo") as found:
        yield found


def write(cli: Cli, text: str) -> None:
    path = cli.home / "config" / "config.toml"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def answer(cli: Cli, *arguments: str) -> dict[str, Any]:
    done = cli.run("run", *arguments, "--json", forked=True)
    assert done.status == 0, done.err
    found: dict[str, Any] = json.loads(done.out)
    return found


def test_a_preset_has_the_settings_of_its_options(cli: Cli) -> None:
    write(cli, PRESETS)
    own = answer(cli, "short", STORY)
    typed = answer(
        cli,
        *("demo", STORY, "--system-prompt", "You are a poet.", "--temperature", "0"),
        *("--max-tokens", "7", "--ctx", "300"),
    )
    assert own["tokens"] == typed["tokens"]
    assert len(own["tokens"]) == 7
    assert own["model"] == "demo"
    plan = json.loads(cli.call("plan", "short", "--json").out)
    assert plan["context"]["tokens"] == 300


def test_typed_options_and_variables_override_a_preset_which_overrides_the_file(cli: Cli) -> None:
    write(cli, f"{PRESETS}\n[run]\nmax-tokens = 3\ntemperature = 0\n")
    assert len(answer(cli, "demo", STORY)["tokens"]) == 3
    assert len(answer(cli, "short", STORY)["tokens"]) == 7
    assert len(answer(cli, "short", STORY, "--max-tokens", "2")["tokens"]) == 2
    variable = replace(cli, extra={"MOECHAT_MAX_TOKENS": "4"})
    assert len(answer(variable, "short", STORY)["tokens"]) == 4


def test_an_error_about_a_value_names_the_preset(cli: Cli) -> None:
    write(cli, PRESETS.replace("ctx = 300", "ctx = 100000"))
    done = cli.run("run", "short", STORY, forked=True)
    assert done.status == 4
    assert "(--ctx is from the preset short)" in done.err


@pytest.mark.parametrize(
    ("text", "said", "hint"),
    [
        ("[presets.x]\nctx = 5", "names no model", "config set presets.x model=MODEL"),
        (
            "[presets.x]\nmodel = 'demo'\ntemprature = 1",
            "no setting presets.x.temprature",
            "presets.x.temperature",
        ),
        ("[presets.x]\nmodel = 'demo'\ntemperature = 'hot'", "temperature of presets.x", "--temperature"),
        ("[presets.x]\nmodel = 'demo'\ntemperature = -1", "--temperature is -1", ""),
        ("[presets.x]\nmodel = 'demo'\ndraft-tokens = 16", "--draft-tokens is 16", ""),
        ("[presets.x]\nmodel = 'demo'\nbits = 5", "--bits is 5", "choose one of"),
        ("[presets.x]\nmodel = 'demo'\nsystem = 'moepic'", "moepic is a way to keep experts", "run.system"),
        ("[presets.x]\nmodel = 'demo'\nsystem = 'a'\nsystem-prompt = 'b'", "which are the same", "keep one"),
        (
            "[presets.x]\nmodel = 'demo'\nremote = 'nowhere'",
            "there is no remote nowhere",
            "remotes.nowhere.url",
        ),
        ("presets = 3", "something else than a table of values in presets", "[presets.NAME]"),
    ],
)
def test_a_malformed_preset_is_a_usage_error_of_its_use(cli: Cli, text: str, said: str, hint: str) -> None:
    write(cli, text)
    done = cli.call("run", "x", STORY)
    assert (done.status, done.out) == (2, b"")
    assert said in done.err
    assert hint in done.err
    findings = json.loads(cli.call("doctor", "--json").out)["findings"]
    assert any(said in finding["fact"] for finding in findings)


def test_a_preset_cannot_take_the_name_of_a_known_model(cli: Cli) -> None:
    for name in ("demo", "Demo", "mixtral"):
        refused = cli.call("config", "set", f"presets.{name}", "model=demo")
        assert refused.status == 2
        assert f"{name} is the name of a model" in refused.err
        write(cli, f"[presets.{name}]\nmodel = 'olmoe'\n")
        used = cli.call("run", name, STORY)
        assert (used.status, "has the name of a model" in used.err) == (2, True)
        (cli.home / "config" / "config.toml").unlink()


def test_a_preset_with_the_name_of_a_model_in_the_library_is_announced(cli: Cli) -> None:
    store = cli.home / "data" / "models" / "mine-11111111-4bit"
    store.mkdir(parents=True)
    (store / "manifest.json").write_text(
        '{"source": {"name": "mine", "revision": null}, "model_type": "olmoe", "geometry": {"bits": 4}, '
        '"files": {}}'
    )
    refused = cli.call("config", "set", "presets.mine", "model=demo")
    assert (refused.status, "mine is the name of a model, mine" in refused.err) == (2, True)
    write(cli, "[presets.mine]\nmodel = 'demo'\nmax-tokens = 2\n")
    done = cli.run("run", "mine", STORY, forked=True)
    assert done.status == 0, done.err
    assert "mine is your preset for demo; the library has a model of this name too" in done.err


def test_presets_are_listed_and_marked(cli: Cli) -> None:
    write(cli, PRESETS)
    lines = cli.call("list").out.decode().splitlines()
    assert any(line.split() == ["short", "(your", "preset)", "demo"] for line in lines)
    (row,) = json.loads(cli.call("list", "--json").out)
    assert (row["name"], row["kind"], row["model"]) == ("short", "preset", "demo")


def test_own_names_complete(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    from moechat.cli.completion.completers import complete_models, complete_remotes, complete_settings

    write(cli, f"{PRESETS}\n[remotes.big]\nurl = 'http://host'\n")
    monkeypatch.setenv("MOECHAT_HOME", str(cli.home))
    assert complete_models("sh") == ["short"]
    assert complete_models("@") == ["@big"]
    assert complete_remotes("") == ["big"]
    assert "presets.short.temperature" in complete_settings("presets.short.t")
    write(cli, "what is this")
    assert complete_models("sh") == []


def test_a_named_server_answers(cli: Cli, server: ServerProcess) -> None:
    set_up = cli.call("config", "set", "remotes.near", f"url={server.url}")
    assert set_up.status == 0, set_up.err
    options = ("--temperature", "0", "--max-tokens", "9")
    here = answer(cli, "demo", STORY, *options)["text"]
    assert answer(cli, "demo", STORY, "--remote", "near", *options)["text"] == here
    assert answer(cli, "@near", STORY, *options)["text"] == here
    assert cli.call("config", "set", "remotes.near.model", "nothing").status == 0
    wrong = cli.run("run", "@near", STORY, forked=True)
    assert (wrong.status, "has no model nothing" in wrong.err) == (3, True)
    write(cli, f"{PRESETS}remote = 'near'\n[remotes.near]\nurl = '{server.url}'\n".replace("ctx = 300\n", ""))
    assert len(answer(cli, "short", STORY)["text"]) > 0


def test_a_name_of_no_server_gets_a_suggestion(cli: Cli) -> None:
    write(cli, "[remotes.big]\nurl = 'http://host'\n")
    done = cli.call("run", "demo", "--remote", "bigg", STORY)
    assert done.status == 2
    assert "there is no remote bigg" in done.err
    assert "do you mean big?" in done.err
    missing = cli.call("run")
    assert (missing.status, "MODEL is missing" in missing.err) == (2, True)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("model = 'x'", "has no url"),
        ("url = 3", "url is no text"),
        ("url = 'http://me:hunter2@host'", "holds a password or a name"),
        ("url = 'http://host'\nkey = 'sk-1'", "secrets are not kept"),
        ("url = 'http://host'\napi-key-variable = 'sk-1'", "no name of a variable"),
        ("url = 'http://host'\nmodle = 'x'", "there is no setting remotes.x.modle"),
    ],
)
def test_a_malformed_server_is_a_usage_error(cli: Cli, text: str, said: str) -> None:
    write(cli, f"[remotes.x]\n{text}\n")
    done = cli.call("run", "@x", STORY)
    assert (done.status, said in done.err) == (2, True), done.err
    assert "hunter2" not in done.err
    assert "sk-1" not in done.err.replace("api-key", "")


def test_the_key_of_a_named_server_comes_from_its_own_variable(
    server: ServerProcess, tmp_path: Path, cli: Cli
) -> None:
    key = tmp_path / "key.txt"
    key.write_text("right-key\n")
    with serving(tmp_path, "demo", "--api-key-file", str(key), ready=False) as guarded:
        write(cli, f"[remotes.x]\nurl = '{guarded.url}'\napi-key-variable = 'OF_X'\n")
        general = replace(cli, extra={"MOECHAT_API_KEY": "right-key"})
        refused = general.run("run", "@x", STORY, "--max-tokens", "2", forked=True)
        assert (refused.status, "OF_X" in refused.err) == (3, True), refused.err
        own = replace(cli, extra={"OF_X": "right-key", "MOECHAT_API_KEY": "wrong"})
        done = own.run("run", "@x", STORY, "--max-tokens", "2", forked=True)
        assert done.status == 0, done.err


# ---- /model


def options_of(text: str, **values: Any) -> RunOptions:
    settings = parse_settings(text, Path("config.toml"))
    plain = {
        entry.name: entry.default for entry in fields(RunOptions) if entry.name not in ("own", "origins")
    }
    plain |= {"model": "demo", **values}
    own = OwnNames(settings, grammar().built_one("run"), plain, {}, frozenset(values))
    return RunOptions(model="demo", own=own, **values)


def test_options_of_another_model_do_not_keep_those_of_a_preset() -> None:
    first = options_of(PRESETS, top_p=0.5)
    preset = first.for_model("short")
    assert (preset.model, preset.ctx, preset.temperature, preset.top_p) == ("demo", 300, 0, 0.5)
    assert preset.chat.system == "You are a poet."
    assert ("ctx", "300", "from the preset short") in preset.chat.loading
    back = preset.for_model("olmoe")
    assert (back.model, back.ctx, back.temperature, back.top_p) == ("olmoe", None, None, 0.5)
    assert (back.preset, back.chat.system) == ("", None)


def test_a_switch_to_a_server_drops_what_is_about_loading() -> None:
    first = options_of("[remotes.big]\nurl = 'http://host'\nmodel = 'm'\n", ctx=300, temperature=0.5)
    there = first.for_model("@big")
    assert there.server is not None
    assert (there.server.url, there.server.model, there.ctx, there.temperature) == (
        "http://host",
        "m",
        None,
        0.5,
    )
    other = first.for_model("@big other").server
    assert other is not None
    assert other.model == "other"
    assert there.for_model("demo").ctx == 300
    with pytest.raises(UsageError, match="no remote small"):
        _ = first.for_model("@small").server


class Loader:
    """Loads scripted engines by name; names in ``broken`` fail."""

    def __init__(self, broken: set[str]) -> None:
        self.loaded: list[str] = []
        self.closed: list[str] = []
        self._broken = broken

    def __call__(self, name: str) -> ScriptedEngine:
        if name in self._broken:
            raise MoechatError(f"{name} is gone")
        self.loaded.append(name)
        engine = ScriptedEngine([], name=name)
        engine.close = lambda: self.closed.append(name)  # type: ignore[method-assign]
        return engine


REMOTES = "[remotes.big]\nurl = 'http://host'\n[remotes.gone]\nurl = 'http://gone'\n"


def test_a_failing_switch_to_a_server_leaves_the_old_engine_in_place() -> None:
    choice, load = ModelChoice(options_of(f"{PRESETS}{REMOTES}")), Loader({"@gone", "short"})
    with ModelSlot(load, choice.name, choice=choice) as models:  # type: ignore[arg-type]
        engine = models.engine
        for name, error in (
            ("@gone", MoechatError),
            ("@nowhere", UsageError),
            ("nothing", ModelNotFoundError),
        ):
            with pytest.raises(error):
                models.use(name)
            assert models.engine is engine
        assert load.closed == []
        chat = models.use("@big")
        assert isinstance(chat, ChatOptions)
        assert (models.engine.name, load.closed) == ("@big", ["demo"])
        there = models.engine
        with pytest.raises(MoechatError, match="short is gone"):
            models.use("short")  # a model of this machine: the one of the server takes no memory
        assert models.engine is there
        models.use("another")  # the library has none, so it is one of that server
        assert choice.current.server is not None
        assert choice.current.server.model == "another"
        models.use("demo")
        assert choice.current.server is None
    assert load.closed == ["demo", "@big", "another", "demo"]


def test_the_chat_switches_between_a_server_presets_and_models(
    cli: Cli, server: ServerProcess, tmp_path: Path
) -> None:
    write(cli, f"{PRESETS}[remotes.near]\nurl = '{server.url}'\n[remotes.gone]\nurl = 'http://127.0.0.1:9'\n")
    lines = ["/model short", "/set", "/model @gone", "/model @near", "Hello", "/show", "/model demo", "/bye"]
    plain = replace(cli, extra={"TERM": "dumb"})
    chat = plain.terminal("run", "demo", "--no-save", "--temperature", "0", forked=True)
    text = ""
    for line in lines:
        chat.expect(">>> ")
        text += chat.before or ""
        chat.sendline(line)
    chat.expect(pexpect.EOF)
    text = text.replace("\r", "")
    assert "max_tokens          7  (from the preset short)" in text
    assert "the system prompt: You are a poet." in text
    assert "127.0.0.1:9 cannot be reached" in text
    assert "demo goes on with this conversation" in text
    assert "server" in text
    assert server.url in text
    assert "there is no system prompt any more" in text


# ---- moechat serve


def test_a_served_preset_gives_defaults_that_clients_can_override(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(cli, PRESETS)
    monkeypatch.setenv("MOECHAT_HOME", str(cli.home))
    user = {"role": "user", "content": STORY}
    with (
        serving(tmp_path, "short") as preset,
        serving(tmp_path, "demo", "--ctx", "300") as plain,
        preset.client() as client,
        plain.client() as other,
    ):
        assert client.get("/v1/models").json()["data"][0]["id"] == "short"

        def text(client: Any, **body: Any) -> str:
            done = client.post("/v1/chat/completions", json={"model": "default", "messages": [user], **body})
            assert done.status_code == 200, done.text
            return str(done.json()["choices"][0]["message"]["content"])

        poet = [{"role": "system", "content": "You are a poet."}, user]
        same = {"temperature": 0, "max_tokens": 7}
        assert text(client) == text(other, messages=poet, **same)
        cook = [{"role": "system", "content": "You cook."}, user]
        assert text(client, messages=cook, max_tokens=12) == text(
            other, messages=cook, temperature=0, max_tokens=12
        )
        assert text(client, model="short") == text(client, model="demo")


def test_a_server_of_all_models_offers_presets(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(cli, f"{PRESETS}[presets.broken]\nctx = 3\n[presets.far]\nmodel = 'x'\nremote = 'http://host:1'\n")
    monkeypatch.setenv("MOECHAT_HOME", str(cli.home))
    with serving(tmp_path, ready=False) as server, server.client() as client:
        names = [card["id"] for card in client.get("/v1/models").json()["data"]]
        assert names == ["demo", "short"]
        body = {"model": "short", "messages": [{"role": "user", "content": STORY}]}
        done = client.post("/v1/chat/completions", json=body).json()
        assert done["usage"]["completion_tokens"] == 7
    assert "not offered: presets.broken" in server.log.read_text()


def test_settings_without_own_names_are_empty() -> None:
    assert Settings(Path("x")).presets == {}
    assert OwnNames().preset("any") is None
