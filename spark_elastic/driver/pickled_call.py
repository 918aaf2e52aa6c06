"""Pickle the function of a job, and name what cannot be pickled."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from spark_elastic.errors import NotPicklableError
from spark_elastic.redaction import first_line
from spark_elastic.wire.pickling import dumps

_MAX_PARTS = 200  # parts of an object that are searched for one that cannot be pickled


def pickled(fn: Callable[..., Any], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None) -> bytes:
    """Return the call `(fn, args, kwargs)`, pickled, or raise NotPicklableError with the path to what cannot be."""
    call = (fn, tuple(args), dict(kwargs or {}))
    try:
        return dumps(call)
    except Exception as error:
        path, culprit, reason = _find_culprit(call, error)
        raise NotPicklableError(
            f"{path} cannot be sent to the workers: {type(culprit).__name__} cannot be pickled ({reason}); create it "
            "inside the function, or pass what it is made from",
            path=path,
            type_name=type(culprit).__name__,
        ) from None


def _find_culprit(call: tuple[Any, Any, Any], error: Exception) -> tuple[str, Any, str]:
    """Find the innermost part of a call that cannot be pickled. Returns its path, the part, and the reason."""
    fn, args, kwargs = call
    path = f"function {getattr(fn, '__qualname__', type(fn).__name__)}"
    found = path, fn, first_line(error)  # if each part can be pickled, but not all together
    in_args = ((f"args[{index}]", value) for index, value in enumerate(args))
    in_kwargs = ((f"kwargs[{key!r}]", value) for key, value in kwargs.items())
    parts: Iterator[tuple[str, Any]] = itertools.chain([(path, fn)], in_args, in_kwargs)
    outer = ""
    seen: set[int] = set()
    while True:
        for name, part in itertools.islice(parts, _MAX_PARTS):
            if id(part) not in seen and (why := _why_not(part)) is not None:
                found = outer + name, part, why
                break
        else:
            return found
        seen.add(id(part))
        outer = f"{found[0]} → "
        parts = _parts(part)


def _why_not(value: Any) -> str | None:
    try:
        dumps(value)
    except Exception as error:
        return first_line(error)
    return None


def _parts(value: Any) -> Iterator[tuple[str, Any]]:
    """Yield the parts of a value, each with its name in the user's code."""
    if inspect.ismethod(value):
        yield "self", value.__self__
        value = value.__func__
    if inspect.isfunction(value):
        captured = inspect.getclosurevars(value)
        yield from captured.nonlocals.items()
        yield from captured.globals.items()
        for name, parameter in inspect.signature(value).parameters.items():
            if parameter.default is not inspect.Parameter.empty:
                yield f"default of {name}", parameter.default
    elif isinstance(value, Mapping):
        yield from ((f"[{key!r}]", item) for key, item in value.items())
    elif isinstance(value, (list, tuple, set, frozenset)):
        yield from ((f"[{index}]", item) for index, item in enumerate(value))
    elif hasattr(value, "func") and hasattr(value, "keywords"):  # functools.partial
        yield from (("func", value.func), ("args", value.args), ("keywords", value.keywords))
    elif hasattr(value, "__dict__") and not isinstance(value, type):
        yield from ((f".{name}", item) for name, item in vars(value).items())
