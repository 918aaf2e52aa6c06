"""The state of plain Python values for elastic loops."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from spark_elastic.elastic.plain_values import PlainAttributes, check_names, check_same_names, unpicklable_named
from spark_elastic.elastic.state import State


class ObjectState(State):
    """A state of plain, picklable Python values, each a keyword argument and then an attribute.

    Args:
        bcast_object: As for `State`.
        get_rank: As for `State`.
        kwargs: The values.
    """

    _sync_is_atomic = True

    def __init__(
        self, bcast_object: Callable[..., Any] | None = None, get_rank: Callable[[], int] | None = None, **kwargs: Any
    ) -> None:
        super().__init__(bcast_object, get_rank)
        check_names(self, kwargs)
        self._plain = PlainAttributes(self, kwargs)
        for name, value in kwargs.items():
            setattr(self, name, value)
        self._plain.save()

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any: ...

    def __setattr__(self, name: str, value: Any) -> None:
        plain: PlainAttributes | None = self.__dict__.get("_plain")
        if plain is not None and name not in plain.names and plain.is_new(name):
            plain.add(name, value)
        object.__setattr__(self, name, value)

    def save(self) -> None:
        self._plain.save()
        self._counter.saved_version = self._counter.version

    def restore(self) -> None:
        self._plain.restore()
        if self._counter.saved_version is not None:
            self._counter.set(self._counter.saved_version)

    def sync(self) -> None:
        with unpicklable_named(self._plain.copies):
            values = self._bcast_object(self._plain.copies())
        self._plain.assign(values)
        self._plain.save()
        if not self._entering:
            self._commit()

    def _copy_from(self, kept: Any) -> None:
        kept.restore()
        self._plain.copy_from(kept._plain)
        self._counter.version = kept._counter.version
        self.save()

    def _values(self) -> dict[str, Any]:
        return {"light": self._plain.copies()} if type(self).save is ObjectState.save else super()._values()

    def _set_values(self, values: Any) -> None:
        check_same_names(self._plain.names, values["light"])
        self._plain.assign(values["light"])
