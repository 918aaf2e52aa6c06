"""The state of an elastic loop, which is kept when the world changes.

`State` is Horovod's contract for users' own states. `ElasticState` is composed of the `Handlers` of its values, the
framework's `OptimizerSteps` (`mark`), and the plain values of the last mark. The elastic loop calls the methods under
"called by the loop".
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

from spark_elastic.elastic.frontend import CollectiveFrontend, frontend
from spark_elastic.elastic.handlers import Handlers, StateHandler
from spark_elastic.elastic.mark import OptimizerSteps, StepCounter, running_loop
from spark_elastic.elastic.plain_values import independent_copy
from spark_elastic.errors import HorovodInternalError, HostsUpdatedInterrupt, StateNotMovableError, UsageError
from spark_elastic.membership.topology import StateVersion

log = logging.getLogger("spark_elastic.elastic.state")


class State:
    """Base of users' own states, which return to their last commit when a collective fails.

    Subclass it with `save`, `restore` and `sync`, as with Horovod.

    Args:
        bcast_object: Broadcasts an object from rank 0; default: this package's.
        get_rank: Returns the rank of this process; default: this package's.
    """

    _frontend: CollectiveFrontend = frontend
    _sync_is_atomic = False
    """`sync` sets values only after all have arrived; else the saved state is restored when it has failed."""

    def __init__(
        self, bcast_object: Callable[..., Any] | None = None, get_rank: Callable[[], int] | None = None
    ) -> None:
        self._bcast_object = bcast_object or self._broadcast
        self._rank = get_rank or (lambda: self._frontend.rank())
        self._reset_callbacks: list[Callable[[], Any]] = []
        self._counter = StepCounter(lambda version: self._frontend.report_version(version))
        self._root = 0
        self._loop = 1
        self._entering = False

    # --- called by users ------------------------------------------------------------------------

    def register_reset_callbacks(self, callbacks: Iterable[Callable[[], Any]]) -> None:
        """Register functions without arguments to call each time the world has changed, before `sync`.

        A newcomer may not call them, and no member waits for another: collectives in them return the member's own
        values, and steps that they train are not counted.
        """
        self._reset_callbacks.extend(callbacks)

    def commit(self) -> None:
        """Make the present state the one that `restore` returns to, then check for updated hosts.

        Raises:
            HostsUpdatedInterrupt: The world is about to change; on every member at the same commit.
        """
        self.commit_here()
        self.leave_if_updated()

    def check_host_updates(self) -> None:
        """Mark the present state, then leave the loop if the world is about to change; no parameter is copied.

        After a loss, training resumes from here if nothing has changed since: only the interrupted step is done again.

        Raises:
            HostsUpdatedInterrupt: The world is about to change; on every member at the same check.
        """
        self.mark_here()
        self.leave_if_updated()

    def commit_here(self) -> None:
        """Commit without the check for updated hosts; does nothing in the middle of a step."""
        if self._may_mark():
            self._commit()
            if self._frontend.checkpoints is not None and self._counter.in_loop:
                self._frontend.checkpoints.write(self, self._frontend.rank())

    def mark_here(self) -> None:
        """Mark the present state without the check for updated hosts; does nothing in the middle of a step."""
        if self._may_mark():
            self._counter.advance()

    def leave_if_updated(self) -> None:
        """Raise HostsUpdatedInterrupt, on every member at the same call, if the world is about to change."""
        if self._frontend.agree_on_update():
            raise HostsUpdatedInterrupt()

    def on_reset(self) -> None:
        """Handle a change of the world, before the state is synchronised."""
        self.reset()
        for callback in self._reset_callbacks:
            callback()

    def on_hosts_updated(self, timestamp: Any, update_res: Any) -> None:
        """Do nothing; part of Horovod's contract, and this package announces updated hosts in another way."""

    # --- defined by subclasses ------------------------------------------------------------------

    def save(self) -> None:
        """Copy the state, for `restore`."""
        raise NotImplementedError

    def restore(self) -> None:
        """Return to what `save` copied."""
        raise NotImplementedError

    def sync(self) -> None:
        """Make the state of all members equal to that of one member."""
        raise NotImplementedError

    def reset(self) -> None:
        """Adapt whatever depends on the rank or the size; does nothing by default."""

    def _may_mark(self) -> bool:
        """Return True if this can be a commit or a mark; the steps of reset callbacks are not counted."""
        if running_loop.get() not in (None, self._counter):
            raise UsageError(
                "commit() or check_host_updates() was called for a state other than the state of the loop; it would "
                "neither return to its commit after a loss nor reach newcomers: give its values to the loop's state"
            )
        if self._counter.in_loop and not self._counter.alone and HorovodInternalError.last_message is not None:
            raise HorovodInternalError(HorovodInternalError.last_message)
        return not self._counter.alone

    def _commit(self) -> None:
        self._counter.advance()
        self.save()
        self._counter.saved_version = self._counter.version

    # --- called by the loop ---------------------------------------------------------------------

    @property
    def progress(self) -> int | None:
        """Optimizer steps so far (without an optimizer: commits and checks); None before the first synchronisation."""
        version = self.version
        return None if version is None else version.steps

    @property
    def version(self) -> StateVersion | None:
        """The version by which members find the most advanced state; None before the first synchronisation."""
        return self._counter.version

    def _before_joining(self) -> None:
        """Do in advance what takes long in a newcomer's first step, such as tracing; a synchronisation follows."""

    def _reset_alone(self) -> None:
        """Call `on_reset` with local collectives, and count no steps: the sync that follows makes all states equal."""
        self._counter.alone = True
        try:
            with self._frontend.alone():
                self.on_reset()
        finally:
            self._counter.alone = False

    def _sync_from(self, root: int, version: StateVersion | None, equal: bool) -> None:
        """Take over the state of the member `root` and save it; `equal`: all members have reported this version."""
        self._take_over_from(root, version)
        self.save()  # a user's `sync` may not save

    def _take_over_from(self, root: int, version: StateVersion | None) -> None:
        self._root = root
        self._entering = True
        try:
            self.sync()
        except HorovodInternalError:
            if not self._sync_is_atomic:
                self.restore()
            raise
        finally:
            self._root = 0
            self._entering = False
        if version is None or version.loop < self._loop:  # the version is of the loop before, and this one begins
            version = StateVersion(self._loop)
        self._counter.set(version)
        self._counter.saved_version = version

    def _function_begins(self) -> None:
        """Prepare for a call of the function; all members hold the same state now."""

    def _recover(self, error: HorovodInternalError) -> None:
        """Return the state to a point from which training can resume, after a collective has failed in the loop."""
        self.restore()
        self._counter.version = self._counter.saved_version

    def _interrupted(self) -> None:
        """Prepare for the next world after `HostsUpdatedInterrupt` has ended the function, at a mark."""

    def _loop_over(self) -> None:
        """Stop observing the loop, which has returned or raised."""
        self._counter.in_loop = False

    def _copy_from(self, kept: Any) -> None:
        """Take over the saved values of `kept`, the state of the same loop in an earlier call of the user's function.

        `sync`, which the user has defined, is called on both states: `kept.sync` broadcasts, and `self.sync` receives.

        Raises StateNotMovableError if `sync` broadcasts without `bcast_object`.
        """
        sent: list[Any] = []

        def send(value: Any, *_: Any, **__: Any) -> Any:
            sent.append(independent_copy(value))
            return value

        def receive(*_: Any, **__: Any) -> Any:
            if not sent:
                raise StateNotMovableError(kind=type(self).__qualname__)
            return sent.pop(0)

        kept.restore()
        kept._bcast_object, own, self._bcast_object = send, self._bcast_object, receive
        kept.sync()
        if not sent:
            raise StateNotMovableError(kind=type(self).__qualname__)
        self.sync()
        self._bcast_object = own
        self._counter.version = kept._counter.version
        self.save()

    # --- called for checkpoints -----------------------------------------------------------------

    def _values(self) -> dict[str, Any]:
        """Return all values: plain values and, under another key, the state's own tensors. Raises UsageError."""
        raise UsageError(
            f"a {type(self).__qualname__} has a save and restore of its own, so its values cannot be written to a "
            "checkpoint; keep them in a TorchState, KerasState, TensorFlowState or ObjectState, or leave out "
            "checkpoint_dir"
        )

    def _set_values(self, values: Any) -> None:
        """Set what `_values` has returned. Raises ValueError if this state has other values."""
        raise NotImplementedError

    def _broadcast(self, value: Any, root_rank: int | None = None) -> Any:
        return self._frontend.broadcast_object(value, self._root if root_rank is None else root_rank)


