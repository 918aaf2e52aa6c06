"""Runs a training script on a worker as ``python script.py args`` would.

The script travels with the job, together with the local modules that it imports, so it need not exist on the workers.
Where the very same files do lie at the same place (local mode, a shared file system) they are run from there.
"""

from __future__ import annotations

import contextlib
import os
import runpy
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True)
class Script:
    """A script and what it needs."""

    path: str
    """Absolute, on the machine it was submitted from."""
    args: tuple[str, ...] = ()
    files: Mapping[str, bytes] = field(default_factory=dict)
    """The script and its local modules, by path relative to the script's folder."""

    @property
    def name(self) -> str:
        return os.path.basename(self.path)


class ScriptExit(Exception):
    """The script called ``sys.exit`` with a code, or a message, that means failure."""

    def __init__(self, code: int, message: str = "") -> None:
        super().__init__(f"exited with code {code}" + (f": {message}" if message else ""))
        self.exit_code = code


def run_script(script: Script) -> None:
    """Execute the script as ``__main__``; classes, `sys.argv`, `sys.path` and `__file__` are as Python sets them.

    Raises:
        ScriptExit: it exited with a code other than 0.
    """
    with _folder_of(script) as folder:
        path = os.path.join(folder, script.name)
        sys.argv = [path, *script.args]
        sys.path.insert(0, folder)
        try:
            # not exec(): DataLoader processes started by spawn or forkserver import __main__ again from its __file__
            runpy.run_path(path, run_name="__main__")
        except SystemExit as leaving:
            if leaving.code not in (None, 0):
                code = leaving.code
                raise (ScriptExit(code) if isinstance(code, int) else ScriptExit(1, str(code))) from None


@contextlib.contextmanager
def _folder_of(script: Script) -> Iterator[str]:
    """Where to run it from: its own folder if everything there is as it was sent, or a copy for the time it runs."""
    original = Path(script.path).parent
    if all(_holds(original / name, content) for name, content in script.files.items()):
        yield str(original)
        return
    with tempfile.TemporaryDirectory(prefix="spark_elastic-script-", ignore_cleanup_errors=True) as folder:
        for name, content in script.files.items():
            target = Path(folder, name)
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(content)
        yield folder


def _holds(path: Path, content: bytes) -> bool:
    try:
        return path.read_bytes() == content
    except OSError:
        return False
