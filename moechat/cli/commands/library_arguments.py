"""The grammar of the commands for the model library: download, list, show, rm."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated

import typer

from moechat.cli.completion import (
    answering,
    complete_aliases,
    complete_bits,
    complete_library,
    complete_models,
)

Action = Callable[[], int]

_DOWNLOAD_HELP = """\
Fetch a model from the hub and convert it for the library.

Says first what it takes. Shards are converted as they come and let go, so the disk needs the store and \
one or two shards, not two copies; where it has room for another one, the next shard comes while others are \
converted. Interrupted at any point, the same command goes on. HF_HOME, HF_TOKEN, HF_ENDPOINT and \
HF_HUB_OFFLINE are honoured.

--json: status (planned, finished, already here), name, repository, revision, commit, licence, bits, files, \
weight_files, download_bytes, missing_bytes, store_bytes, disk_bytes (while it is made), free_bytes, \
ram_least_bytes, ram_all_bytes, ram_available_bytes, download_s (at 100 Mbit/s), convert_s, overlap (of \
these two), destination, finished (the model is here). Figures are from before the download; null is unknown.
"""
_DOWNLOAD_EXAMPLES = """\
moechat download mixtral --dry-run

moechat download Qwen/Qwen3-30B-A3B@main --bits 3

moechat download mixtral --dry-run --json
"""
_LIST_HELP = """\
List the models in the library.

Checkpoints that --keep-source has kept and unfinished work are told on stderr.

--json: a list of objects with name, repository, commit, model_type, bits, bytes, used (seconds since 1970, \
or null), path, damaged, kind: store, or checkpoint for a kept one.
"""
_LIST_EXAMPLES = """\
moechat list

moechat list --json | jq -r ".[].name"
"""
_SHOW_HELP = """\
Show what a model is, and where it lies.

--json: name, repository, commit, model_type, parameters, active_parameters, layers, expert_layers, experts, \
top_k, hidden_size, expert_size, vocabulary, context, bits, bytes, expert_bytes, dense_bytes, path, licence, \
created_by, used, damaged.
"""
_SHOW_EXAMPLES = """\
moechat show demo

moechat show Qwen/Qwen3-30B-A3B --bits 4 --json
"""
_RM_HELP = """\
Remove models from the library.

Asks first on a terminal. A model that a running moechat uses is not removed. --leftovers removes what \
interrupted downloads and conversions left, --sources what `download --keep-source` has kept. Of a store \
that is a link to another place only the link is removed.
"""
_RM_EXAMPLES = """\
moechat rm mixtral --bits 8

moechat rm Qwen/Qwen3-30B-A3B@main --sources

moechat rm --leftovers --yes
"""

_Bits = Annotated[
    int | None,
    typer.Option(
        metavar="BITS",
        autocompletion=answering(complete_bits),
        help="Only the store with so many bits.",
        show_default=False,
    ),
]
_Json = Annotated[bool, typer.Option("--json", metavar="", help="Print JSON.")]


def register_library(app: typer.Typer) -> None:
    """Add the commands to the grammar."""
    app.command("download", help=_DOWNLOAD_HELP, epilog=_DOWNLOAD_EXAMPLES)(_download)
    app.command("pull", help="The same as download.", hidden=True)(_download)
    app.command("list", help=_LIST_HELP, epilog=_LIST_EXAMPLES)(_list)
    app.command("ls", help="The same as list.", hidden=True)(_list)
    app.command("show", help=_SHOW_HELP, epilog=_SHOW_EXAMPLES)(_show)
    app.command("rm", help=_RM_HELP, epilog=_RM_EXAMPLES)(_rm)


def _download(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL",
            autocompletion=answering(complete_aliases),
            help="An alias ('mixtral') or org/name\\[@revision].",
            show_default=False,
        ),
    ],
    bits: Annotated[
        int,
        typer.Option(
            metavar="BITS",
            autocompletion=answering(complete_bits),
            help="Bits of an expert weight: 2, 3, 4, 8 or 16.",
        ),
    ] = 4,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", metavar="", help="Only say what it takes, on stdout.")
    ] = False,
    keep_source: Annotated[
        bool,
        typer.Option(
            "--keep-source", metavar="", help="Keep the downloaded checkpoint beside the converted model."
        ),
    ] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", metavar="", help="Only errors.")] = False,
    json: Annotated[
        bool, typer.Option("--json", metavar="", help="Print what it takes, and its result, as JSON.")
    ] = False,
) -> Action:
    from moechat.cli.download import DownloadCommand, download

    command = DownloadCommand(model, bits, dry_run, keep_source, quiet, json)
    return lambda: download(command)


def _list(json: _Json = False) -> Action:
    from moechat.cli.library import list_models

    return lambda: list_models(json=json)


def _show(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL",
            autocompletion=answering(complete_models),
            help="A name from the list, or as for run.",
            show_default=False,
        ),
    ],
    bits: _Bits = None,
    json: _Json = False,
) -> Action:
    from moechat.cli.show import show_model

    return lambda: show_model(model, bits, json=json)


def _rm(
    models: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="MODEL...",
            autocompletion=answering(complete_library),
            help="Names from the list.",
            show_default=False,
        ),
    ] = None,
    bits: _Bits = None,
    leftovers: Annotated[
        bool,
        typer.Option("--leftovers", metavar="", help="Also what interrupted work left, whatever the model."),
    ] = False,
    sources: Annotated[
        bool, typer.Option("--sources", metavar="", help="Also the checkpoints that were kept of the models.")
    ] = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", metavar="", help="Do not ask.")] = False,
) -> Action:
    from moechat.cli.library_remove import RemoveCommand, remove_models

    command = RemoveCommand(tuple(models or ()), bits, leftovers, sources, yes)
    return lambda: remove_models(command)
