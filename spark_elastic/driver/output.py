"""The output of a job: the workers' lines, lines about the job, and the progress bar.

One thread prints all of them, and another writes the workers' lines to files, so that a slow terminal or a slow store
blocks neither the driver nor the workers.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import re
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

from spark_elastic import clock
from spark_elastic.data.store import Store
from spark_elastic.redaction import redacted
from spark_elastic.reporting.progress import ProgressModel, wrapped
from spark_elastic.reporting.screens import Screen, screen_for

# --- files (run(output_dir=...)) -----------------------------------------------------------------

log = logging.getLogger(__name__)

FLUSH_S = 2.0
FLUSH_BYTES = 4 * 2**20  # lines of this size are written before `FLUSH_S` have passed
MAX_WAITING_BYTES = 64 * 2**20  # of lines that are not written yet; further ones are dropped, and counted in the file
CLOSE_S = 10.0


@dataclass(slots=True)
class _Dropped:
    """Lines that were dropped because their target was too slow."""

    lines: int = 0
    nbytes: int = 0

    def add(self, text: str) -> None:
        self.lines += 1
        self.nbytes += len(text)

    def said(self, target: str) -> str:
        """Return the line about them, and forget them."""
        dropped = f"{self.lines} lines ({self.nbytes / 1e6:.1f} MB) were dropped"
        self.lines = self.nbytes = 0
        return f"spark_elastic: {dropped}: they came faster than {target} took them"


File = tuple[str, str]  # the process (its rank, or "slot 3" if it has none) and the stream


class OutputFiles:
    """The workers' output in a folder or a store: `rank.0/stdout`, `rank.0/stderr`, and so on.

    Object storage cannot append to files; there each flush writes a new file, `rank.0/stdout.00001` and so on.
    """

    def __init__(self, folder: str | Path | Store) -> None:
        self._store = Store.create(folder)
        self._lock = threading.Lock()
        self._waiting: dict[File, list[str]] = {}
        self._bytes = 0
        self._dropped: dict[File, _Dropped] = {}
        self._parts: dict[File, int] = {}
        self._failed = False
        self._over = False
        self._due = threading.Event()
        self._thread = threading.Thread(target=self._run, name="spark_elastic-output-files", daemon=True)
        self._thread.start()

    def add(self, process: str, stream: str, text: str) -> None:
        """Add a line of a process; `process` is its rank, or "slot 3" before it has one. Never blocks."""
        with self._lock:
            file, size = (process, stream), sys.getsizeof(text)
            if self._bytes + size > MAX_WAITING_BYTES:
                self._dropped.setdefault(file, _Dropped()).add(text)
                return
            self._bytes += size
            self._waiting.setdefault(file, []).append(text)
        if self._bytes >= FLUSH_BYTES:
            self._due.set()

    def close(self) -> None:
        self._over = True
        self._due.set()
        self._thread.join(CLOSE_S)

    def _run(self) -> None:
        over = False
        while not over:
            self._due.wait(FLUSH_S)
            self._due.clear()
            over = self._over
            self._flush()

    def _flush(self) -> None:
        with self._lock:
            waiting, self._waiting, self._bytes = self._waiting, {}, 0
            dropped, self._dropped = self._dropped, {}
        for file, each in dropped.items():
            waiting.setdefault(file, []).append(each.said(self._store.url))
        for file, lines in waiting.items():
            try:
                self._write(file, "\n".join([*lines, ""]))
            except Exception as error:  # each storage raises other errors, and none of them must end the job
                if not self._failed:
                    self._failed = True
                    log.warning("what workers print cannot be written to %s: %s", self._store.url, redacted(error))

    def _write(self, file: File, text: str) -> None:
        process, stream = file
        name = f"{f'rank.{process}' if process.isdigit() else process.replace(' ', '.')}/{stream}"
        if self._store.is_local:
            path = self._store.local_path(name)
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("a", encoding="utf-8") as target:
                target.write(text)
            return
        if file not in self._parts:  # a second job of the same training adds to the files of the first
            there = self._store.list(name.partition("/")[0])
            self._parts[file] = sum(entry.path.startswith(f"{name}.") for entry in there)
        self._parts[file] += 1
        self._store.write_bytes(f"{name}.{self._parts[file]:05d}", text.encode())


# --- the terminal or notebook -----------------------------------------------------------------------

MAX_QUEUED_LINES, MAX_QUEUED_BYTES = 20_000, 16 * 2**20
"""The limits for lines that are not printed yet. Further lines are dropped and counted, because a blocked terminal must
not fill the driver's memory."""
MAX_LINES_AT_ONCE = 200  # the most lines that are printed before the bar is drawn again
LOOK_S = 0.25  # seconds between two drawings of the bar

_ESCAPES = re.compile(  # what a terminal would obey
    "\x1b[\\]PX^_][^\x07\x1b]*(?:\x07|\x1b\\\\)?"  # titles, links, strings for the terminal
    "|(?:\x1b\\[|\x9b)[0-?]*[ -/]*[@-~]?"  # colours, cursor
    "|\x1b[ -/]*[0-~]?"
    "|[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]"
)

Line = tuple[str, str]  # the stream and the text


