"""Compare the files of a local set with the checksums in its manifest: beside the reading, once for each host and set.

The processes of a host that read the same set take turns at one lock: the first compares, and notes each file that is
as it was written; the others find the notes. Whoever dies meanwhile lets the next go on where it was.
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

from spark_elastic.data.dataset import Dataset
from spark_elastic.errors import DatasetError, InvalidSettingsError

SETTING = "SPARK_ELASTIC_CHECK_ROWS"
"""Environment variable: "off" leaves the files of local sets unread but for the rows that are needed."""
CHECKED = "checked"
"""In the folder of a set: the folder with the notes of each host."""
DAMAGED = "damaged"
"""In the folder of a set: one of its files is not what was written. An automatic set is then written again."""
_PART = 1 << 20
_TURN_S = 0.2
_DONTNEED = getattr(os, "POSIX_FADV_DONTNEED", None)

_log = logging.getLogger(__name__)


def wanted() -> bool:
    """Return whether files of local sets are to be compared. Raises: InvalidSettingsError."""
    value = os.environ.get(SETTING, "on")
    if value not in ("on", "off"):
        raise InvalidSettingsError(f"{SETTING} must be 'on' or 'off', not {value!r}")
    return value == "on"


class LocalCheck:
    """A comparison that runs on a thread, from when this is made until `close`.

    files: (path relative to the set, its checksum by the manifest). drop_behind: what was read leaves the page cache:
    the set does not fit the memory.
    """

    def __init__(self, dataset: Dataset, files: list[tuple[str, int]], drop_behind: bool) -> None:
        self._dataset = dataset
        self._files = files
        self._drop_behind = drop_behind
        self._stop = threading.Event()
        self._done: Future[None] = Future()
        self._buffer = memoryview(bytearray(_PART))
        self._thread = threading.Thread(target=self._run, name="spark_elastic-check", daemon=True)
        self._thread.start()

    def result(self, timeout_s: float | None) -> bool:
        """Wait for the end of the comparison.

        timeout_s: 0: only look; None: as long as it takes.
        Returns: whether it has come to its end.
        Raises: DatasetError: a file is not what was written.
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
        except BaseException as error:  # for those who wait
            self._done.set_exception(error)
        else:
            self._done.set_result(None)

    def _compare_all(self) -> None:
        with contextlib.ExitStack() as open_files:
            notes = self._own_notes(open_files)
            if self._stop.is_set():
                return
            known = {} if notes is None else _read(notes)
            for file, crc32 in self._files:
                path = self._dataset.store.local_path(file)
                about = _about(path, crc32)
                if known.get(file) == about:
                    continue
                if not self._compare(path, file, crc32):
                    return
                known[file] = about
                if notes is not None:
                    _write(notes, known)

    def _own_notes(self, open_files: contextlib.ExitStack) -> Path | None:
        """The file with the notes of this host, locked until `open_files` close; None: the set cannot be written to."""
        folder = self._dataset.store.local_path(CHECKED)
        host = re.sub(r"[^\w.-]", "_", socket.gethostname())
        try:
            with contextlib.suppress(FileExistsError):
                folder.mkdir()  # not those above it: the set may be deleted in this moment
            lock = os.open(folder / f"{host}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
            open_files.callback(os.close, lock)
            while not self._stop.is_set():
                try:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    self._stop.wait(_TURN_S)
        except OSError as error:
            _log.info("each process compares the checksums of %s for itself: %s", self._dataset.store.url, error)
            return None
        return folder / f"{host}.json"

    def _compare(self, path: Path, file: str, expected: int) -> bool:
        """Returns: False: it was closed before the end of the file. Raises: DatasetError."""
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
            url = self._dataset.store.url
            with contextlib.suppress(OSError):  # a set that cannot be written to stays as it is
                self._dataset.store.local_path(DAMAGED).write_text(file)
            raise DatasetError(
                f"{url}/{file} has the checksum {found:08x}, the manifest says {expected:08x}; the set is damaged, "
                "delete it and write it again",
                url=url,
                file=file,
            )
        return True


def _about(path: Path, crc32: int) -> list[int]:
    """What changes when somebody writes to the file. Raises: DatasetError: it cannot be read."""
    try:
        status = path.stat()
    except OSError as error:
        raise DatasetError(f"shard {path} cannot be read: {error}", file=str(path)) from error
    return [status.st_size, status.st_mtime_ns, status.st_ino, crc32]


def _read(notes: Path) -> dict[str, list[int]]:
    try:
        found = json.loads(notes.read_bytes())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _write(notes: Path, known: dict[str, list[int]]) -> None:
    """As a whole, since it may be read by whoever comes next after a kill. Under the lock."""
    with contextlib.suppress(OSError):  # the next one compares again
        written = notes.with_suffix(".partial")
        written.write_text(json.dumps(known))
        os.replace(written, notes)
