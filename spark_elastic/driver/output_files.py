"""What workers print, in files of a store: `rank.0/stdout`, `rank.0/stderr`, ..."""

from __future__ import annotations

import logging
import threading
from pathlib import Path

from spark_elastic.data.store import Store

log = logging.getLogger(__name__)

FLUSH_S = 2.0
MAX_WAITING_BYTES = 16 * 2**20
"""Of lines that are not written yet: beyond this the newest are dropped, and that is said in the file."""
CLOSE_S = 10.0

File = tuple[str, str]
"""Who, and the stream."""


class OutputFiles:
    """Appends on a thread of its own, so that a slow store delays nobody.

    Object storage cannot append: there each flush makes a file of its own, `rank.0/stdout.00001`, ....
    """

    def __init__(self, folder: str | Path | Store) -> None:
        self._store = Store.create(folder)
        self._lock = threading.Lock()
        self._waiting: dict[File, list[str]] = {}
        self._bytes = 0
        self._dropped = 0
        self._parts: dict[File, int] = {}
        self._failed = False
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="spark_elastic-output-files", daemon=True)
        self._thread.start()

    def take(self, who: str, stream: str, text: str) -> None:
        """A line. who: a rank, or "slot 3" of a process that has none yet. Never blocks."""
        with self._lock:
            if self._bytes > MAX_WAITING_BYTES:
                self._dropped += 1
                return
            self._bytes += len(text)
            self._waiting.setdefault((who, stream), []).append(text)

    def close(self) -> None:
        self._over.set()
        self._thread.join(CLOSE_S)

    def _run(self) -> None:
        while not self._over.wait(FLUSH_S):
            self._flush()
        self._flush()

    def _flush(self) -> None:
        with self._lock:
            waiting, self._waiting, self._bytes = self._waiting, {}, 0
            dropped, self._dropped = self._dropped, 0
        if dropped and waiting:
            next(iter(waiting.values())).append(f"spark_elastic: {dropped} lines were dropped, the store is too slow")
        for file, lines in waiting.items():
            try:
                self._write(file, "".join(f"{line}\n" for line in lines))
            except Exception as error:  # each kind of storage has errors of its own; a job does not end for its logs
                if not self._failed:
                    self._failed = True
                    log.warning("what workers print cannot be written to %s: %s", self._store.url, error)

    def _write(self, file: File, text: str) -> None:
        who, stream = file
        name = f"{f'rank.{who}' if who.isdigit() else who.replace(' ', '.')}/{stream}"
        if self._store.is_local:
            path = self._store.local_path(name)
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("a", encoding="utf-8") as target:
                target.write(text)
            return
        if file not in self._parts:  # a training that goes on in a second job adds to what the first has left
            there = self._store.list(name.partition("/")[0])
            self._parts[file] = sum(entry.path.startswith(f"{name}.") for entry in there)
        self._parts[file] += 1
        self._store.write_bytes(f"{name}.{self._parts[file]:05d}", text.encode())
