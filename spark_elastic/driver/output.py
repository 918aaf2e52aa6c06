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
            # looked up at each line: notebooks swap sys.stdout from cell to cell
            target = self._targets[stream] or getattr(sys, stream)
            try:
                target.write(text + "\n")
                if self._queue.empty():
                    target.flush()
                if self._dropped:
                    target.write(f"spark_elastic: {self._dropped} lines were dropped, the output is too slow\n")
                    self._dropped = 0
            except (OSError, ValueError):
                pass  # the target was closed by its owner; nowhere left to say so
