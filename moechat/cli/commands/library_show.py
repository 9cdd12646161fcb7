"""``moechat show``: shows the properties of a model in the library."""

from __future__ import annotations

import json as jsonlib
import math
import re
import shlex
from pathlib import Path
from typing import Any

from moechat.cli.commands.library_list import entry_json, write_json
from moechat.cli.terminal.consoles import write_output
from moechat.cli.terminal.load_progress import format_bytes
from moechat.cli.terminal.page import Page
from moechat.config import user_paths
from moechat.errors import ModelNotFoundError, MoechatError, StoreDamagedError, UsageError
from moechat.hub.known_shapes import find_shape
from moechat.hub.library import LibraryEntry, find_stores, read_entry
from moechat.hub.model_ref import hub_model
from moechat.hub.names import resolve_path_or_repository
from moechat.safe_text import one_line

_HEAD = ("lm_head.weight", "output.weight")
_EMBEDDINGS = ("embed_tokens.weight", "wte.weight", "word_embeddings.weight")
# Keys for the number of experts per token, which differ between families.
_TOP_K = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k", "moe_top_k", "top_k_experts")
_MAX_CARD = 1 << 20
_LICENCE = re.compile(r"^licen[sc]e(?:_name)?:\s*[\"']?([^\"'\n#]+)", re.MULTILINE)


def show_model(model: str, bits: int | None, *, json: bool) -> int:
    """Show the stores of a model; returns the exit status.

    Raises:
        MoechatError: There is none, or one is damaged.
    """
    import sys

    shown = [_facts(entry) for entry in _entries(model, bits)]
    if json:
        write_json(shown[0] if len(shown) == 1 else shown)
        return 0
    page = Page()
    for number, facts in enumerate(shown):
        if number:
            page.line()
        page.line(one_line(str(facts["name"])), "bold")
        page.pairs(_rows(facts))
    write_output(sys.stdout, page.text)
    return 0


def _entries(model: str, bits: int | None) -> list[LibraryEntry]:
    paths = user_paths()
    try:
        ref = resolve_path_or_repository(model, bits=bits, paths=paths)
    except MoechatError:
        return _stores(model, bits)
    if ref.store is not None and ref.repository is None:  # the demo, or a store's directory
        entry = read_entry(ref.store, paths)
        return [entry]
    return _stores(model, bits)


def _stores(model: str, bits: int | None) -> list[LibraryEntry]:
    try:
        return find_stores(model, bits, user_paths())
    except ModelNotFoundError as error:
        if not _has_other_bits(model):
            error.hint = _what_shows_it(model)
        raise


def _has_other_bits(model: str) -> bool:
    try:
        return bool(find_stores(model, None, user_paths()))
    except ModelNotFoundError:
        return False


def _what_shows_it(model: str) -> str | None:
    """A hint with the commands that show a model which is not in the library."""
    name = shlex.quote(model)
    plan = f"`moechat plan {name}` shows its memory and speed on this machine"
    try:
        hub_model(model)
    except UsageError:  # a path
        return f"{plan}; `moechat run {name}` converts it"
    except ModelNotFoundError as error:
        return error.hint
    download = f"`moechat download {name} --dry-run` shows the size of the download"
    return download if find_shape(model) is None else f"{plan}; {download}"


