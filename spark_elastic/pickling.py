"""Serialising the user's function, with errors that name the object in the way."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import cloudpickle

from spark_elastic.errors import NotPicklableError


def pickle_function(fn: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any] | None) -> bytes:
    """cloudpickle of (fn, args, kwargs).

    Raises:
        NotPicklableError: naming which of the three, or which captured variable, is in the way.
    """
    call = (fn, tuple(args), dict(kwargs or {}))
    try:
        return bytes(cloudpickle.dumps(call))
    except Exception as error:
        culprit = _culprit(fn, args, kwargs or {})
        raise NotPicklableError(
            f"{culprit} cannot be sent to the workers: {error}; create it inside the function instead"
        ) from error


def _culprit(fn: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
    for number, value in enumerate(args):
        if not _pickles(value):
            return f"args[{number}] ({type(value).__name__})"
    for name, value in kwargs.items():
        if not _pickles(value):
            return f"kwargs[{name!r}] ({type(value).__name__})"
    names = getattr(getattr(fn, "__code__", None), "co_freevars", ())
    for name, cell in zip(names, getattr(fn, "__closure__", None) or (), strict=False):
        if not _pickles(cell.cell_contents):
            return f"{name!r} ({type(cell.cell_contents).__name__}), which {_name(fn)} captures,"
    module = getattr(fn, "__globals__", {})
    for name in getattr(getattr(fn, "__code__", None), "co_names", ()):
        if name in module and not _pickles(module[name]):
            return f"the global {name!r} ({type(module[name]).__name__}), which {_name(fn)} uses,"
    return _name(fn)


def _name(fn: Callable[..., Any]) -> str:
    return getattr(fn, "__qualname__", repr(fn))


def _pickles(value: Any) -> bool:
    try:
        cloudpickle.dumps(value)
    except Exception:
        return False
    return True
