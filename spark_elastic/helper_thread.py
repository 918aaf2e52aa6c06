"""The threads that connect worlds and wait in them on behalf of another thread."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any


class HelperThread(threading.Thread):
    """A daemon thread of this package, whose errors no loop counts as its own: it may outlive its world."""

    def __init__(self, target: Callable[..., object], name: str, args: Sequence[Any] = ()) -> None:
        super().__init__(target=target, name=f"spark_elastic-{name}", args=tuple(args), daemon=True)
