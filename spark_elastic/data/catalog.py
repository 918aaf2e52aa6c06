"""The datasets in a store: where they are, which are in use, and which may be deleted.

::

    <store>/spark_elastic-sets/<name>/manifest.json       written last: it commits the dataset
                                     /keep                the dataset outlives the process that wrote it
                                     /used                modified when the dataset was last requested
                                     /leases/<id>.json    a process needs the dataset until the time in it
                                     /checked/<host>.json files whose checksums were right on that host
                                     /<run>/*.rows, *.side
"""

from __future__ import annotations

import atexit
import contextlib
import json
import logging
import os
import re
import socket
import threading
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from spark_elastic.clock import wall
from spark_elastic.data.manifest import MANIFEST_NAME, Manifest
from spark_elastic.data.store import Store
from spark_elastic.redaction import redacted

DATASETS = "spark_elastic-sets"
DATASET_LEASE_S = 600.0  # how long a lease outlives a process that was killed. A lease is renewed after a quarter of it
ORPHAN_AGE_S = 86_400.0
_OURS = re.compile(
    r"(manifest\.json|keep|used|leases/.*|checked/.*|[^/]+/[^/]+\.(rows|side))$|\..*\.partial$|.*\.partial$"
)

_log = logging.getLogger(__name__)

#: Address → the folder of a dataset that is deleted when this process ends, and the pid: a fork deletes nothing.
_temporary: dict[str, tuple[Store, int]] = {}


def dataset_folder(store: Store, name: str) -> Store:
    return store.sub(f"{DATASETS}/{name}")


@contextmanager
def leased(folder: Store) -> Iterator[None]:
    """Protect the dataset in `folder` from the clean-up of other processes while the block runs."""
    name = f"leases/{uuid.uuid4().hex}.json"
    stop = threading.Event()

    def renew() -> None:
        text = {"until": wall() + DATASET_LEASE_S, "host": socket.gethostname(), "pid": os.getpid()}
        folder.write_bytes(name, json.dumps(text).encode(), durable=False)

    def keep_renewing() -> None:
        while not stop.wait(DATASET_LEASE_S / 4):
            try:
                renew()
            except Exception as error:  # the lease is still valid for three more tries
                _log.warning("the lease on %s could not be renewed: %s", folder.url, redacted(error))

    renew()
    thread = threading.Thread(target=keep_renewing, name="spark_elastic lease", daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()
        folder.delete(name)


def is_leased(folder: Store) -> bool:
    """Return whether a process needs the folder, by the store's own clock: that of this host may be ahead."""
    leases = folder.list("leases")
    now = (folder.now() or wall()) if leases else 0.0
    for entry in leases:
        until = entry.modified_s + DATASET_LEASE_S
        try:
            with contextlib.suppress(ValueError, KeyError, TypeError):
                until = max(until, float(json.loads(folder.read_bytes(entry.path))["until"]))
        except FileNotFoundError:
            continue
        if until > now:
            return True
    return False


def mark_used(folder: Store, keep: bool) -> None:
    """Record that the dataset was requested now; without `keep` it is temporary, unless it was kept before."""
    folder.write_bytes("used", b"", durable=False)
    if keep:
        folder.write_bytes("keep", b"")
        _temporary.pop(folder.address, None)
    elif not folder.exists("keep"):
        _temporary[folder.address] = (folder, os.getpid())


def may_be_lost(folder: Store) -> bool:
    """Return whether a crash may have changed files that another process wrote and did not sync to the disk."""
    return folder.is_local and folder.address not in _temporary and not folder.exists("keep")


@atexit.register
def delete_temporary() -> None:
    """Delete the temporary datasets that this process wrote or used, except those that another process leases."""
    for folder, pid in list(_temporary.values()):
        if pid == os.getpid():
            delete_unless_used(folder)


def delete_unless_used(folder: Store) -> None:
    """Delete a dataset unless it is kept or leased. Errors are logged: a trained model must not be lost for them."""
    try:
        if not folder.exists("keep") and not is_leased(folder):
            delete_dataset(folder)
    except Exception as error:  # each filesystem has its own exceptions, and at exit some are closed already
        _log.warning("the dataset in %s could not be deleted: %s", folder.url, redacted(error))


def delete_dataset(folder: Store) -> None:
    """Delete a dataset, the manifest first: a process that opens it meanwhile finds none rather than half of one."""
    _temporary.pop(folder.address, None)
    folder.delete(MANIFEST_NAME)
    folder.delete()


class _Listed:
    """A dataset and its files, whose paths are relative to the folder."""

    def __init__(self, folder: Store) -> None:
        self.folder = folder
        self.name = folder.root.rpartition("/")[2]
        self.files = [entry for entry in folder.list(recursive=True) if not entry.is_dir]
        self.nbytes = sum(entry.nbytes for entry in self.files)
        self.used_s = max((entry.modified_s for entry in self.files), default=0.0)  # last used or written to
        self.only_ours = all(_OURS.match(entry.path) for entry in self.files)


def _datasets(store: Store) -> list[_Listed]:
    return [_Listed(store.sub(entry.path)) for entry in store.list(DATASETS) if entry.is_dir]


def collect_orphans(store: Store) -> list[str]:
    """Delete what interrupted writes, repeated tasks and killed processes left behind.

    Datasets that are leased or kept stay, and so do files of the last day and files with other names than ours.
    Return the deleted paths, relative to the store.
    """
    deleted: list[str] = []
    datasets = _datasets(store)
    now = store.now() if datasets else 0.0
    for found in datasets:
        if is_leased(found.folder):
            continue
        paths = {entry.path for entry in found.files}
        unused = MANIFEST_NAME not in paths or "keep" not in paths
        if unused and found.used_s < now - ORPHAN_AGE_S and found.only_ours:
            delete_dataset(found.folder)
            deleted.append(f"{DATASETS}/{found.name}")
        elif MANIFEST_NAME in paths:
            old = {entry.path for entry in found.files if entry.modified_s < now - ORPHAN_AGE_S}
            orphans = {path for path in old if path.endswith((".rows", ".side"))}
            if orphans:
                orphans -= Manifest.loads(found.folder.read_bytes(MANIFEST_NAME)).files.keys()
            for path in sorted(orphans):
                found.folder.delete(path)
                deleted.append(f"{DATASETS}/{found.name}/{path}")
    return deleted


def clear_cache(
    store: str | Path | Store | None = None,
    *,
    older_than_s: float = 0.0,
    max_bytes: int | None = None,
    storage_options: Mapping[str, Any] | None = None,
) -> list[str]:
    """Delete materialised datasets, kept ones too, except those that a running fit needs.

    Args:
        store: The store that `materialize` was given. None: this user's temporary folder.
        older_than_s: Delete only datasets that were last used longer ago than this, by the store's clock; none, if the
            store does not say when a file was written.
        max_bytes: Delete the least recently used until the rest is not larger than this. None: delete all.
        storage_options: Options of fsspec's filesystem, as of `Store.create`.

    Returns:
        The names of the datasets that were deleted.
    """
    place = Store.create(store, storage_options)
    datasets = sorted(_datasets(place), key=lambda found: found.used_s)
    total = sum(found.nbytes for found in datasets)
    deleted: list[str] = []
    now = place.now() if older_than_s > 0 else 0.0
    for found in datasets:
        if max_bytes is not None and total <= max_bytes:
            break
        recent = older_than_s > 0 and found.used_s > now - older_than_s
        if recent or not found.only_ours or is_leased(found.folder):
            continue
        delete_dataset(found.folder)
        total -= found.nbytes
        deleted.append(found.name)
    return deleted
