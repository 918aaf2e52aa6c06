"""Compare the files of a local dataset with the manifest's checksums: during reading, once per host and dataset.

The processes of a host that read the same dataset share one lock. The first one compares, and records each file that is
intact; the others find the records. If a process dies, the next one continues after the last recorded file.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import os
import re
import socket
import threading
import zlib
from concurrent.futures import Future
from pathlib import Path

from spark_elastic.data.manifest import checksum_error
from spark_elastic.data.store import Store
from spark_elastic.errors import DatasetError, InvalidSettingsError

SETTING = "SPARK_ELASTIC_CHECK_ROWS"
"""Environment variable: with "off", files of local datasets are not compared with their checksums."""
CHECKED = "checked"
"""The subfolder of a dataset with the records of each host."""
DAMAGED = "damaged"
"""A file in a dataset's folder that marks the dataset as damaged; an automatic dataset is then written again."""
_PART = 1 << 20
_LOCK_POLL_S = 0.2
_DONTNEED = getattr(os, "POSIX_FADV_DONTNEED", None)

_log = logging.getLogger(__name__)


def is_enabled() -> bool:
    """Return whether files of local datasets are compared, by the environment variable."""
    value = os.environ.get(SETTING, "on")
    if value not in ("on", "off"):
        raise InvalidSettingsError(f"{SETTING} must be 'on' or 'off', not {value!r}")
    return value == "on"


class LocalCheck:
    """A comparison of files and their checksums on a thread, which ends with the last file or with `close`.

    With drop_behind, files leave the page cache after the comparison, because the dataset exceeds the memory.
    """

    def __init__(self, store: Store, files: list[tuple[str, int]], drop_behind: bool) -> None:
        self._store = store
        self._files = files
        self._drop_behind = drop_behind
        self._stop = threading.Event()
        self._done: Future[None] = Future()
        self._buffer = memoryview(bytearray(_PART))
        self._thread = threading.Thread(target=self._run, name="spark_elastic-check", daemon=True)
        self._thread.start()

    def result(self, timeout_s: float | None) -> bool:
        """Wait for the end of the comparison, and return whether it was reached.

        Args:
            timeout_s: The longest wait; 0: do not wait. None: as long as it takes.

        Raises:
            DatasetError: A file differs from what was written.
        """
        try:
            self._done.result(timeout_s)
        except TimeoutError:
            return False
        return True

    def close(self) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        try:
            self._compare_all()
        except BaseException as error:  # raised again by `result`
            self._done.set_exception(error)
        else:
            self._done.set_result(None)

    def _compare_all(self) -> None:
        with contextlib.ExitStack() as open_files:
            records = self._locked_records(open_files)
            if self._stop.is_set():
                return
            known = {} if records is None else _read(records)
            for file, crc32 in self._files:
                path = self._store.local_path(file)
                version = _file_version(path, crc32)
                if known.get(file) == version:
                    continue
                if not self._compare(path, file, crc32):
                    return
                known[file] = version
                if records is not None:
                    _write(records, known)

    def _locked_records(self, open_files: contextlib.ExitStack) -> Path | None:
        """Return this host's file of records, locked until `open_files` close; None: the dataset is read-only."""
        folder = self._store.local_path(CHECKED)
        host = re.sub(r"[^\w.-]", "_", socket.gethostname())
        try:
            with contextlib.suppress(FileExistsError):
                folder.mkdir()  # without its parents: the dataset may be deleted at this moment
            lock = os.open(folder / f"{host}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
            open_files.callback(os.close, lock)
            while not self._stop.is_set():
                try:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    self._stop.wait(_LOCK_POLL_S)
        except OSError as error:
            _log.info("each process compares the checksums of %s for itself: %s", self._store.url, error)
            return None
        return folder / f"{host}.json"

    def _compare(self, path: Path, file: str, expected: int) -> bool:
        """Compare one file; return False if `close` was called before its end."""
        found = 0
        try:
            with path.open("rb", buffering=0) as stream:
                while count := stream.readinto(self._buffer):
                    if self._stop.is_set():
                        return False
                    found = zlib.crc32(self._buffer[:count], found)
                if self._drop_behind and _DONTNEED is not None:
                    os.posix_fadvise(stream.fileno(), 0, 0, _DONTNEED)
        except OSError as error:
            raise DatasetError(f"shard {path} cannot be read: {error}", file=str(path)) from error
        if found != expected:
            with contextlib.suppress(OSError):  # a read-only dataset stays as it is
                self._store.local_path(DAMAGED).write_text(file)
            raise checksum_error(self._store.url, file, found, expected)
        return True


def _file_version(path: Path, crc32: int) -> list[int]:
    """Return values of which at least one changes if the file is written to."""
    try:
        status = path.stat()
    except OSError as error:
        raise DatasetError(f"shard {path} cannot be read: {error}", file=str(path)) from error
    return [status.st_size, status.st_mtime_ns, status.st_ino, crc32]


def _read(records: Path) -> dict[str, list[int]]:
    try:
        found = json.loads(records.read_bytes())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _write(records: Path, known: dict[str, list[int]]) -> None:
    """Replace the records as a whole, so that a kill leaves either the old or the new ones. Needs the lock."""
    with contextlib.suppress(OSError):  # the next process compares again
        written = records.with_suffix(".partial")
        written.write_text(json.dumps(known))
        os.replace(written, records)
