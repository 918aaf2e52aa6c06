"""Which files have to travel with a script: itself and the local modules that it imports."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

from spark_elastic.errors import UsageError
from spark_elastic.task.script import Script

MAX_BYTES = 16 * 2**20
"""Source code is never this big; something else was swept up, and it would travel with every launch."""


def collect(path: str, args: tuple[str, ...]) -> Script:
    """Read the script and every module in its folder that it imports, directly or through one of them.

    Found by name in the import statements; a module that is imported by other means has to be installed on the
    workers, or sent with Spark's own ``--py-files``.

    Raises:
        UsageError: the script cannot be read or is no Python; or its modules are larger than any source code.
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
    """First components of the modules that the source imports, relative imports aside: their package is sent whole."""
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError):
        return  # broken modules are reported by the import itself, if it is ever reached
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name.partition(".")[0]
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            yield node.module.partition(".")[0]


def _local_files(folder: Path, module: str) -> Iterator[Path]:
    single = folder / f"{module}.py"
    if single.is_file():
        yield single
    package = folder / module
    # with or without __init__.py: both can be imported
    if package.is_dir():
        for found in sorted(package.rglob("*.py")):
            if not any(part.startswith(".") for part in found.relative_to(folder).parts):
                yield found
