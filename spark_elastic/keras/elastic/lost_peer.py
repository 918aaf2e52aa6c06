"""A lost peer, in whatever the backend has made of it on its way out of a training loop."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

from spark_elastic.keras.backend import BACKEND

P = ParamSpec("P")
R = TypeVar("R")


def with_lost_peers_named(func: Callable[P, R]) -> Callable[P, R]:
    """`func`, raising a lost peer as HorovodInternalError and every other error as it is."""
    if BACKEND == "torch":
        return func  # nothing wraps it there
    from spark_elastic.tensorflow.host import translated

    @functools.wraps(func)
    def named(*args: P.args, **kwargs: P.kwargs) -> R:
        with translated():
            return func(*args, **kwargs)

    return named
