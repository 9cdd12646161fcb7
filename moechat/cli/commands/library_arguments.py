"""The arguments of the commands for the model library: download, search, list, show, rm."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from moechat.cli.completion.completers import (
    complete_aliases,
    complete_bits,
    complete_library,
    complete_models,
)
from moechat.cli.parameters import Action, argument, flag, option

_DOWNLOAD_HELP = """\
Fetch a model from the hub and convert it for the library.

Prints the sizes and times first. Each shard is deleted once it is converted, so the disk needs space for \
the store and one or two shards, not for two copies; if there is space for one more shard, it is downloaded \
while others are converted. After an interruption, the same command continues. HF_HOME, HF_TOKEN, \
HF_ENDPOINT and HF_HUB_OFFLINE are used.

--json: status (planned, finished, already here), name, repository, revision, commit, licence, bits, \
source_format, files, weight_files, download_bytes, missing_bytes, store_bytes, disk_bytes (at its peak), \
free_bytes, ram_least_bytes, ram_all_bytes, ram_available_bytes, download_s (at 100 Mbit/s), convert_s, \
overlap (of download and conversion), speed (on this machine: tokens_per_s, low, high, basis, bits, \
expert_bytes, resident_share, far, near_bytes, near), source (for an alias: why, others: name and bytes), \
destination, finished (the model is in the library). Figures are from before the download; null means unknown.
"""
_DOWNLOAD_EXAMPLES = """\
moechat download mixtral --dry-run

moechat download Qwen/Qwen3-30B-A3B@main --bits 3

moechat download mixtral --dry-run --json
"""
_SEARCH_HELP = """\
Search the hub for models, and show which run on this machine, how large they are and how fast.

Looks at the repositories whose names have all words, those with most downloads first, and reads the \
configuration of each; no weights. For every model that runs it shows the files that would be downloaded, \
the size of the store, and the expected speed as `moechat plan` estimates it for this machine; for the \
others why they do not. HF_TOKEN, HF_ENDPOINT and HF_HUB_OFFLINE are used.

--json: a list of objects with repository, commit, licence, downloads, base (the model that its files were \
made from), name (for `moechat download`), download_bytes, bits, speed (tokens_per_s, low, high, basis, \
parameters, active_parameters, bits, store_bytes, expert_bytes, resident_share, far, near_bytes, near), \
refused (the reason). null means unknown, or not run here.
"""
_SEARCH_EXAMPLES = """\
moechat search qwen3.6

moechat search glm flash --limit 20 --json | jq -r ".[] | select(.speed) | .name"
"""
_LIST_HELP = """\
List the models in the library, and the demo.

Checkpoints kept by --keep-source and unfinished downloads and conversions are listed on stderr.

--json: the library alone, as a list of objects with name, repository, commit, model_type, bits, bytes, \
used (last use, seconds since 1970, or null), path, damaged, kind (store, or checkpoint for one kept by \
--keep-source).
"""
_LIST_EXAMPLES = """\
moechat list

moechat list --json | jq -r ".[].name"
"""
_SHOW_HELP = """\
Show the properties of a model and where it is stored.

--json: name, repository, commit, model_type, parameters, active_parameters, layers, expert_layers, experts, \
top_k, hidden_size, expert_size, vocabulary, context, bits, bytes, expert_bytes, dense_bytes, path, licence, \
experts_form, source_format, calibrated, created_by, used, damaged.
"""
_SHOW_EXAMPLES = """\
moechat show demo

moechat show Qwen/Qwen3-30B-A3B --bits 4 --json
"""
_VERIFY_HELP = """\
Read converted models again from the disk, and find what is damaged.

Media can change bytes without a trace. Every file is compared with the hash that was written when the \
model was converted; of damaged experts layer and number are named. Without MODEL all models of the library \
are read. The exit status is 6 if something is damaged.

--repair makes the damaged files again: from --from, from MODEL if it is the path of the checkpoint, from a \
checkpoint kept by --keep-source, else from the hub after a question. An interrupted repair leaves the model \
as it was.

--json: a list of objects with name, path, status (right, damaged, repaired), bytes, seconds, bytes_per_s, \
damage (file, reason, layer, experts).
"""
_VERIFY_EXAMPLES = """\
moechat verify

moechat verify olmoe --repair

moechat verify ~/models/OLMoE-1B-7B-0125-Instruct --repair
"""
_RM_HELP = """\
Remove models from the library.

Asks for confirmation on a terminal. A model in use by a running moechat is not removed. --leftovers removes \
the files of interrupted downloads and conversions, --sources the checkpoints kept by `download \
--keep-source`. If a store is a symbolic link, only the link is removed.
"""
_RM_EXAMPLES = """\
moechat rm mixtral --bits 8

moechat rm Qwen/Qwen3-30B-A3B@main --sources

