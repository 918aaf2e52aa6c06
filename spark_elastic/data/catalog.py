"""The datasets in a store: where they are, which are in use, and which may be deleted.

::

    <store>/spark_elastic-sets/<name>/manifest.json       written last: it commits the dataset
                                     /keep                the dataset outlives the process that wrote it
                                     /used                modified when the dataset was last requested
                                     /leases/<id>.json    a process needs the dataset until the time in it
                                     /checked/<host>.json files whose checksums were right on that host
                                     /damaged             the name of a damaged file; the dataset is written again
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
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from spark_elastic.clock import wall
from spark_elastic.data.manifest import MANIFEST_NAME, Manifest
from spark_elastic.data.store import FileEntry, Store
from spark_elastic.errors import InvalidSettingsError
from spark_elastic.redaction import redacted

DATASETS = "spark_elastic-sets"
LEASE_S = 600.0  # how long a lease outlives a process that was killed. A lease is renewed after a quarter of it
ORPHAN_AGE_S = 86_400.0
_OURS = re.compile(
    r"(manifest\.json|keep|used|damaged|leases/.*|checked/.*|[^/]+/[^/]+\.(rows|side))$|\..*\.partial$|.*\.partial$"
)

LIMIT_SETTING, TTL_SETTING = "SPARK_ELASTIC_ROWS_LIMIT", "SPARK_ELASTIC_ROWS_TTL"
"""Environment variables of the driver: the most bytes of temporary datasets that are kept for later fits ("20g"), and
the seconds since their last use after which they are deleted."""
TTL_S = 86_400.0
DISK_SHARE = 0.25
"""The default limit: this part of what a local store's disk would have free without temporary datasets."""
REMOTE_LIMIT = 100 << 30

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Temporary:
    """A dataset that is deleted when this process ends."""

    folder: Store
    pid: int  # the process that uses it: a forked child must not delete it
    # Fits of this process that read it, and calls of `materialize`, whose callers may read it until the end.
    users: int = 0
    used_s: float = 0.0  # when it was last used
    nbytes: int | None = None  # its size. None: unknown since it was written

    @property
    def parent(self) -> str:
        return self.folder.root.rpartition("/")[0]


_temporary: dict[str, _Temporary] = {}  # by URL
_guard = threading.RLock()


def folder_of(store: Store, name: str) -> Store:
    return store.sub(f"{DATASETS}/{name}")


@contextmanager
def leased(folder: Store) -> Iterator[None]:
    """Protect the dataset in `folder` from the clean-up of other processes while the block runs."""
    name = f"leases/{uuid.uuid4().hex}.json"
    stop = threading.Event()

    def renew() -> None:
        text = {"until": wall() + LEASE_S, "host": socket.gethostname(), "pid": os.getpid()}
        folder.write_bytes(name, json.dumps(text).encode(), durable=False)

    def keep_renewing() -> None:
        while not stop.wait(LEASE_S / 4):
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
def protected(folder: Store) -> Iterator[None]:
    """Protect the dataset in `folder`, if there is one, from the limits of this process while the block runs."""
    with _guard:
        mine = _temporary.get(folder.url, _Temporary(folder, os.getpid()))
        mine.users += 1
    try:
        yield
    finally:
        with _guard:
            mine.users = max(0, mine.users - 1)


def mark_used(folder: Store, keep: bool) -> None:
    """Record that the dataset was requested now; without `keep` it is temporary, unless it was kept before.

    The caller may read it until the process ends, or until `give_back`, which a fit calls at its end.
    """
    folder.write_bytes("used", b"", durable=False)
    if keep:
        folder.write_bytes("keep", b"")
        with _guard:
            _temporary.pop(folder.url, None)
    elif not folder.exists("keep"):
        with _guard:
            mine = _temporary.get(folder.url)
            if mine is None or mine.pid != os.getpid():
                mine = _temporary[folder.url] = _Temporary(folder, os.getpid())
            mine.users += 1
            mine.used_s = wall()


@dataclass(frozen=True, slots=True)
class Limits:
    """The limits of the temporary datasets that fits leave for later fits."""

    nbytes: int | None = None  # bytes of all of them. None: a share of what is free on the disk
    ttl_s: float = TTL_S  # seconds since the last use

    @classmethod
    def of_environment(cls, environment: Mapping[str, str]) -> Limits:
        """Return the limits that the environment variables set. Raise InvalidSettingsError for an invalid value."""
        return cls(_size(environment.get(LIMIT_SETTING)), _seconds(environment.get(TTL_SETTING)))

    def bytes_in(self, store: Store, used: int) -> int:
        """Return the bytes allowed in a store in which temporary datasets use `used` bytes now."""
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
        raise InvalidSettingsError(f"{LIMIT_SETTING} must be a size in bytes, such as 500m or 20g, not {text!r}")
    return int(found[1]) << 10 * ("kmgt".index(found[2]) + 1 if found[2] else 0)


def _seconds(text: str | None) -> float:
    if not text:
        return TTL_S
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds < float("inf"):
        raise InvalidSettingsError(f"{TTL_SETTING} must be a number of seconds, at least 0, not {text!r}")
    return seconds


