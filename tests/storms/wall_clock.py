"""A wall clock that a storm can shift, for processes that were started with the library that is built here."""

from __future__ import annotations

import contextlib
import os
import shutil
import struct
import subprocess
from collections.abc import Iterator
from pathlib import Path

CLOCK = "CHAOS_CLOCK"
"""The variable of the environment that names the file from which `wall_clock.c` reads the shift of the wall clock."""


def shift_clock(seconds: int) -> None:
    """Shift the wall clock of all processes that were started with the shifted clock."""
    with open(os.environ[CLOCK], "r+b") as file:  # in place: it is mapped into the processes
        file.write(struct.pack("q", seconds))


@contextlib.contextmanager
def shifted_clock(folder: Path) -> Iterator[dict[str, str]]:
    """Build the library with the shifted clock; yields the environment of processes that are to have it.

    Yields nothing if there is no C compiler.
    """
    compiler = shutil.which("cc")
    if compiler is None:
        yield {}
        return
    folder.mkdir(parents=True, exist_ok=True)
    library, clock = folder / f"wall_clock-{os.getpid()}.so", folder / f"clock-{os.getpid()}"
    source = Path(__file__).with_name("wall_clock.c")
    subprocess.run([compiler, "-O2", "-shared", "-fPIC", "-o", str(library), str(source)], check=True)
    clock.write_bytes(struct.pack("q", 0))
    try:
        yield {CLOCK: str(clock), "LD_PRELOAD": " ".join(filter(None, [str(library), os.environ.get("LD_PRELOAD")]))}
    finally:
        library.unlink()
        clock.unlink()
