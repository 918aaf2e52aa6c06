"""A state whose values are kept by handlers, one kind of value each; the frontends say which handler for which kind."""

from __future__ import annotations

import hashlib
import pickle
import secrets
import sys
from typing import Any

from spark_elastic.collective.calls import agree
from spark_elastic.collective.process import process
from spark_elastic.elastic import state as base
from spark_elastic.elastic.frontend import frontend
from spark_elastic.elastic.handled_values import Described, StateHandler, described, take_over, take_up
from spark_elastic.errors import StateNotMovableError
from spark_elastic.membership.topology import StateVersion


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
    _only_optimizers_act = False
    """Whether it is known of the loop that nothing but optimizers of this state changes tensors, and that all plain
    values change after the step: true of loops of this package."""

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
        self._known: dict[str, Described] | None = None
        """While a state is taken over whose tensors are probably the same: what is known of them."""
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
        follow = self.__dict__.get("_follow")
        if follow is not None and follow.follows(name):
            caller = sys._getframe(1)
            follow.assigned(name, self.__dict__.get(name), value, (caller.f_code.co_filename, caller.f_lineno))
        super().__setattr__(name, value)

    # --- what users call ------------------------------------------------------------------------

    def save(self) -> None:
        for handler in self._handlers.values():
            handler.save()
        super().save()

    def restore(self) -> None:
        for handler in self._handlers.values():
            handler.restore()
        super().restore()

    def sync(self) -> None:
        """Take over the state of the most advanced member, or of rank 0 when called in the loop, and commit it."""
        staged = self._version is not None
        handlers = {name: h for name, h in self._handlers.items() if name not in self._own_style()}
        extra = self._plain_values(), self._tell(), self._follow.learnt
        values, told, learnt = take_over(handlers, self._root, extra, staged, known=self._known)
        for name in self._own_style():
            self._handlers[name].sync()
        self._put_plain_values(values)
        self._follow.learn_from(learnt)
        self._told(told)
        if not self._entering:  # the user's own call
            self._commit_here()

    def _take_up_more(self, kept: base.ObjectState) -> None:
        assert isinstance(kept, HandledState)
        foreign = [type(self._handlers[name]).__qualname__ for name in self._own_style()]
        if foreign:
            raise StateNotMovableError(kind=foreign[0])
        take_up({name: (h, kept._handlers[name]) for name, h in self._handlers.items() if name in kept._handlers})
        self._told(kept._tell())

    def _tell(self) -> Any:
        """What the root tells everybody with its state."""
        return None

    def _told(self, told: Any) -> None:
        """What the root has told; the same on every member, the root too."""

    def reset(self) -> None:
        for handler in self._handlers.values():
            handler.reset()

    # --- what the loop calls --------------------------------------------------------------------

    def _refresh_from(self, root: int, version: StateVersion | None) -> None:
        own_style = self._own_style()
        known = described({name: handler for name, handler in self._handlers.items() if name not in own_style})
        if not own_style and agree(process.group(), "elastic loop", detail=self._digest(known)):
            return
        # without a copy of everything: the last commit is the same one on every member, and as good as before
        saved = self._saved_version
        self._known = known
        try:
            self._take_over_from(root, version)
        finally:
            self._known = None
        self._saved_version = saved

    def _digest(self, known: dict[str, Described]) -> str:
        """Return a digest of everything in which members may differ: tensors, light values and what the root tells.

        known: what `described` says of the tensors. Equal digests mean equal states; states that cannot be pickled get
        a random digest, equal to no other.
        """
        try:
            told = pickle.dumps((known, self._light_values(), self._tell()))
        except Exception:  # of a value that is no plain data; what cannot be sent either says so itself
            return secrets.token_hex(16)
        return hashlib.blake2b(told, digest_size=16).hexdigest()

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
        self._follow.end()
