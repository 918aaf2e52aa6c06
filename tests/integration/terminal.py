"""A terminal for tests: a program under a pty, and what a person would have seen of it."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import select
import struct
import subprocess
import termios
import time
from collections.abc import Sequence

_CONTROL = re.compile(r"\x1b\[(\d*)([A-Za-z])")


class Terminal:
    """Runs a command whose stdin, stdout and stderr are one terminal."""

    def __init__(self, command: Sequence[str], columns: int = 80, env: dict[str, str] | None = None) -> None:
        self._fd, other = pty.openpty()
        fcntl.ioctl(self._fd, termios.TIOCSWINSZ, struct.pack("HHHH", 40, columns, 0, 0))
        self.process = subprocess.Popen(
            command,
            stdin=other,
            stdout=other,
            stderr=other,
            env={**os.environ, "TERM": "xterm", **(env or {})},
            start_new_session=True,
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
        )
        os.close(other)
        self.raw = ""

    def press(self, keys: str) -> None:
        os.write(self._fd, keys.encode())

    def read_until(self, pattern: str, timeout_s: float) -> str:
        """Until what has come matches, or the program ends. Raises: AssertionError: neither in time."""
        until = time.monotonic() + timeout_s
        while not re.search(pattern, self.raw):
            assert time.monotonic() < until, f"no {pattern!r} in {timeout_s} s; the screen:\n{self.screen()}"
            if not self._read():
                break
        return self.raw

    def read_to_the_end(self, timeout_s: float) -> int:
        """Returns: the exit code."""
        self.read_until(r"(?!)", timeout_s)
        return self.process.wait(timeout_s)

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        os.close(self._fd)

    def _read(self) -> bool:
        ready, _, _ = select.select([self._fd], [], [], 0.2)
        if not ready:
            return True
        try:
            data = os.read(self._fd, 65536)
        except OSError:  # the program has closed its end
            return False
        self.raw += data.decode(errors="replace")
        return bool(data)

    def screen(self) -> str:
        return seen(self.raw)


def seen(raw: str) -> str:
    """What stands on an endless screen after all of `raw`: overwritten lines as they were last."""
    lines: list[list[str]] = [[]]
    row = column = at = 0
    while at < len(raw):
        if found := _CONTROL.match(raw, at):
            count = int(found.group(1) or 1)
            if found.group(2) == "A":
                row = max(0, row - count)
            elif found.group(2) == "K":
                del lines[row][column:]
            at = found.end()
            continue
        character = raw[at]
        at += 1
        if character == "\r":
            column = 0
        elif character == "\n":
            row += 1
            if row == len(lines):
                lines.append([])
        else:
            lines[row] += [" "] * (column + 1 - len(lines[row]))
            lines[row][column] = character
            column += 1
    return "\n".join("".join(line).rstrip() for line in lines)
