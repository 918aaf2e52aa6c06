"""The one place that looks at the call stack, for facts that no interface gives."""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterator
from types import FrameType
from typing import Any


def is_called_by(function: str) -> bool:
    """Return True if the one that asks was called by a function of this name."""
    return sys._getframe(2).f_code.co_name == function


def _calling_methods(within: int) -> Iterator[FrameType]:
    """Yield the frames of methods among the callers of a function that asks through a function of this module."""
    frame: FrameType | None = sys._getframe(3)
    for _ in range(within):
        if frame is None:
            return
        if frame.f_locals.get("self") is not None:
            yield frame
        frame = frame.f_back


def calling_object(matches: Callable[[Any], bool], within: int, method: str | None = None) -> Any:
    """Return the object whose method (any, or the one named) called the one that asks; None if none `matches`.

    The nearest `within` calls are looked at. Keras gives a callback no access to its list, a data adapter none to the
    iterator that counts its batches, and an optimizer none to the optimizer around it; a `DataLoader` does not give its
    sampler the batch size. In each case the wanted object is among the callers.
    """
    for frame in _calling_methods(within):
        if method in (None, frame.f_code.co_name) and matches(frame.f_locals["self"]):
            return frame.f_locals["self"]
    return None


def calling_method(matches: Callable[[Any], bool], names: Collection[str], within: int) -> tuple[str, dict[str, Any]]:
    """Return the name and variables of a method with one of these `names`, of the object of `calling_object`.

    Keras gives an object that `fit` is called with none of the other arguments of `fit`. If no method matches, the
    answer is ("", {}).
    """
    for frame in _calling_methods(within):
        if frame.f_code.co_name in names and matches(frame.f_locals["self"]):
            return frame.f_code.co_name, dict(frame.f_locals)
    return "", {}
