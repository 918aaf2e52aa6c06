"""Keep the code that TensorFlow generates in memory.

AutoGraph writes each function that it converts to a file of the temporary folder, imports it, and deletes it when the
interpreter ends. Python writes its bytecode beside it, which nobody deletes. A worker that is killed, or whose function
raises, leaves both: hundreds a day on a busy host.
"""

from __future__ import annotations

import contextlib
import itertools
import linecache
import sys
from types import ModuleType

_numbers = itertools.count()


def keep_generated_code_in_memory() -> None:
    """Have AutoGraph write no files in this process. Another version of TensorFlow writes them as before."""
    with contextlib.suppress(ImportError, AttributeError):
        from tensorflow.python.autograph.pyct import loader

        if loader.load_source.__code__.co_varnames[:2] == ("source", "delete_on_exit"):
            loader.load_source = _load_source


def _load_source(source: str, delete_on_exit: bool) -> tuple[ModuleType, str]:
    """Return the source as a new module and the name of its file, which exists for tracebacks and `inspect` alone."""
    name = f"__autograph_generated_file{next(_numbers)}"
    module, file = ModuleType(name), f"{name}.py"
    module.__file__ = file
    linecache.cache[file] = (len(source), None, source.splitlines(keepends=True), file)  # without a time it stays
    sys.modules[name] = module
    exec(compile(source, file, "exec"), vars(module))
    return module, file