def give_back(folder: Store, limits: Limits, now: float) -> list[str]:
    """End one use of a dataset that `mark_used` began, and apply the limits. Return the URLs of deleted datasets."""
    with _guard:
        mine = _temporary.get(folder.url)
        if mine is not None:
            mine.users = max(0, mine.users - 1)
            mine.used_s, mine.nbytes = now, None
    return collect_temporary(limits, now)


def collect_temporary(limits: Limits, now: float) -> list[str]:
    """Delete this process's unused temporary datasets that exceed the limits, the least recently used first.

    Datasets that are leased, or that a caller of `materialize` may read, stay. Return the URLs of deleted datasets.
    """
    deleted = []
    with _guard:
        mine = [each for each in _temporary.values() if each.pid == os.getpid() and not each.users]
        mine.sort(key=lambda each: each.used_s)
        stores: Counter[str] = Counter()
        for each in mine:
            if each.nbytes is None:
                each.nbytes = _bytes_of(each.folder)
            stores[each.parent] += each.nbytes
        for each in mine:
            parent, nbytes = each.parent, each.nbytes or 0
            try:
                over = stores[parent] > limits.bytes_in(each.folder, stores[parent])
                late = each.used_s < now - limits.ttl_s
                if not (over or late) or is_leased(each.folder, now):
                    continue
                if not each.folder.exists("keep"):
                    delete_dataset(each.folder)
                    deleted.append(each.folder.url)
            except Exception as error:  # each filesystem has its own exceptions
                _log.warning("the dataset in %s could not be deleted: %s", each.folder.url, redacted(error))
            stores[parent] -= nbytes
            _temporary.pop(each.folder.url, None)
    if deleted:
        _log.info("the least recently used packed rows are deleted: %s", ", ".join(deleted))
    return deleted


def _bytes_of(folder: Store) -> int:
    with suppress(Exception):  # each filesystem has its own exceptions; the dataset counts once it can be listed
        return sum(entry.nbytes for entry in folder.list(recursive=True))
    return 0


def may_be_lost(folder: Store) -> bool:
    """Return whether the files may have other contents than were written, although their sizes are right.

    Temporary datasets are not synced to the disk, and the machine may have crashed since another process wrote it.
    """
    return folder.is_local and folder.url not in _temporary and not folder.exists("keep")


@atexit.register
def delete_temporary() -> None:
    """Delete the temporary datasets that this process wrote or used, except those that another process leases."""
    for url, temporary in list(_temporary.items()):
        if temporary.pid != os.getpid():
            continue
        del _temporary[url]
        folder = temporary.folder
        try:
            if not folder.exists("keep") and not is_leased(folder, wall()):
                delete_dataset(folder)
        except Exception as error:  # each filesystem has its own exceptions, and at exit some are closed already
            _log.warning("the dataset in %s could not be deleted: %s", url, redacted(error))


def delete_dataset(folder: Store) -> None:
    """Delete a dataset, the manifest first: a process that opens it meanwhile finds none rather than half of one."""
    with _guard:
        _temporary.pop(folder.url, None)
    folder.delete(MANIFEST_NAME)
    folder.delete()


@dataclass(frozen=True, slots=True)
class _Listed:
    folder: Store
    files: list[FileEntry]  # paths relative to the folder

    @property
    def used_s(self) -> float:
        """When it was last used or written to."""
        return max((entry.modified_s for entry in self.files), default=0.0)

    @property
    def nbytes(self) -> int:
        return sum(entry.nbytes for entry in self.files)

    @property
    def only_ours(self) -> bool:
        return all(_OURS.match(entry.path) for entry in self.files)


def _datasets(store: Store) -> list[_Listed]:
    folders = [store.sub(entry.path) for entry in store.list(DATASETS) if entry.is_dir]
    return [_Listed(each, [file for file in each.list(recursive=True) if not file.is_dir]) for each in folders]


def collect_orphans(store: Store, now: float, age_s: float = ORPHAN_AGE_S) -> list[str]:
    """Delete what interrupted writes, repeated tasks and killed processes left behind.

    Datasets that are leased or kept stay, and so do files younger than `age_s` and files with other names than ours.
    Return the deleted paths, relative to the store.
    """
    deleted = []
    for found in _datasets(store):
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
                orphans -= Manifest.loads(found.folder.read_bytes(MANIFEST_NAME)).files.keys()
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
    """Delete materialised datasets, kept ones too, except those that a running fit needs.

    Args:
        store: The store that `materialize` was given. None: this user's temporary folder.
        older_than_s: Delete only datasets that were last used longer ago than this.
        max_bytes: Delete the least recently used until the rest is not larger than this. None: delete all.
        storage_options: Options of fsspec's filesystem, as of `Store.create`.

    Returns:
        The names of the datasets that were deleted.
    """
    place, now = Store.create(store, storage_options), wall()
    datasets = sorted(_datasets(place), key=lambda found: found.used_s)
    total = sum(found.nbytes for found in datasets)
    deleted = []
    for found in datasets:
        if max_bytes is not None and total <= max_bytes:
            break
        if found.used_s > now - older_than_s or not found.only_ours or is_leased(found.folder, now):
            continue
        delete_dataset(found.folder)
        total -= found.nbytes
        deleted.append(found.folder.root.rpartition("/")[2])
    return deleted
