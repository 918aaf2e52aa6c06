"""Run a training script on a worker as ``python script.py args`` would.

The script and the local modules that it imports are sent with the job, so they need not exist on the workers. If the
same files exist at the same path (local mode, a shared file system), they are run from there.
"""

from __future__ import annotations

import ast
import contextlib
import os
import runpy
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from spark_elastic.errors import UsageError

MAX_BYTES = 16 * 2**20  # source code is smaller: larger files were found by mistake, and would go with every launch


@dataclass(frozen=True)
class Script:
    """A script, its arguments and its local modules."""

    path: str
    """Absolute, on the machine it was submitted from."""
    args: tuple[str, ...] = ()
    files: Mapping[str, bytes] = field(default_factory=dict)
    """The script and its local modules, by path relative to the script's folder."""

    @property
    def name(self) -> str:
        return os.path.basename(self.path)

    def __call__(self, *args: str) -> None:
        """Run the script: a job takes it as a function."""
        run_script(self, *args)


class ScriptExit(Exception):
    """The script called ``sys.exit`` with a value that means failure."""

    def __init__(self, code: int, message: str = "") -> None:
        super().__init__(f"exited with code {code}" + (f": {message}" if message else ""))
        self.exit_code = code


def run_script(script: Script, *args: str) -> None:
    """Execute the script as ``__main__``, with `sys.argv`, `sys.path` and `__file__` as Python sets them.

    `args` follow the script's own arguments.

    Raises:
        ScriptExit: the script exited with a code other than 0.
    """
    with _folder_of(script) as folder:
        path = os.path.join(folder, script.name)
        sys.argv = [path, *script.args, *args]
        sys.path.insert(0, folder)
        try:
            # not exec(): DataLoader processes started by spawn or forkserver import __main__ again from its __file__
            runpy.run_path(path, run_name="__main__")
        except SystemExit as leaving:
            if leaving.code not in (None, 0):
                code = leaving.code
                failed = ScriptExit(code) if isinstance(code, int) else ScriptExit(1, str(code))
                raise failed.with_traceback(leaving.__traceback__) from None


@contextlib.contextmanager
def _folder_of(script: Script) -> Iterator[str]:
    """Yield the folder to run from: the script's own if its files are the ones sent, else a temporary copy."""
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


# --- on the machine that submits it ------------------------------------------------------------------


def collect(path: str, args: tuple[str, ...] = ()) -> Script:
    """Read the script and all modules in its folder that it imports, directly or through one another.

    Modules are found by the names in import statements. A module that is imported in another way has to be installed
    on the workers, or sent with Spark's own ``--py-files``. Raise UsageError if the script cannot be read or is not
    Python, or its modules are larger than any source code.
    """
    script = Path(path).absolute()
    try:
        source = script.read_bytes()
    except IsADirectoryError:
        raise UsageError(f"{path} is a folder; name the script to run") from None
    except OSError as error:
        raise UsageError(f"cannot read the script {path}: {error.strerror}") from None
    try:
        ast.parse(source, filename=path)
    except (SyntaxError, ValueError) as error:
        raise UsageError(f"{path} is not a Python script: {error}") from None

    files = {script.name: source}
    waiting = [source]
    while waiting:
        for module in _imported(waiting.pop()):
            for found in _local_files(script.parent, module):
                name = found.relative_to(script.parent).as_posix()
                if name not in files:
                    files[name] = found.read_bytes()
                    waiting.append(files[name])
    size = sum(map(len, files.values()))
    if size > MAX_BYTES:
        raise UsageError(
            f"{path} and the modules beside it are {size / 2**20:.0f} MiB, more than the {MAX_BYTES / 2**20:.0f} MiB "
            "that may travel with a job; install them on the workers instead"
        )
    return Script(str(script), args, files)


def _imported(source: bytes) -> Iterator[str]:
    """Yield the first components of imported modules. Relative imports need none: their package is sent as a whole."""
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError):
        return  # the import itself reports a broken module, if it is ever executed
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name.partition(".")[0]
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            yield node.module.partition(".")[0]


def _local_files(folder: Path, module: str) -> Iterator[Path]:
    # with or without __init__.py, a folder can be imported
    for found in (folder / f"{module}.py", *sorted((folder / module).rglob("*.py"))):
        if found.is_file() and not any(part.startswith(".") for part in found.relative_to(folder).parts):
            yield found
