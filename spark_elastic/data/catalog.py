"""Where sets lie in a store, who needs them at the moment, and what may go.

::

    <store>/spark_elastic-sets/<name>/manifest.json       the commit
                                     /keep                it stays when its process ends
                                     /used                its time of change is when the set was last asked for
                                     /leases/<id>.json    until when somebody needs it
                                     /checked/<host>.json files that had the right checksums there
                                     /damaged             a file that had not; the set is written again
                                     /<run>/*.rows, *.side
"""

from __future__ import annotations

import atexit
import json
import logging
import os
import re
import shutil
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
from spark_elastic.errors import InvalidSettingsError

DATASETS = "spark_elastic-sets"
LEASE_S = 600.0
"""How long a lease outlives a process that was killed. Renewed four times as often."""
ORPHAN_AGE_S = 86_400.0
_OURS = re.compile(
    r"(manifest\.json|keep|used|damaged|leases/.*|checked/.*|[^/]+/[^/]+\.(rows|side))$|\..*\.partial$|.*\.partial$"
)

LIMIT_SETTING, TTL_SETTING = "SPARK_ELASTIC_ROWS_LIMIT", "SPARK_ELASTIC_ROWS_TTL"
"""Environment variables of the driver: bytes of the sets that fits leave for later ones ("20g"), and the seconds since
their last use after which they go."""
TTL_S = 86_400.0
DISK_SHARE = 0.25
"""Of what a local store's disk has free, with these sets gone: the limit, unless told otherwise."""
REMOTE_LIMIT = 100 << 30

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Unkept:
    """A set that goes when this process ends. pid: that said so: a forked child has nothing to clean up.

    users: fits of this process that run on it, and calls of `materialize`, whose caller may read it until the end.
    """

    folder: Store
    pid: int
    users: int = 0
    used_s: float = 0.0
    nbytes: int | None = None
    """None: not looked at since it was written."""


_unkept: dict[str, _Unkept] = {}
"""By URL."""
_guard = threading.RLock()


def folder_of(store: Store, name: str) -> Store:
    return store.sub(f"{DATASETS}/{name}")


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


@contextmanager
def spared(folder: Store) -> Iterator[None]:
    """While the block runs no limit of this process takes the set in `folder`, if it is there."""
    with _guard:
        mine = _unkept.get(folder.url)
        if mine is not None:
            mine.users += 1
    try:
        yield
    finally:
        with _guard:
            if mine is not None:
                mine.users = max(0, mine.users - 1)


def mark_used(folder: Store, keep: bool) -> None:
    """Note that the set was asked for now; without `keep` it goes when this process ends, unless it was kept before.

    Until then whoever has asked may read it. A fit gives it back when it is over: see `give_back`.
    """
    folder.write_bytes("used", b"", durable=False)
    if keep:
        folder.write_bytes("keep", b"")
        with _guard:
            _unkept.pop(folder.url, None)
    elif not folder.exists("keep"):
        with _guard:
            mine = _unkept.get(folder.url)
            if mine is None or mine.pid != os.getpid():
                mine = _unkept[folder.url] = _Unkept(folder, os.getpid())
            mine.users += 1
            mine.used_s = wall()


@dataclass(frozen=True, slots=True)
class Limits:
    """Of the sets that fits leave for later ones. nbytes: None: as the disk has room. ttl_s: since their last use."""

    nbytes: int | None = None
    ttl_s: float = TTL_S

    @classmethod
    def of_environment(cls, environment: Mapping[str, str]) -> Limits:
        """Raises: InvalidSettingsError: not a size, or not a time."""
        return cls(_size(environment.get(LIMIT_SETTING)), _seconds(environment.get(TTL_SETTING)))

    def bytes_in(self, store: Store, used: int) -> int:
        """used: by these sets now."""
        if self.nbytes is not None:
            return self.nbytes
        if not store.is_local:
            return REMOTE_LIMIT
        return int(DISK_SHARE * (used + shutil.disk_usage(store.local_path()).free))


def _size(text: str | None) -> int | None:
    if not text:
        return None
    found = re.fullmatch(r"(\d+)([kmgt]?)b?", text.strip().lower())
    if found is None:
        raise InvalidSettingsError(f"{LIMIT_SETTING} must be bytes, such as 500m or 20g, not {text!r}")
    return int(found[1]) << 10 * ("kmgt".index(found[2]) + 1 if found[2] else 0)