class ElasticState(State):
    """A state of models, optimizers and plain values, each an attribute, which marks spare most returns to the commit.

    `handler_for` returns the handler which copies and synchronises a value, or None for a plain Python value, which
    must be picklable; `steps` creates the framework's `OptimizerSteps`.
    """

    _sync_is_atomic = True

    def __init__(
        self,
        handler_for: Callable[[Any], StateHandler | None],
        steps: Callable[[Handlers, StepCounter], OptimizerSteps],
        values: Mapping[str, Any],
    ) -> None:
        super().__init__()
        self._handlers = Handlers(self, handler_for, values)
        self._steps = steps(self._handlers, self._counter)
        self._mark: tuple[dict[str, Any], dict[str, Any]] | None = None
        """Copies of the light parts and of the plain values at the last mark; None if that was a commit."""
        self._root_unbuilt = False
        """True if a model was not built at the root at the last synchronisation, so its variables were not sent."""
        for name in self._handlers.by_name:
            self._steps.attach(name)
        self.save()

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any: ...

    def __setattr__(self, name: str, value: Any) -> None:
        handlers: Handlers | None = self.__dict__.get("_handlers")
        handler = handlers.by_name.get(name) if handlers is not None else None
        if handler is None and handlers is not None and handlers.add(name, value, self._counter.in_loop):
            handler = handlers.by_name[name]
        elif handler is None or value is handler.value:
            object.__setattr__(self, name, value)
            return
        handler.set_value(value)
        object.__setattr__(self, name, value)
        self._mark = None  # it has nothing of the new value
        self._steps.attach(name)

    @property
    def version(self) -> StateVersion | None:
        self._steps.count()
        return self._counter.version

    # --- called by users ------------------------------------------------------------------------

    def commit(self) -> None:
        self._refuse_if_always_in_a_step()
        super().commit()

    def check_host_updates(self) -> None:
        self._refuse_if_always_in_a_step()
        super().check_host_updates()

    def _refuse_if_always_in_a_step(self) -> None:
        """Raise UsageError if commits and checks come only in the middle of a step, where they do nothing."""
        passes = self._steps.passes_begun()
        self._steps.refused = self._steps.refused + 1 if passes else 0
        if self._steps.refused > 2 * passes:
            raise UsageError(
                f"the last {self._steps.refused} calls of state.commit() or state.check_host_updates() came between "
                "loss.backward() and optimizer.step(), where a training cannot be resumed; call them after "
                "optimizer.step()"
            )

    def mark_here(self) -> None:
        if self._may_mark():
            self._count_mark()
            self._set_mark()

    def leave_if_updated(self) -> None:
        """As for `State`; does nothing in the middle of a step."""
        if not self._steps.passes_begun():
            super().leave_if_updated()

    def save(self) -> None:
        self._steps.count()
        self._handlers.save()
        self._counter.saved_version = self._counter.version

    def restore(self) -> None:
        self._steps.count()
        self._handlers.restore()
        self._mark = None
        if self._counter.saved_version is not None:
            self._counter.set(self._counter.saved_version)
        self._steps.count(replaced=True)

    def sync(self) -> None:
        """Take over the state of the most advanced member (when called in the loop: of rank 0), and commit it."""
        self._steps.count()
        staged = self._counter.version is not None
        self._root_unbuilt = self._handlers.sync(self._root, self._handlers.has_unbuilt, staged=staged)
        self._steps.count(replaced=True)
        if not self._entering:
            self._commit()

    def sync_if_built_late(self) -> None:
        """Take over variables of a model that the root had built after `sync`; all members call it after each batch."""
        if self._root_unbuilt:
            self.sync()
            self._root_unbuilt = False
            self.save()

    def reset(self) -> None:
        for handler in self._handlers.by_name.values():
            handler.reset()

    # --- called by the loop ---------------------------------------------------------------------

    def _sync_from(self, root: int, version: StateVersion | None, equal: bool) -> None:
        if not equal:
            super()._sync_from(root, version, equal)
        elif not self._handlers.agree_that_equal():
            # no save: the last commit is the same on every member, and stays valid
            saved = self._counter.saved_version
            self._take_over_from(root, version)
            self._counter.saved_version = saved

    def _function_begins(self) -> None:
        self._set_mark()

    def _recover(self, error: HorovodInternalError) -> None:
        """Return to the last mark if nothing has changed since; otherwise to the last commit."""
        light, plain = self._mark or ({}, {})
        changed = self._steps.undo(plain)
        if self._mark is None:
            changed = "it is also the last mark"
        elif unobserved := self._handlers.unobserved:
            changed = f"changes of {', '.join(unobserved)} are not observed"
        if changed:
            log.info("resuming from the last commit: %s", changed)
            self.restore()
        else:
            log.info("resuming from the last mark: nothing has changed since")
            self._handlers.assign_light_values((light, plain))

    def _interrupted(self) -> None:
        self._steps.undo({})

    def _copy_from(self, kept: Any) -> None:
        kept.restore()
        self._steps.count()
        self._handlers.copy_from(kept._handlers)
        self._root_unbuilt = kept._handlers.has_unbuilt
        self._steps.count(replaced=True)
        self._counter.version = kept._counter.version
        self.save()

    def _values(self) -> dict[str, Any]:
        return self._handlers.values() if type(self).save is ElasticState.save else super()._values()

    def _set_values(self, values: Any) -> None:
        self._handlers.set_values(values)
        self._steps.count(replaced=True)

    # --- marks ----------------------------------------------------------------------------------

    def _may_mark(self) -> bool:
        # in the middle of a step, batches would count as done whose gradients are lost by a failure
        may = super()._may_mark() and not self._steps.passes_begun()
        if may and self._counter.in_loop:
            self._steps.check()
        return may

    def _commit(self) -> None:
        self._count_mark()
        self.save()
        self._set_mark(committed=True)

    def _count_mark(self) -> None:
        if self._counter.steps:  # optimizers count the steps, and this is a mark between two
            self._counter.mark()
        else:
            self._counter.advance()

    def _set_mark(self, committed: bool = False) -> None:
        """Mark the present state: copy the plain values and light parts, unless `save` has just copied everything."""
        self._steps.count()
        self._mark = None if committed else self._handlers.light_values()
        self._counter.steps = dict.fromkeys(self._counter.steps, 0)
        self._steps.mark()
