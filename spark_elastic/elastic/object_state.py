"""A state of plain Python values, for loops without a framework and for users' own subclasses."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from spark_elastic.elastic.plain_values import PlainAttributes
from spark_elastic.elastic.state import State


class ObjectState(State):
    """Plain Python values, each a keyword argument and then an attribute. They must be picklable.

    Args:
        bcast_object: Broadcasts an object from rank 0; default: this package's.
        get_rank: Returns the rank of this process; default: this package's.
        kwargs: The values.
    """

    def __init__(
        self,
        bcast_object: Callable[..., Any] | None = None,
        get_rank: Callable[[], int] | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(bcast_object, get_rank)
        self._plain = PlainAttributes(self, kwargs)
        for name, value in kwargs.items():
            setattr(self, name, value)
        self._plain.save()

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any: ...
        def __setattr__(self, name: str, value: Any) -> None: ...

    def save(self) -> None:
        self._plain.save()
        self._counter.saved_version = self._counter.version

    def restore(self) -> None:
        self._plain.restore()
        if self._counter.saved_version is not None:
            self._counter.set(self._counter.saved_version)

    def sync(self) -> None:
        if self._plain.names:
            self._plain.assign(self._bcast_object(self._plain.copies()))
            self._plain.save()
        if not self._entering:
            self._commit()

    def _take_up(self, kept: Any) -> None:
        kept.restore()
        self._plain.take_up(kept._plain)
        self._counter.version = kept._counter.version
        self.save()

    def _sync_failed(self) -> None:
        """Do nothing: values are set only after they have arrived."""