class OutputPrinter:
    """Prints the workers' lines as `[rank]<stream>:line`, as Horovod does, above the progress bar.

    Lines about the job go to stderr. Without files, both streams are this process's own; without a model of the
    progress, there is no bar. `copy` is called with each line of a worker: process, stream, text.
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
        self._screen: Screen = Screen() if progress is None else screen_for(stderr)
        self._queue: queue.Queue[Line | None] = queue.Queue()
        self._bytes = 0
        self._lock = threading.Lock()  # for `_bytes`, those of the queue, and `_dropped`
        self._dropped = _Dropped()
        self._failed: set[str] = set()  # the streams, and the bar, whose failure was reported
        self._thread = threading.Thread(target=self._print, name="spark_elastic-output", daemon=True)
        self._thread.start()

    def line(self, text: str, stream: str = "stderr") -> None:
        """Queue one line. May be called from any thread; never blocks."""
        size = sys.getsizeof(text)
        with self._lock:
            if self._bytes + size > MAX_QUEUED_BYTES or self._queue.qsize() >= MAX_QUEUED_LINES:
                self._dropped.add(text)
                return
            self._bytes += size
            self._queue.put((stream, text))

    def say(self, text: str) -> None:
        """Queue a line about the job; a long one as several lines."""
        self.line(wrapped(text, self._screen.columns), self._job_stream())

    def worker_lines(self, process: str, stream: str, lines: Sequence[str], shown: Sequence[str] | None = None) -> None:
        """Queue lines of a process (its rank, or "slot 3"): print `shown` (None: all), write all into files."""
        for text in lines if shown is None else shown:
            if "\r" in text:  # as of progress bars: a terminal shows what was written last
                text = next((each for each in reversed(text.split("\r")) if each.strip()), "")
            self.line(f"[{process}]<{stream}>:{text}", stream)
        if self._copy is not None:
            for text in lines:
                self._copy(process, stream, text)

    def close(self, timeout_s: float = 2.0) -> None:
        """Print the queued lines, remove the bar and end the thread."""
        self._queue.put(None)
        self._thread.join(timeout_s)  # if the terminal is blocked, the thread is left: a daemon without resources

    def _print(self) -> None:
        drawn = 0.0
        over = False
        while not over:
            lines, over = self._next_lines()
            now = clock.monotonic()
            progress = self._progress
            if progress is not None:
                progress.look_at_cluster(now)
                if (about := progress.line(now, bar=self._screen.live)) is not None:
                    lines.append((self._job_stream(), wrapped(f"spark_elastic: {about}", self._screen.columns)))
            if lines:
                self._write(lines)
            if progress is not None and self._screen.live and (over or now - drawn >= LOOK_S):
                drawn = now
                self._draw(progress, now)
        self._draw(None, 0.0)

    def _job_stream(self) -> str:
        """Return the stream that the bar is on, for lines about the job."""
        return "stdout" if self._screen.to_stdout else "stderr"

    def _next_lines(self) -> tuple[list[Line], bool]:
        """Wait for lines. Returns those that are queued, and True if they are the last."""
        lines: list[Line] = []
        over = False
        try:
            item = self._queue.get(timeout=None if self._progress is None else LOOK_S)
            while item is not None and len(lines) < MAX_LINES_AT_ONCE:
                lines.append(item)
                item = self._queue.get_nowait() if len(lines) < MAX_LINES_AT_ONCE else item
            over = item is None
        except queue.Empty:
            pass
        with self._lock:
            self._bytes -= sum(sys.getsizeof(text) for _, text in lines)
        return lines, over

    def _draw(self, progress: ProgressModel | None, now: float) -> None:
        """Draw the bar; None removes it."""
        try:
            view = None if progress is None else progress.view(now)
            if view is None:
                self._screen.clear()
            else:
                self._screen.show(view)
        except Exception as error:  # whatever is wrong with the bar, lines must still be printed
            self._report_failure("the bar", error)
            self._screen = Screen()

    def _write(self, lines: list[Line]) -> None:
        rest = iter(lines)
        try:
            self._screen.lines(lambda: self._write_lines(rest))
        except Exception as error:
            self._report_failure("the bar", error)
            self._screen = Screen()
            self._write_lines(rest)

    def _write_lines(self, lines: Iterator[Line]) -> None:
        written: dict[str, TextIO] = {}
        for stream, text in lines:
            with self._lock:
                dropped = self._dropped.said("the output") if self._dropped.lines else None
            try:
                # looked up for each line: notebooks replace sys.stdout from cell to cell
                target = self._targets[stream] or getattr(sys, stream)
                target.write((text if text.isprintable() else _ESCAPES.sub("", text)) + "\n")
                written[stream] = target
                if dropped:
                    target.write(dropped + "\n")
            except Exception as error:  # a closed file, a full disk, a notebook's stream; the next line may succeed
                self._report_failure(f"lines for {stream}", error)
        if self._queue.empty() or self._screen.live:
            for stream, target in written.items():
                try:
                    target.flush()
                except Exception as error:
                    self._report_failure(f"lines for {stream}", error)

    def _report_failure(self, what: str, error: Exception) -> None:
        if what in self._failed or sys.__stderr__ is None:
            return
        self._failed.add(what)
        with contextlib.suppress(Exception):  # there is no stream left to report it on
            reason = f"{type(error).__name__}: {error}"
            print(f"spark_elastic: {what} cannot be written ({reason})", file=sys.__stderr__, flush=True)
