"""``--output-filename``: what each rank prints, in files of its own, beside the terminal."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TextIO

_WORKER_LINE = re.compile(r"\[([^\]]+)\]<(stdout|stderr)>:(.*)", re.DOTALL)
"""As `driver.output` writes it: one whole line a call."""


class RankFiles:
    """A stream that copies workers' lines to ``<folder>/rank.<rank>/<stdout|stderr>`` and passes all of them on."""

    def __init__(self, folder: Path, terminal: TextIO) -> None:
        self._folder = folder
        self._terminal = terminal
        self._files: dict[tuple[str, str], TextIO] = {}

    def write(self, text: str) -> int:
        written = self._terminal.write(text)  # first: a disk that is full must not silence the terminal too
        line = _WORKER_LINE.fullmatch(text)
        if line is not None:
            who, stream, rest = line.groups()
            self._file(who, stream).write(rest)
        return written

    def isatty(self) -> bool:
        return self._terminal.isatty()

    def flush(self) -> None:
        self._terminal.flush()
        for file in self._files.values():
            file.flush()

    def close(self) -> None:
        """Close the files; the terminal stays open."""
        for file in self._files.values():
            file.close()
        self._files.clear()

    def _file(self, who: str, stream: str) -> TextIO:
        if (who, stream) not in self._files:
            # "slot 3": a process that has no rank yet
            folder = self._folder / (f"rank.{who}" if who.isdigit() else who.replace(" ", "."))
            folder.mkdir(parents=True, exist_ok=True)
            self._files[who, stream] = (folder / stream).open("w", encoding="utf-8")
        return self._files[who, stream]
