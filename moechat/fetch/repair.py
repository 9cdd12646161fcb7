"""Makes damaged files of a store again: from a checkpoint on this machine, else from the hub."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import replace
from pathlib import Path

from moechat.config import Paths
from moechat.errors import ModelNotFoundError, MoechatError
from moechat.fetch.download import Notice, prepare_download
from moechat.fetch.download_plan import DownloadPlan
from moechat.fetch.repository import fetch_repository
from moechat.hub.leftovers import find_sources
from moechat.hub.library import read_entry
from moechat.hub.model_ref import parse_hub_name
from moechat.loading.model import Report
from moechat.loading.stores import repair_store
from moechat.store.manifest import MANIFEST_NAME, Manifest
from moechat.store.store import Store


def repair(
    store: Path,
    damaged: Collection[str],
    *,
    source: Path | None,
    paths: Paths,
    agree: Callable[[DownloadPlan], bool],
    report: Report,
    notice: Notice,
) -> Store | None:
    """Make damaged files again and put them in their place, all at once.

    The sources in their order: the given one; a checkpoint that ``--keep-source`` kept; the hub, at the
    commit that the store was made from, where shards in the cache of huggingface_hub are read in place.

    Args:
        store: The store's directory, without links; its manifest is whole.
        damaged: Names of the files.
        source: A checkpoint: a directory or a GGUF file.
        paths: The user's directories.
        agree: Asked before a download.
        report: Receives progress.
        notice: Receives messages.

    Returns:
        The repaired store; ``None`` if the user did not agree to a download.

    Raises:
        ModelNotFoundError: No source is known.
        MoechatError: See :mod:`moechat.errors`. The store is as it was.
    """
    if source is not None:
        return repair_store(store, damaged, source, report)
    manifest = Manifest.read(store / MANIFEST_NAME)
    commit = manifest.source.revision
    if commit is None:
        raise ModelNotFoundError(
            f"nothing on this machine says where the checkpoint of {manifest.source.name} is",
            hint="name its directory or GGUF file: moechat verify MODEL --repair --from PATH",
        )
    for kept in find_sources(manifest.source.name, [read_entry(store, paths)], paths):
        try:
            return repair_store(store, damaged, kept.path, report)
        except MoechatError as error:
            notice(f"the kept checkpoint {kept.path} cannot be used: {error}")
    ref = parse_hub_name(manifest.source.name)
    remote = fetch_repository(str(ref.repository), commit, notice)
    with prepare_download(
        ref, remote, manifest.geometry.wanted, paths, keep_source=False, notice=notice
    ) as download:
        if download.plan.destination.resolve() != store:
            raise ModelNotFoundError(
                f"{store} is not the place of {ref.name} in the library",
                hint="name its checkpoint: moechat verify MODEL --repair --from PATH",
            )
        if not agree(download.plan):
            return None
        download.plan = replace(download.plan, destination=store)
        return download.run(report, notice, repair=damaged)
