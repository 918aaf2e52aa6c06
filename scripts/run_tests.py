"""All tests, in two streams beside each other: trainings that are disturbed mostly wait, the others mostly compute.

    python scripts/run_tests.py [NAME=FOLDER[,FOLDER or option of pytest...] ...]

Each stream is a pytest of its own. What it does is shown line by line behind its name, what it found in one piece when
it has ended. The last line has the sums; the exit status is not 0 if that of any stream is not.
"""

from __future__ import annotations

import os
import queue
import re
import subprocess
import sys
import threading
import time

_TRAININGS = [f"tests/integration/{folder}" for folder in ("spark", "spark_edges", "ml", "local", "data", "connect")]
_TRAININGS += ["tests/unit/keras", "tests/unit/tensorflow"]
STREAMS = [
    f"trainings={','.join(_TRAININGS)}",
    f"others=tests,{','.join(f'--ignore={folder}' for folder in _TRAININGS)}",
]
"""Each test is in one of them, and on 2 cores they take about equally long. The first stream goes first when both want
the processor: its trainings have deadlines to keep."""

QUIET_S = 60.0
"""After so long without a word from a stream it is shown where it stands."""

_RULE = re.compile(rb"=+ .* =+\s*$")
_KINDS = ("failed", "error", "passed", "skipped", "deselected", "xfailed", "xpassed")
_COUNTS = re.compile(rf"(\d+) ({'|'.join(_KINDS)})s?\b")


class Stream:
    def __init__(self, name: str, folders: list[str], niceness: int) -> None:
        self.name = name
        self.heard = time.monotonic()
        self.partial = b""
        self.rule = b""
        """The last line that pytest has drawn across the page; the final one has the counts."""
        self.report: list[bytes] = []
        """All lines from the second rule on: the first one stands above the progress."""
        self._rules = 0
        words = ["nice", "-n", str(niceness), sys.executable, "-m", "pytest", *folders]
        self.process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)

    def lines(self, data: bytes) -> list[bytes]:
        """The lines of progress that are complete now; those of the report are kept."""
        self.heard = time.monotonic()
        *complete, self.partial = (self.partial + data).split(b"\n")
        progress = []
        for line in complete:
            if _RULE.match(line):
                self._rules, self.rule = self._rules + 1, line
            (self.report if self._rules > 1 else progress).append(line)
        return progress

    def counts(self) -> dict[str, int]:
        return {what: int(number) for number, what in _COUNTS.findall(self.rule.decode(errors="replace"))}


def show(*lines: bytes, behind: str = "") -> None:
    for line in lines:
        sys.stdout.buffer.write((f"{behind:12}| ".encode() if behind else b"") + line + b"\n")
    sys.stdout.flush()


def read(stream: Stream, inbox: queue.Queue[tuple[Stream, bytes]]) -> None:
    assert stream.process.stdout is not None
    while data := os.read(stream.process.stdout.fileno(), 1 << 16):
        inbox.put((stream, data))
    inbox.put((stream, b""))


def follow(streams: list[Stream]) -> None:
    """Show what they say until the last has ended."""
    inbox: queue.Queue[tuple[Stream, bytes]] = queue.Queue()
    for stream in streams:
        threading.Thread(target=read, args=(stream, inbox), daemon=True).start()
    running = list(streams)
    while running:
        try:
            stream, data = inbox.get(timeout=QUIET_S)
        except queue.Empty:
            pass
        else:
            show(*stream.lines(data), behind=stream.name)
            if not data:
                stream.process.wait()
                running.remove(stream)
                show(b"", f"---- {stream.name} ----".encode(), *stream.report, stream.partial)
        for silent in running:
            if time.monotonic() - silent.heard > QUIET_S:
                silent.heard = time.monotonic()
                show(silent.partial + b" ... goes on", behind=silent.name)


def summary(streams: list[Stream], seconds: float) -> str:
    sums = {what: sum(stream.counts().get(what, 0) for stream in streams) for what in _KINDS}
    said = ", ".join(f"{number} {what}" for what, number in sums.items() if number) or "no tests ran"
    statuses = ", ".join(f"{stream.name} ended with {stream.process.returncode}" for stream in streams)
    return f"{statuses}\n" + f" {said} in {seconds:.2f}s ".center(120, "=")


def main(streams: list[str]) -> int:
    began = time.monotonic()
    named = [stream.partition("=") for stream in streams]
    started = [Stream(name, folders.split(","), 5 * number) for number, (name, _, folders) in enumerate(named)]
    try:
        follow(started)
    finally:  # interrupted: they are, too, or are told now
        for stream in started:
            if stream.process.poll() is None:
                stream.process.terminate()
                stream.process.wait()
    show(summary(started, time.monotonic() - began).encode())
    return max(abs(stream.process.returncode) for stream in started)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:] or STREAMS))