def _facts(entry: LibraryEntry) -> dict[str, Any]:
    from moechat.store.quantised.schemes import source_format_of
    from moechat.store.quantizer import CALIBRATED
    from moechat.store.store import Store

    if entry.damaged:
        Store.open(entry.path)  # raises with the reason
        raise StoreDamagedError(f"{entry.path} has a manifest that cannot be read")
    store = Store.open(entry.path)
    geometry = store.geometry
    config = _text_config(entry.path / "config.json")
    per_expert = geometry.expert_weights + geometry.expert_biases
    # A token reads one row of the embedding table, unless the table is also the head: then all of it.
    sizes = {key: math.prod(store.dense.info(key)[1]) for key in store.dense}
    dense = sum(sizes.values())
    has_head = any(key.endswith(_HEAD) for key in sizes)
    rows = sum(size for key, size in sizes.items() if has_head and key.endswith(_EMBEDDINGS))
    layers = len(store.layers)
    top_k = next((config[name] for name in _TOP_K if isinstance(config.get(name), int)), None)
    expert_bytes = layers * geometry.layer_bytes
    return {
        **entry_json(entry),
        "parameters": dense + layers * geometry.num_experts * per_expert,
        "active_parameters": None if top_k is None else dense - rows + layers * top_k * per_expert,
        "layers": config.get("num_hidden_layers"),
        "expert_layers": layers,
        "experts": geometry.num_experts,
        "top_k": top_k,
        "hidden_size": geometry.hidden_size,
        "expert_size": geometry.intermediate_size,
        "vocabulary": config.get("vocab_size"),
        "context": config.get("max_position_embeddings"),
        "expert_bytes": expert_bytes,
        "dense_bytes": sum(store.dense.entry(key).nbytes for key in store.dense),
        "licence": _licence(entry.path),
        "experts_form": geometry.title,
        "source_format": source_format_of(entry.path),
        "calibrated": store.manifest.quantisation.solver == CALIBRATED,
        "created_by": dict(store.manifest.created_by),
    }


def _rows(facts: dict[str, Any]) -> list[tuple[str, str]]:
    active = facts["active_parameters"]
    source = facts["repository"]
    packed = facts["source_format"]
    return [
        ("family", str(facts["model_type"])),
        (
            "parameters",
            _count(facts["parameters"]) + ("" if active is None else f", {_count(active)} for a token"),
        ),
        ("layers", f"{facts['layers']}, {facts['expert_layers']} of them with experts"),
        (
            "experts",
            f"{facts['experts']} a layer" + (f", {facts['top_k']} a token" if facts["top_k"] else ""),
        ),
        ("context", f"{facts['context']:,} tokens" if isinstance(facts["context"], int) else "unknown"),
        _form(facts),
        *([("made from", packed)] if packed else []),
        (
            "size",
            f"{format_bytes(facts['bytes'])}: experts {format_bytes(facts['expert_bytes'])}, "
            f"dense weights {format_bytes(facts['dense_bytes'])}",
        ),
        ("where", str(facts["path"])),
        ("licence", facts["licence"] or "not stated"),
        ("source", f"{source} at {facts['commit']}" if source else facts["name"]),
    ]


def _form(facts: dict[str, Any]) -> tuple[str, str]:
    """The form of the experts in the store."""
    if not facts["bits"]:
        return "kept as", str(facts["experts_form"])
    return "bits", str(facts["bits"]) + (", calibrated" if facts["calibrated"] else "")


def _count(number: int) -> str:
    if number >= 1e9:
        return f"{number / 1e9:.1f} billion"
    return f"{number / 1e6:.1f} million" if number >= 1e6 else f"{number:,}"


def _text_config(path: Path) -> dict[str, Any]:
    """The configuration of the language model, which some families nest as ``text_config``."""
    try:
        content = jsonlib.loads(path.read_text("utf-8"))
    except (OSError, ValueError):
        return {}
    if not isinstance(content, dict):
        return {}
    inner = content.get("text_config")
    return {**content, **inner} if isinstance(inner, dict) else content


def _licence(store: Path) -> str | None:
    """The licence from the front matter of the model card; else the first line of the licence file."""
    try:
        with open(store / "README.md", encoding="utf-8", errors="replace") as file:
            card = file.read(_MAX_CARD)
    except OSError:
        card = ""
    if card.startswith("---"):
        found = _LICENCE.search(card[3:].partition("\n---")[0])
        if found:
            return found[1].strip()
    for name in ("LICENSE", "LICENSE.txt", "LICENSE.md", "LICENCE"):
        try:
            with open(store / name, encoding="utf-8", errors="replace") as file:
                first = next((line.strip() for line in file if line.strip()), "")
        except OSError:
            continue
        return first[:80] or None
    return None
