"""Workers' output and the job's own log lines, printed by one thread so that a slow terminal delays nobody."""

from __future__ import annotations

import queue
import sys
import threading
from typing import TextIO

MAX_QUEUED_LINES = 20_000
"""Beyond this, lines are dropped and counted: a blocked terminal must not eat the driver's memory."""


class OutputPrinter:
    """Prints `[rank]<stream>:line` as Horovod does. Lines are never torn."""

    def __init__(self, stdout: TextIO | None = None, stderr: TextIO | None = None) -> None:
        self._targets = {"stdout": stdout, "stderr": stderr}
        self._queue: queue.Queue[tuple[str, str] | None] = queue.Queue(MAX_QUEUED_LINES)
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

    def worker_lines(self, who: str, stream: str, lines: tuple[str, ...]) -> None:
        """Queue a worker's lines. `who`: its rank, or its slot before it has one."""
        for text in lines:
            self.line(f"[{who}]<{stream}>:{text}", stream)

    def close(self, timeout_s: float = 2.0) -> None:
        """Print what is queued and end the thread."""
        try:
            self._queue.put(None, timeout=timeout_s)
        except queue.Full:
            return  # the terminal is blocked; the thread is a daemon and holds nothing
        self._thread.join(timeout_s)

    def _print(self) -> None:
        while (item := self._queue.get()) is not None:
            stream, text = item
            try:
                # looked up at each line: notebooks swap sys.stdout from cell to cell
                target = self._targets[stream] or getattr(sys, stream)
                target.write(text + "\n")
                if self._queue.empty():
                    target.flush()
                if self._dropped:
                    target.write(f"spark_elastic: {self._dropped} lines were dropped, the output is too slow\n")
                    self._dropped = 0
            except (
                Exception
            ) as error:  # closed by its owner, a full disk, a notebook's stream: the next may get through
                self._say_failed(stream, error)

    def _say_failed(self, stream: str, error: Exception) -> None:
        if stream in self._failed or sys.__stderr__ is None:
            return
        self._failed.add(stream)
        try:
            reason = f"{type(error).__name__}: {error}"
            print(f"spark_elastic: lines for {stream} cannot be written ({reason})", file=sys.__stderr__, flush=True)
        except Exception:
            pass  # nowhere left to say so