moechat rm --leftovers --yes
"""

_Bits = Annotated[
    int | None, option("BITS", "Only the store with this number of bits.", complete_bits, show_default=False)
]
_Json = Annotated[bool, flag("Print JSON.", "--json")]


def register_library(app: typer.Typer) -> None:
    """Add the commands to an app."""
    app.command("download", help=_DOWNLOAD_HELP, epilog=_DOWNLOAD_EXAMPLES)(_download)
    app.command("pull", help="The same as download.", hidden=True)(_download)
    app.command("search", help=_SEARCH_HELP, epilog=_SEARCH_EXAMPLES)(_search)
    app.command("list", help=_LIST_HELP, epilog=_LIST_EXAMPLES)(_list)
    app.command("ls", help="The same as list.", hidden=True)(_list)
    app.command("show", help=_SHOW_HELP, epilog=_SHOW_EXAMPLES)(_show)
    app.command("verify", help=_VERIFY_HELP, epilog=_VERIFY_EXAMPLES)(_verify)
    app.command("rm", help=_RM_HELP, epilog=_RM_EXAMPLES)(_rm)


def _download(
    model: Annotated[
        str, argument("MODEL", "An alias ('mixtral') or org/name\\[@revision].", complete_aliases)
    ],
    bits: Annotated[
        int | None,
        option(
            "BITS",
            "Bits of an expert weight: 2, 3, 4, 6, 8 or 16. If not given 4; for an alias 3 where this "
            "machine has so little memory that 3 are at least 1.5 times as fast.",
            complete_bits,
            show_default=False,
        ),
    ] = None,
    dry_run: Annotated[bool, flag("Only print sizes and times, on stdout.", "--dry-run")] = False,
    keep_source: Annotated[
        bool, flag("Keep the downloaded checkpoint beside the converted model.", "--keep-source")
    ] = False,
    quiet: Annotated[bool, flag("Only errors.", "--quiet", "-q")] = False,
    json: Annotated[bool, flag("Print sizes, times and the result as JSON.", "--json")] = False,
) -> Action:
    from moechat.cli.commands.download import DownloadCommand, download

    command = DownloadCommand(model, bits, dry_run, keep_source, quiet, json)
    return lambda: download(command)


def _search(
    words: Annotated[list[str], argument("WORDS...", "Parts of the name of a model.")],
    limit: Annotated[int, option("N", "Most repositories to look at, up to 50.")] = 10,
    bits: Annotated[
        int | None,
        option(
            "BITS", "Bits of an expert weight; chosen as for download.", complete_bits, show_default=False
        ),
    ] = None,
    quiet: Annotated[bool, flag("Only the result, and errors.", "--quiet", "-q")] = False,
    json: Annotated[bool, flag("Print JSON.", "--json")] = False,
) -> Action:
    from moechat.cli.commands.search import SearchCommand, search

    command = SearchCommand(tuple(words), limit, bits, quiet, json)
    return lambda: search(command)


def _list(json: _Json = False) -> Action:
    from moechat.cli.commands.library_list import list_models

    return lambda: list_models(json=json)


def _show(
    model: Annotated[str, argument("MODEL", "A name from the list, or as for run.", complete_models)],
    bits: _Bits = None,
    json: _Json = False,
) -> Action:
    from moechat.cli.commands.library_show import show_model

    return lambda: show_model(model, bits, json=json)


def _verify(
    model: Annotated[
        str | None, argument("MODEL", "A name from the list, or as for run.", complete_library)
    ] = None,
    bits: _Bits = None,
    repair: Annotated[bool, flag("Make damaged files again.", "--repair")] = False,
    source: Annotated[
        Path | None,
        option("PATH", "The checkpoint to repair from: a directory or GGUF file.", None, "--from"),
    ] = None,
    yes: Annotated[bool, flag("Download without asking.", "--yes", "-y")] = False,
    quiet: Annotated[bool, flag("Only what is damaged, and errors.", "--quiet", "-q")] = False,
    json: _Json = False,
) -> Action:
    from moechat.cli.commands.verify import VerifyCommand, verify

    command = VerifyCommand(model, bits, repair, source, yes, quiet, json)
    return lambda: verify(command)


def _rm(
    models: Annotated[
        list[str] | None, argument("MODEL...", "Names from the list.", complete_library)
    ] = None,
    bits: _Bits = None,
    leftovers: Annotated[bool, flag("Also files of interrupted work, of all models.", "--leftovers")] = False,
    sources: Annotated[bool, flag("Also the kept checkpoints of the models.", "--sources")] = False,
    yes: Annotated[bool, flag("Do not ask.", "--yes", "-y")] = False,
) -> Action:
    from moechat.cli.commands.library_remove import RemoveCommand, remove_models

    command = RemoveCommand(tuple(models or ()), bits, leftovers, sources, yes)
    return lambda: remove_models(command)
