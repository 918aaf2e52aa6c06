"""The traceback of an exception in the user's function, reduced to the frames in which the user can look for it."""

from __future__ import annotations

import functools
import os
import sysconfig
import traceback
from collections.abc import Callable, Iterator, Sequence
from typing import ParamSpec, TypeVar

from spark_elastic.errors import SparkElasticError

_P = ParamSpec("_P")
_R = TypeVar("_R")

ALL_FRAMES_SETTING = "SPARK_ELASTIC_ALL_FRAMES"
"""The environment variable by which the driver asks for tracebacks with all frames (`verbose=2`)."""
_PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_INSTALLED = ("site-packages", "dist-packages")
_STANDARD_LIBRARY = sysconfig.get_path("stdlib") + os.sep


def format_error(error: BaseException, *, all_frames: bool) -> str:
    """Return an exception as Python prints it, with its causes.

    Without `all_frames` there are no frames of this package, and none of other packages above the first of the user's:
    the calls of a framework between `fit` and a loss function tell nothing about the function. Calls that the user's
    own code makes are shown. A traceback without any frame of the user's keeps those of other packages.
    """
    try:
        described = traceback.TracebackException.from_exception(error)
    except Exception:  # attributes are read, and a __getattr__ of the user's own class may raise
        frames = traceback.extract_tb(error.__traceback__)
        lines = (frames if all_frames else _users(frames)).format()
        return "".join(["Traceback (most recent call last):\n", *lines, f"{type(error).__qualname__}\n"])
    if not all_frames:
        for each in _chain(described):
            each.stack = _users(each.stack)
    return "".join(described.format())


def _chain(error: traceback.TracebackException) -> Iterator[traceback.TracebackException]:
    """Yield an exception, its causes, its contexts and the members of groups."""
    left = [error]
    while left:  # no recursion: a loop of retries that chains its errors makes a chain of any length
        each = left.pop()
        yield each
        left += [other for other in (each.__cause__, each.__context__) if other is not None]
        left += getattr(each, "exceptions", None) or ()


def _users(frames: Sequence[traceback.FrameSummary]) -> traceback.StackSummary:
    others = [frame for frame in frames if not frame.filename.startswith(_PACKAGE)]
    first = next((at for at, frame in enumerate(others) if not _is_installed(frame.filename)), 0)
    # a traceback without any other frame than ours is one of a fault in this package
    return traceback.StackSummary.from_list(others[first:] or list(frames))


def is_users(file: str) -> bool:
    """Return whether a file is neither of this package nor of an installed one."""
    return not file.startswith(_PACKAGE) and not _is_installed(file)


def _is_installed(file: str) -> bool:
    return file.startswith((_STANDARD_LIBRARY, "<frozen ")) or any(part in file.split(os.sep) for part in _INSTALLED)


def without_own_frames(shown: Callable[..., bool]) -> Callable[[Callable[_P, _R]], Callable[_P, _R]]:
    """Decorate a function that users call: errors have no frames below the caller's, unless `shown(*args)` is true."""

    def decorate(function: Callable[_P, _R]) -> Callable[_P, _R]:
        @functools.wraps(function)
        def called(*args: _P.args, **kwargs: _P.kwargs) -> _R:
            __tracebackhide__ = True  # IPython leaves out such frames
            try:
                return function(*args, **kwargs)
            except (SparkElasticError, KeyboardInterrupt) as error:
                if shown(*args, **kwargs):
                    raise
                raise error.with_traceback(None) from error.__cause__

        return called

    return decorate
