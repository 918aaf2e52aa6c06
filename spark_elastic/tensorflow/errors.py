"""A lost peer on its way through TensorFlow, which makes an error of its own of every exception in a host callback."""

from __future__ import annotations

import itertools
import re
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

import tensorflow as tf

from spark_elastic.errors import HorovodInternalError

_KEPT = 8
_numbers = itertools.count(1)
_recorded: deque[tuple[int, HorovodInternalError]] = deque(maxlen=_KEPT)
_TOKEN = re.compile(r"\[lost peer (\d+)\]")
_FOLLOWING = (tf.errors.CancelledError, tf.errors.AbortedError)
"""What other parts of a graph end with when one has failed; TensorFlow may raise theirs first."""


def marked(error: HorovodInternalError) -> HorovodInternalError:
    """What a host callback raises for it, so that `lost_peer` knows it again."""
    number = next(_numbers)
    _recorded.append((number, error))
    return HorovodInternalError(f"{error} [lost peer {number}]")


def lost_peer(error: BaseException) -> HorovodInternalError | None:
    """The error of the collective that this one came of, if it came of a lost peer; None otherwise."""
    if isinstance(error, HorovodInternalError) and not _TOKEN.search(str(error)):
        return error
    for each in _chain(error):
        if found := _TOKEN.search(str(each)):
            return _take(int(found[1])) or HorovodInternalError(_first_line(each))
    if isinstance(error, _FOLLOWING) and _recorded:
        return _take(_recorded[-1][0])
    return None


@contextmanager
def translated() -> Iterator[None]:
    """Within it a lost peer is the same HorovodInternalError as in torch; every other error is itself."""
    try:
        yield
    except Exception as error:
        original = lost_peer(error)
        if original is None or original is error:
            raise
        raise original from error


def _take(number: int) -> HorovodInternalError | None:
    """Forget it, and those before it: each belongs to a world that is over."""
    found = dict(_recorded).get(number)
    later = [entry for entry in _recorded if entry[0] > number]
    _recorded.clear()
    _recorded.extend(later)
    return found


def _chain(error: BaseException) -> Iterator[BaseException]:
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__  # type: ignore[assignment]  # not __context__: what is raised meanwhile is news


def _first_line(error: BaseException) -> str:
    return next(iter(line for line in str(error).splitlines() if _TOKEN.search(line)), str(error))
