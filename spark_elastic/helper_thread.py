"""The threads that connect worlds and wait in them on behalf of another thread."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any


class HelperThread(threading.Thread):
    """A daemon thread of this package that may outlive its world.

    So no loop counts its errors as its own. It hands them to the thread that it helps, if that still waits.
    """

    def __init__(self, target: Callable[..., object], name: str, args: Sequence[Any] = ()) -> None:
        super().__init__(target=target, name=f"spark_elastic-{name}", args=tuple(args), daemon=True)
