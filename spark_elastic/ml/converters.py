"""What a setting of an estimator may be: one function a kind, each of which returns the plain value or says why not.

Each takes the setting's name and the value that was given.
"""

from __future__ import annotations

import math
import numbers
import os
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from spark_elastic.errors import InvalidSettingsError, nearest
from spark_elastic.settings import whole_number

Converter = Callable[[str, Any], Any]


def _wrong(name: str, wanted: str, value: Any) -> InvalidSettingsError:
    shown = repr(value)
    shown = shown if len(shown) <= 200 else f"{shown[:200]}…"
    return InvalidSettingsError(f"{name} must be {wanted}, not {shown} ({type(value).__name__})")


def whole(at_least: int) -> Converter:
    return lambda name, value: whole_number(name, value, at_least)


def real(*, above: float | None = None, at_least: float | None = None) -> Converter:
    """A finite number within a lower bound, as a float."""
    bound = f" above {above:g}" if above is not None else f" of at least {at_least:g}" if at_least is not None else ""

    def convert(name: str, value: Any) -> float:
        if isinstance(value, bool) or not isinstance(value, numbers.Real) or not math.isfinite(value):
            raise _wrong(name, f"a number{bound}", value)
        number = float(value)
        if (above is not None and number <= above) or (at_least is not None and number < at_least):
            raise _wrong(name, f"a number{bound}", value)
        return number

    return convert


def boolean(name: str, value: Any) -> bool:
    if type(value).__name__ not in ("bool", "bool_"):  # numpy's too
        raise _wrong(name, "True or False", value)
    return bool(value)


def text(name: str, value: Any) -> str:
    if not isinstance(value, str) or not value:
        raise _wrong(name, "a name", value)
    return str(value)


def identifier(name: str, value: Any) -> str:
    """A name that can be a folder's."""
    if not isinstance(value, str) or not re.fullmatch(r"[\w=-][\w.=-]*", value):
        raise _wrong(name, "letters, digits, '_', '-', '=' and '.', which does not come first", value)
    return str(value)


def one_of(*choices: str) -> Converter:
    def convert(name: str, value: Any) -> str:
        if value not in choices:
            raise _wrong(name, f"one of {', '.join(map(repr, choices))}", value)
        return str(value)

    return convert


def path(name: str, value: Any) -> str:
    """A path or URI, as text."""
    if not isinstance(value, (str, os.PathLike)) or not os.fspath(value):
        raise _wrong(name, "a path or a URI", value)
    return str(value)


def names(name: str, value: Any) -> list[str]:
    """Different names, at least one; a single one may stand alone."""
    listed = [value] if isinstance(value, str) else value
    if not _is_list(listed) or not all(isinstance(each, str) and each for each in listed):
        raise _wrong(name, "a list of names", value)
    if not listed:
        raise InvalidSettingsError(f"{name} must name at least one column")
    _no_repeats(name, listed)
    return list(map(str, listed))


def names_or_none(name: str, value: Any) -> list[str]:
    """Like `names`; an empty list is fine."""
    return [] if _is_list(value) and len(value) == 0 else names(name, value)


def grouped_names(name: str, value: Any) -> list[Any]:
    """Names, or lists of names: `["a", "b"]`, `[["a", "b"], ["c"]]`. Names and lists are not mixed."""
    if _is_list(value) and any(_is_list(each) for each in value):
        if not all(_is_list(each) for each in value):
            raise InvalidSettingsError(
                f"{name} mixes names and lists of names: {value!r}; give a list for each input, or names alone"
            )
        return [names(f"{name}[{index}]", each) for index, each in enumerate(value)]
    return names(name, value)


def shapes(name: str, value: Any) -> list[list[int]]:
    """One shape for each tensor, without the rows: `[[28, 28], []]`. A single shape may stand alone: `(28, 28)`."""
    if _is_list(value) and len(value) and not any(_is_list(each) for each in value):
        value = [value]
    if not _is_list(value) or not len(value) or not all(_is_list(each) for each in value):
        raise _wrong(name, "a list of shapes, such as [(28, 28), (5,)]", value)
    return [[whole_number(f"{name}[{i}]", size, at_least=1) for size in shape] for i, shape in enumerate(value)]


def dtypes(name: str, value: Any) -> list[str | None]:
    """numpy's name of a type of numbers for each tensor, or None: `["int64", None]`. A single one may stand alone."""
    listed = value if _is_list(value) else [value]
    if not len(listed):
        raise _wrong(name, "a list of types, such as ['int64', 'float32']", value)
    made: list[str | None] = []
    for index, each in enumerate(listed):
        try:
            dtype = None if each is None else np.dtype(each)
        except TypeError:
            raise _wrong(f"{name}[{index}]", "a type that numpy knows, such as 'int64'", each) from None
        if dtype is not None and (dtype.kind not in "biuf" or dtype.itemsize > 8):
            raise _wrong(f"{name}[{index}]", "a type of numbers of at most 8 bytes, such as 'int64'", each)
        made.append(None if dtype is None else dtype.name)
    return made


def numbers_list(name: str, value: Any) -> list[float]:
    if not _is_list(value) or not len(value):
        raise _wrong(name, "a list of numbers", value)
    return [real(at_least=0)(f"{name}[{i}]", each) for i, each in enumerate(value)]


def fraction_or_column(name: str, value: Any) -> float | str:
    if isinstance(value, str) and value:
        return str(value)
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise _wrong(name, "a fraction of the rows, or the name of a boolean column", value)
    if not 0 < float(value) < 1:
        raise InvalidSettingsError(
            f"{name} must be a fraction between 0 and 1 (both excluded), such as 0.1, or the name of a boolean column, "
            f"not {value}; leave it out (None) to train on all rows"
        )
    return float(value)


def function(name: str, value: Any) -> Any:
    if not callable(value):
        raise _wrong(name, "a function", value)
    return value


def dictionary(name: str, value: Any) -> dict[str, Any]:
    if not isinstance(value, Mapping) or not all(isinstance(key, str) and key for key in value):
        raise _wrong(name, "a dict with names as keys", value)
    return dict(value)


def options(known: Sequence[str]) -> Converter:
    """A dict whose keys are among `known`."""

    def convert(name: str, value: Any) -> dict[str, Any]:
        given = dictionary(name, value)
        for key in given:
            if key not in known:
                close = nearest(key, known)
                raise InvalidSettingsError(
                    f"{name} takes no {key!r}"
                    + (f"; did you mean {close!r}?" if close else f"; it takes {', '.join(known)}")
                )
        return given

    return convert


def anything(name: str, value: Any) -> Any:
    return value


def _is_list(value: Any) -> bool:
    return isinstance(value, (list, tuple)) or type(value).__name__ in ("ndarray", "Size")


def _no_repeats(name: str, listed: Sequence[str]) -> None:
    repeated = sorted({each for each in listed if list(listed).count(each) > 1})
    if repeated:
        raise InvalidSettingsError(f"{name} names {', '.join(repeated)} more than once")