def _seconds(text: str | None) -> float:
    if not text:
        return TTL_S
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds < float("inf"):
        raise InvalidSettingsError(f"{TTL_SETTING} must be seconds, from 0, not {text!r}")
    return seconds


def give_back(folder: Store, limits: Limits, now: float) -> list[str]:
    """End one use of a set that `mark_used` began, and delete those of this process that are over the limits.

    Returns: URLs of the sets that were deleted.
    """
    with _guard:
        mine = _unkept.get(folder.url)
        if mine is not None:
            mine.users = max(0, mine.users - 1)
            mine.used_s, mine.nbytes = now, None
    return collect_unkept(limits, now)


def collect_unkept(limits: Limits, now: float) -> list[str]:
    """Delete sets of this process that nobody uses: those past their time, then the least recently used until the rest
    is within the limit. Never one that is leased, or that the caller of `materialize` holds.

    Returns: URLs of the sets that were deleted.
    """
    deleted = []
    with _guard:
        mine = [each for each in _unkept.values() if each.pid == os.getpid() and not each.users]
        mine.sort(key=lambda each: each.used_s)
        for each in mine:
            if each.nbytes is None:
                each.nbytes = _bytes_of(each.folder)
        stores: dict[str, int] = {}
        for each in mine:
            stores[_place_of(each)] = stores.get(_place_of(each), 0) + (each.nbytes or 0)
        for each in mine:
            place, nbytes = _place_of(each), each.nbytes or 0
            try:
                over = stores[place] > limits.bytes_in(each.folder, stores[place])
                late = each.used_s < now - limits.ttl_s
                if not (over or late) or is_leased(each.folder, now):
                    continue
                if not each.folder.exists("keep"):
                    delete_dataset(each.folder)
                    deleted.append(each.folder.url)
            except Exception as error:  # each filesystem has errors of its own
                _log.warning("the set in %s could not be deleted: %s", each.folder.url, error)
            stores[place] -= nbytes
            _unkept.pop(each.folder.url, None)
    if deleted:
        _log.info("packed rows that no fit has used for longest are deleted: %s", ", ".join(deleted))
    return deleted


def _place_of(unkept: _Unkept) -> str:
    return unkept.folder.root.rpartition("/")[0]


def _bytes_of(folder: Store) -> int:
    try:
        return sum(entry.nbytes for entry in folder.list(recursive=True))
    except Exception:  # each filesystem has errors of its own; it counts once it can be looked at
        return 0


def may_be_lost(folder: Store) -> bool:
    """Whether the set's files may hold something else than was written, at the right sizes: nobody waited for the disk,
    and the machine may have gone down since.
    """
    return folder.is_local and folder.url not in _unkept and not folder.exists("keep")


@atexit.register
def delete_unkept() -> None:
    """Delete the sets that this process wrote or used, nobody asked to keep, and nobody else needs."""
    for url, unkept in list(_unkept.items()):
        if unkept.pid != os.getpid():
            continue
        del _unkept[url]
        folder = unkept.folder
        try:
            if not folder.exists("keep") and not is_leased(folder, wall()):
                delete_dataset(folder)
        except Exception as error:  # each filesystem has errors of its own, and at exit some are closed already
            _log.warning("the set in %s could not be deleted: %s", url, error)


def delete_dataset(folder: Store) -> None:
    """The manifest first: whoever looks meanwhile finds no set rather than half of one."""
    with _guard:
        _unkept.pop(folder.url, None)
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
    for entry in store.list(DATASETS):
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
            delete_dataset(found.folder)
            deleted.append(f"{DATASETS}/{name}")
        elif MANIFEST_NAME in paths:
            old = [entry.path for entry in found.files if entry.modified_s < now - age_s]
            orphans = {path for path in old if path.endswith((".rows", ".side"))}
            if orphans:
                orphans -= Manifest.loads(found.folder.read_bytes(MANIFEST_NAME)).files
            for path in sorted(orphans):
                found.folder.delete(path)
                deleted.append(f"{DATASETS}/{name}/{path}")
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
        delete_dataset(found.folder)
        _unkept.pop(found.folder.url, None)
        total -= found.nbytes
        deleted.append(found.folder.root.rpartition("/")[2])
    return deleted
