"""A state whose values are kept by handlers, one kind of value each; the frontends say which handler for which kind."""

from __future__ import annotations

from typing import Any

from spark_elastic import state as base
from spark_elastic.collective.frontend import frontend
from spark_elastic.collective.handled_values import StateHandler, take_over


class State(base.State):
    """A state of your own: define `save`, `restore` and `sync`."""

    _frontend = frontend


class ObjectState(base.ObjectState):
    """Plain Python values, each a keyword argument and then an attribute."""

    _frontend = frontend


class HandledState(base.SteppingState):
    """Values of a framework and plain ones, each a keyword argument and then an attribute.

    A subclass says in `_handler_for` how a value is kept; what has no handler is a plain Python value, which must be
    picklable.
    """

    _frontend = frontend

    def __init__(self, **values: Any) -> None:
        self._handlers: dict[str, StateHandler] = {}
        plain = {}
        for name, value in values.items():
            handler = self._handler_for(value)
            if handler is None:
                plain[name] = value
            else:
                self._handlers[name] = handler
                object.__setattr__(self, name, value)
        self._saved_progress: int | None = None
        self._unfinished = False
        super().__init__(**plain)

    # --- what a framework adds ------------------------------------------------------------------

    def _handler_for(self, value: Any) -> StateHandler | None:
        raise NotImplementedError

    def _replaced(self, name: str) -> None:
        """A handled value was set to another one."""

    def __setattr__(self, name: str, value: Any) -> None:
        handler = self.__dict__.get("_handlers", {}).get(name)
        if handler is not None and value is not handler.value:
            handler.set_value(value)
            super().__setattr__(name, value)
            self._replaced(name)
            return
        super().__setattr__(name, value)

    # --- what users call ------------------------------------------------------------------------

    def save(self) -> None:
        self._begin_save()
        self._finish_save()

    def commit(self) -> None:
        """Make the present state the one that `restore` returns to, then check for updated hosts.

        Inside the elastic loop the parameters are copied a little later: while the next gradients are on their way
        and this process would only wait, which is before anything changes them.

        Raises: HostsUpdatedInterrupt: the world is about to change; on every member at the same commit.
        """
        if not self._in_loop or type(self).save is not HandledState.save:
            super().commit()
            return
        self._begin_save()
        self._committed()
        self._resume_values = {name: h._light for name, h in self._handlers.items()}, self._saved_values
        self._start_counting()
        self._check_host_updates()

    def _begin_save(self) -> None:
        for handler in self._handlers.values():
            handler.begin_save() if type(handler).save is StateHandler.save else handler.save()
        super().save()
        self._saved_progress = self._progress
        self._unfinished = True

    def _finish_save(self) -> None:
        if self._unfinished:
            self._unfinished = False
            for handler in self._handlers.values():
                handler.finish_save()

    def restore(self) -> None:
        self._finish_save()
        for handler in self._handlers.values():
            handler.restore()
        super().restore()
        if self._saved_progress is not None:
            self._set_progress(self._saved_progress)

    def sync(self) -> None:
        """Take over the state of the most advanced member."""
        staged = self._progress is not None
        handlers = {name: h for name, h in self._handlers.items() if name not in self._own_style()}
        values, told = take_over(handlers, self._root, (self._plain_values(), self._tell()), staged)
        for name in self._own_style():
            self._handlers[name].sync()
        self._put_plain_values(values)
        self._told(told)

    def _tell(self) -> Any:
        """What the root tells everybody with its state."""
        return None

    def _told(self, told: Any) -> None:
        """What the root has told; the same on every member, the root too."""

    def reset(self) -> None:
        for handler in self._handlers.values():
            handler.reset()

    # --- what the loop calls --------------------------------------------------------------------

    def _sync_from(self, root: int, progress: int | None) -> None:
        super()._sync_from(root, progress)
        self.save()

    def _own_style(self) -> list[str]:
        """Handlers that bring a `sync` of their own, as Horovod's do."""
        return [name for name, handler in self._handlers.items() if type(handler).sync is not StateHandler.sync]

    def _light_values(self) -> Any:
        return {name: handler.light() for name, handler in self._handlers.items()}, self._plain_values()

    def _put_light_values(self, values: Any) -> None:
        light, plain = values
        for name, part in light.items():
            self._handlers[name].set_light(part)
        self._put_plain_values(plain)

    def _left_loop(self) -> None:
        self._finish_save()
