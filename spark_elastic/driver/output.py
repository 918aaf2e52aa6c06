"""Workers' output, the job's own lines and its bar, printed by one thread so that a slow terminal delays nobody."""

from __future__ import annotations

import logging
import queue
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TextIO

from spark_elastic import clock
from spark_elastic.data.store import Store
from spark_elastic.reporting.progress import ProgressModel
from spark_elastic.reporting.screens import PlainScreen, Screen, screen_for

# What workers print, in files of a store: `rank.0/stdout`, `rank.0/stderr`, ...

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


MAX_QUEUED_LINES = 20_000
"""Beyond this, lines are dropped and counted: a blocked terminal must not eat the driver's memory."""
MAX_LINES_AT_ONCE = 200
"""Between two looks at the bar."""
LOOK_S = 0.25
"""How often the bar is looked at."""

Line = tuple[str, str]
"""Stream and text."""


class OutputPrinter:
    """Prints `[rank]<stream>:line` as Horovod does. Lines are never torn, and the bar stays below them.

    progress: what the bar shows; None: there is none. copy: told of every line of a worker: who, stream, text.
    """

    def __init__(
        self,
        stdout: TextIO | None = None,
        stderr: TextIO | None = None,
        progress: ProgressModel | None = None,
        copy: Callable[[str, str, str], None] | None = None,
    ) -> None:
        self._targets = {"stdout": stdout, "stderr": stderr}
        self._progress = progress
        self._copy = copy
        self._screen: Screen = PlainScreen() if progress is None else screen_for(stderr)
        self._queue: queue.Queue[Line | None] = queue.Queue(MAX_QUEUED_LINES)
        self._dropped = 0
        self._failed: set[str] = set()
        """Streams whose target has failed; said once for each."""
        self._thread = threading.Thread(target=self._print, name="spark_elastic-output", daemon=True)
        self._thread.start()

    def line(self, text: str, stream: str = "stderr") -> None:
        """Queue one line; from any thread, never blocks."""
        try:
            self._queue.put_nowait((stream, text))
        except queue.Full:
            self._dropped += 1

    def say(self, text: str) -> None:
        """Queue a line about the job, where such lines are best read."""
        self.line(text, "stdout" if self._screen.to_stdout else "stderr")

    def worker_lines(self, who: str, stream: str, lines: tuple[str, ...]) -> None:
        """Queue a worker's lines. `who`: its rank, or its slot before it has one."""
        for text in lines:
            self.line(f"[{who}]<{stream}>:{text}", stream)
            if self._copy is not None:
                self._copy(who, stream, text)

    def close(self, timeout_s: float = 2.0) -> None:
        """Print what is queued, take the bar away and end the thread."""
        try:
            self._queue.put(None, timeout=timeout_s)
        except queue.Full:
            return  # the terminal is blocked; the thread is a daemon and holds nothing
        self._thread.join(timeout_s)

    def _print(self) -> None:
        drawn = 0.0
        over = False
        while not over:
            lines, over = self._next_lines()
            now = clock.monotonic()
            if self._progress is not None:
                self._progress.look_at_cluster(now)
            if self._progress is not None and (said := self._progress.line(now, bar=self._screen.live)) is not None:
                lines.append(("stdout" if self._screen.to_stdout else "stderr", f"spark_elastic: {said}"))
            if lines:
                self._write(lines)
            if self._progress is not None and self._screen.live and (over or now - drawn >= LOOK_S):
                drawn = now
                self._draw(self._progress, now)
        self._guarded(self._screen.clear)

    def _next_lines(self) -> tuple[list[Line], bool]:
        """Those that are there, after a wait for the first; and whether it was the end."""
        lines: list[Line] = []
        try:
            item = self._queue.get(timeout=None if self._progress is None else LOOK_S)
            while item is not None and len(lines) < MAX_LINES_AT_ONCE:
                lines.append(item)
                item = self._queue.get_nowait() if len(lines) < MAX_LINES_AT_ONCE else item
            return lines, item is None
        except queue.Empty:
            return lines, False

    def _draw(self, progress: ProgressModel, now: float) -> None:
        def draw() -> None:
            view = progress.view(now)
            if view is not None:
                self._screen.show(view)
            else:
                self._screen.clear()

        self._guarded(draw)

    def _guarded(self, draw: Callable[[], None]) -> None:
        try:
            draw()
        except Exception as error:  # a bar is never worth the lines
            self._say_failed("the bar", error)
            self._screen = PlainScreen()

    def _write(self, lines: list[Line]) -> None:
        rest = iter(lines)
        try:
            self._screen.lines(lambda: self._write_lines(rest))
        except Exception as error:
            self._say_failed("the bar", error)
            self._screen = PlainScreen()
            self._write_lines(rest)

    def _write_lines(self, lines: Iterator[Line]) -> None:
        written: dict[str, TextIO] = {}
        for stream, text in lines:
            try:
                # looked up at each line: notebooks swap sys.stdout from cell to cell
                target = self._targets[stream] or getattr(sys, stream)
                target.write(text + "\n")
                written[stream] = target
                if self._dropped:
                    target.write(f"spark_elastic: {self._dropped} lines were dropped, the output is too slow\n")
                    self._dropped = 0
            except (
                Exception
            ) as error:  # closed by its owner, a full disk, a notebook's stream: the next may get through
                self._say_failed(f"lines for {stream}", error)
        if self._queue.empty() or self._screen.live:
            for stream, target in written.items():
                try:
                    target.flush()
                except Exception as error:
                    self._say_failed(f"lines for {stream}", error)

    def _say_failed(self, what: str, error: Exception) -> None:
        if what in self._failed or sys.__stderr__ is None:
            return
        self._failed.add(what)
        try:
            reason = f"{type(error).__name__}: {error}"
            print(f"spark_elastic: {what} cannot be written ({reason})", file=sys.__stderr__, flush=True)
        except Exception:
            pass  # nowhere left to say so
