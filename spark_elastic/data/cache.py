"""Where sets lie in a store, who needs them at the moment, and what may go.

::

    <store>/spark_elastic-sets/<name>/manifest.json       the commit
                                     /keep                it stays when its process ends
                                     /used                its time of change is when the set was last asked for
                                     /leases/<id>.json    until when somebody needs it
                                     /<run>/*.rows, *.side
"""

from __future__ import annotations

import atexit
import json
import logging
import os
import re
import socket
import threading
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from spark_elastic.clock import wall
from spark_elastic.data.manifest import MANIFEST_NAME, Manifest
from spark_elastic.data.store import FileEntry, Store

SETS = "spark_elastic-sets"
LEASE_S = 600.0
"""How long a lease outlives a process that was killed. Renewed four times as often."""
ORPHAN_AGE_S = 86_400.0
_OURS = re.compile(r"(manifest\.json|keep|used|leases/.*|[^/]+/[^/]+\.(rows|side))$|\..*\.partial$|.*\.partial$")

_log = logging.getLogger(__name__)
_unkept: dict[str, tuple[Store, int]] = {}
"""URL → set that goes when this process ends, and the pid that said so: a forked child has nothing to clean up."""


def folder_of(store: Store, name: str) -> Store:
    return store.sub(f"{SETS}/{name}")


@contextmanager
def leased(folder: Store) -> Iterator[None]:
    """While the block runs nobody else's clean-up takes the set in `folder`."""
    name = f"leases/{uuid.uuid4().hex}.json"
    stop = threading.Event()

    def renew() -> None:
        text = {"until": wall() + LEASE_S, "host": socket.gethostname(), "pid": os.getpid()}
        folder.write_bytes(name, json.dumps(text).encode(), durable=False)

    def keep_renewing() -> None:
        while not stop.wait(LEASE_S / 4):
            try:
                renew()
            except Exception as error:  # tried again in a moment; the one before lasts three more turns
                _log.warning("the lease on %s could not be renewed: %s", folder.url, error)

    renew()
    thread = threading.Thread(target=keep_renewing, name="spark_elastic lease", daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()
        folder.delete(name)


def is_leased(folder: Store, now: float) -> bool:
    for entry in folder.list("leases"):
        try:
            until = float(json.loads(folder.read_bytes(entry.path))["until"])
        except FileNotFoundError:
            continue
        except (ValueError, KeyError, TypeError):
            until = entry.modified_s + LEASE_S
        if until > now:
            return True
    return False


def mark_used(folder: Store, keep: bool) -> None:
    """Note that the set was asked for now; without `keep` it goes when this process ends, unless it was kept before."""
    folder.write_bytes("used", b"", durable=False)
    if keep:
        folder.write_bytes("keep", b"")
        _unkept.pop(folder.url, None)
    elif not folder.exists("keep"):
        _unkept[folder.url] = (folder, os.getpid())


def may_be_lost(folder: Store) -> bool:
    """Whether the set's files may hold something else than was written, at the right sizes: nobody waited for the disk,
    and the machine may have gone down since.
    """
    return folder.is_local and folder.url not in _unkept and not folder.exists("keep")


@atexit.register
def delete_unkept() -> None:
    """Delete the sets that this process wrote or used, nobody asked to keep, and nobody else needs."""
    for url, (folder, pid) in list(_unkept.items()):
        if pid != os.getpid():
            continue
        del _unkept[url]
        try:
            if not folder.exists("keep") and not is_leased(folder, wall()):
                delete_set(folder)
        except Exception as error:  # each filesystem has errors of its own, and at exit some are closed already
            _log.warning("the set in %s could not be deleted: %s", url, error)


def delete_set(folder: Store) -> None:
    """The manifest first: whoever looks meanwhile finds no set rather than half of one."""
    folder.delete(MANIFEST_NAME)
    folder.delete()


@dataclass(frozen=True, slots=True)
class _Found:
    folder: Store
    files: list[FileEntry]
    """Paths relative to the folder."""

    @property
    def used_s(self) -> float:
        """When it was last used, or written to."""
        return max((entry.modified_s for entry in self.files), default=0.0)

    @property
    def nbytes(self) -> int:
        return sum(entry.nbytes for entry in self.files)

    @property
    def only_ours(self) -> bool:
        return all(_OURS.match(entry.path) for entry in self.files)


def _sets(store: Store) -> list[_Found]:
    found = []
    for entry in store.list(SETS):
        if entry.is_dir:
            folder = store.sub(entry.path)
            found.append(_Found(folder, [file for file in folder.list(recursive=True) if not file.is_dir]))
    return found


def collect_orphans(store: Store, now: float, age_s: float = ORPHAN_AGE_S) -> list[str]:
    """Delete what writes that did not end, repeated tasks, and processes that died left behind.

    Never what is leased, younger than `age_s`, kept, or not named as our files are.

    Returns: what was deleted, as paths below the store.
    """
    deleted = []
    for found in _sets(store):
        name = found.folder.root.rpartition("/")[2]
        if is_leased(found.folder, now):
            continue
        paths = {entry.path for entry in found.files}
        unused = MANIFEST_NAME not in paths or "keep" not in paths
        if unused and found.used_s < now - age_s and found.only_ours:
            delete_set(found.folder)
            deleted.append(f"{SETS}/{name}")
        elif MANIFEST_NAME in paths:
            old = [entry.path for entry in found.files if entry.modified_s < now - age_s]
            orphans = {path for path in old if path.endswith((".rows", ".side"))}
            if orphans:
                orphans -= Manifest.loads(found.folder.read_bytes(MANIFEST_NAME)).files
            for path in sorted(orphans):
                found.folder.delete(path)
                deleted.append(f"{SETS}/{name}/{path}")
    return deleted


def clear_cache(
    store: str | Path | Store | None = None,
    *,
    older_than_s: float = 0.0,
    max_bytes: int | None = None,
    storage_options: Mapping[str, Any] | None = None,
) -> list[str]:
    """Delete materialised sets, kept ones too. Those that a running fit needs stay.

    Args:
        store: the one that `materialize` was given; None: this user's temporary folder.
        older_than_s: only sets that were last used longer ago.
        max_bytes: only as many as it takes to come below this, the least recently used first; None: all.

    Returns: the names of the sets that were deleted.
    """
    place, now = Store.create(store, storage_options), wall()
    sets = sorted(_sets(place), key=lambda found: found.used_s)
    total = sum(found.nbytes for found in sets)
    deleted = []
    for found in sets:
        if max_bytes is not None and total <= max_bytes:
            break
        if found.used_s > now - older_than_s or not found.only_ours or is_leased(found.folder, now):
            continue
        delete_set(found.folder)
        _unkept.pop(found.folder.url, None)
        total -= found.nbytes
        deleted.append(found.folder.root.rpartition("/")[2])
    return deleted
