"""The one place that looks at the call stack, for facts that no interface tells."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any


def calling_line(above: int) -> tuple[str, int]:
    """Return file and line of a function on the call stack.

    An assignment to a state is undone only if it was made on the same line as before, see `undo_log`.

    Args:
        above: Calls between that function and the one that asks; 1 is the caller of the one that asks.
    """
    frame = sys._getframe(above + 1)
    return frame.f_code.co_filename, frame.f_lineno


def calling_object(matches: Callable[[Any], bool], within: int) -> Any:
    """Return the object whose method called the one that asks, directly or through a few others.

    Keras gives a callback neither its list nor a data adapter the iterator that counts its batches, and a `DataLoader`
    does not give its sampler the batch size; those objects are the callers.

    Args:
        matches: Recognises the object.
        within: Calls to look at, the nearest first.

    Returns:
        The `self` of the nearest method that matches; None if there is none.
    """
    frame: Any = sys._getframe(2)
    for _ in range(within):
        if frame is None:
            return None
        owner = frame.f_locals.get("self")
        if owner is not None and matches(owner):
            return owner
        frame = frame.f_back
    return None
