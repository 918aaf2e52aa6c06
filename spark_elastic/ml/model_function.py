"""A model that is given as a function: what the function is called with, and what it may return."""

from __future__ import annotations

import inspect
import random
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from spark_elastic.errors import InvalidSettingsError

FORM = "model=lambda shapes: Net(shapes[0][1])"
"""An example of the setting, for error messages."""
Shapes = tuple[tuple[int, ...], ...]
"""The shape of each input as the model gets it. The first axis, the rows of a batch, is -1."""


def is_function(given: Any) -> bool:
    """Return whether a setting is a function or class, and no layer, module or other object of a framework."""
    frameworks = ("torch.", "keras.", "tf_keras.")
    return callable(given) and not any(each.__module__.startswith(frameworks) for each in type(given).__mro__)


def call(function: Callable[..., Any], shapes: Shapes, kind: type, kind_name: str) -> Any:
    """Return the model that a function makes. Raise InvalidSettingsError if it raises, or returns something else."""
    name, arguments = name_of(function), (list(shapes),) if takes_shapes(function) else ()
    called = f"with the shapes {arguments[0]}" if arguments else "without arguments"
    try:
        made: Any = function(*arguments)
    except Exception as error:
        below = error.__traceback__
        raise InvalidSettingsError(
            f"model={name}, which is called {called}, raised {type(error).__name__}: {error}"
        ) from error.with_traceback(below and below.tb_next)  # the frames of the user's function
    if not isinstance(made, kind):
        raise InvalidSettingsError(
            f"model={name} must return a {kind_name}; called {called}, it returned {made!r:.200}"
        )
    return made


def name_of(function: Any) -> str:
    return str(getattr(function, "__qualname__", None) or type(function).__name__)


def takes_shapes(function: Callable[..., Any]) -> bool:
    """Return whether a function is called with the shapes; raise InvalidSettingsError if it needs more arguments."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # builtins have no signature
        return True
    variable = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    needed = [each for each in parameters if each.default is each.empty and each.kind not in variable]
    if len(needed) > 1 or any(each.kind is each.KEYWORD_ONLY for each in needed):
        name, names = name_of(function), ", ".join(each.name for each in needed)
        raise InvalidSettingsError(
            f"model={name} needs {names}, and is called with the shapes of the inputs, or without arguments; give the "
            f"others yourself: model=lambda shapes: {name}(...)"
        )
    return bool(needed)


_seeding = threading.RLock()


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Seed the random numbers of Python and numpy within the block, and put them back after it.

    One thread at a time: the fits of a CrossValidator call functions in several.
    """
    with _seeding:
        before = random.getstate(), np.random.get_state()
        random.seed(seed)
        np.random.seed(seed % (1 << 32))
        try:
            yield
        finally:
            random.setstate(before[0])
            np.random.set_state(before[1])
