"""The user's own modules: which ones a pickle names, and whether the executors can import them."""

from __future__ import annotations

import contextlib
import os
import pickle
import pickletools
import sys
import sysconfig
from collections.abc import Mapping
from typing import TYPE_CHECKING

from spark_elastic.errors import NotPicklableError
from spark_elastic.spark.executor_python import PATIENCE_S

if TYPE_CHECKING:
    from spark_elastic.spark.cluster import Cluster

_GLOBAL = "global "


def check_modules(cluster: Cluster, pickled: bytes, env: Mapping[str, str] | None = None) -> None:
    """Run a job of one task that looks for the user's own modules that a pickle names; none if it names none.

    Where all slots are taken for longer than `PATIENCE_S`, nothing is found out: the worker names what it lacks.

    The pickle has protocol 4 or newer. `env` is the workers' environment: with a PYTHONPATH, nothing is looked for.

    Raises:
        NotPicklableError: Executors cannot import one of them.
    """
    files = {name: file for name in modules_in(pickled) if (file := _own_file(name)) is not None}
    about = ("modules", cluster.id, *sorted(files))
    if not files or about in cluster.done or "PYTHONPATH" in (env or {}):
        return
    answer = cluster.ask_python(sorted(files), PATIENCE_S)
    if answer is None:
        return
    if missing := answer[2]:
        name, send = missing[0], "addArtifacts(..., pyfile=True) of the session" if cluster.remote else "sc.addPyFile"
        raise NotPicklableError(
            f"the executors cannot import {name}, which this program has from {files[name]}; send it with {send} "
            "(a file, or a zip of a package's folder), --py-files of spark-submit, or install it on the executors"
        )
    cluster.done.add(about)


def own_modules() -> set[str]:
    """Return the top-level modules that this program has imported and that are the user's own."""
    names = {name.partition(".")[0] for name in list(sys.modules)}
    return {name for name in names if _own_file(name) is not None}


def modules_in(pickled: bytes) -> set[str]:
    """Return the top-level modules that a pickle, and pickles within it, import as they are loaded."""
    found: set[str] = set()
    memo: list[str | None] = []
    last: list[str | None] = [None, None]  # the strings among the values that were pushed last
    for op, arg, _ in pickletools.genops(pickled):
        value: str | None = None
        if op.name == "MEMOIZE":
            memo.append(last[-1])
            continue
        if op.name in ("SHORT_BINUNICODE", "BINUNICODE", "BINUNICODE8"):
            value = arg
        elif op.name in ("BINGET", "LONG_BINGET"):
            value = memo[int(arg or 0)]
        elif op.name == "STACK_GLOBAL":
            found.add(str(last[-2]))
            value = f"{_GLOBAL}{last[-1]}"
        elif op.name == "TUPLE1" and last[-2] == f"{_GLOBAL}subimport":  # cloudpickle's import of a module
            found.add(str(last[-1]))
        elif isinstance(arg, bytes) and arg[:1] == pickle.PROTO:
            with contextlib.suppress(ValueError, IndexError):  # bytes that only begin as a pickle does
                found |= modules_in(arg)
        last = [last[-1], value]
    return {name.partition(".")[0] for name in found}


def _own_file(name: str) -> str | None:
    """Return the file or folder of a module that is the user's own; None for installed ones, and for the program."""
    module = sys.modules.get(name)
    path = getattr(module, "__file__", None) or next(iter(getattr(module, "__path__", ())), None)
    if not isinstance(path, str) or name in ("__main__", "__mp_main__", "spark_elastic"):
        return None
    installed = path.startswith(sysconfig.get_path("stdlib") + os.sep) or {*path.split(os.sep)} & {
        "site-packages",
        "dist-packages",
    }
    return None if installed else os.path.dirname(path) if path.endswith(f"{os.sep}__init__.py") else path
