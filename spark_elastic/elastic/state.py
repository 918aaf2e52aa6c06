"""States that outlive a change of the world: those of users, and those whose values a framework's optimizers train.

`State` is Horovod's contract for users' own states. `ElasticState` is composed of the `Handlers` of its values, a
`StepCounter`, the last `ResumePoint`, and two strategies of its framework: `OptimizerSteps` and a `LoopWatch`. The
elastic loop (`loop`) calls the methods under "called by the loop".
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from spark_elastic.elastic.call_stack import calling_line
from spark_elastic.elastic.frontend import CollectiveFrontend, frontend
from spark_elastic.elastic.handlers import Descriptions, Handlers, StateHandler
from spark_elastic.elastic.plain_values import independent_copy
from spark_elastic.elastic.recovery import Failure, Recovery, decide
from spark_elastic.elastic.steps import LoopWatch, OptimizerSteps, StepCounter
from spark_elastic.errors import HorovodInternalError, HostsUpdatedInterrupt, StateNotMovableError
from spark_elastic.membership.topology import StateVersion

log = logging.getLogger("spark_elastic.elastic.state")


class ResumePoint(NamedTuple):
    """The last point at which training can resume with the tensors as they are.

    Attributes:
        committed: It was a commit, so there is a copy of the tensors as well.
        light: The light and plain values there; None after a commit, which has copied them.
    """

    committed: bool = False
    light: Any = None


class State:
    """Something to keep across worlds. Subclass it with `save`, `restore` and `sync`, as with Horovod.

    Such a state returns to its last commit when a collective fails.

    Args:
        bcast_object: Broadcasts an object from rank 0; default: this package's.
        get_rank: Returns the rank of this process; default: this package's.
    """

    _frontend: CollectiveFrontend = frontend

    def __init__(
        self,
        bcast_object: Callable[..., Any] | None = None,
        get_rank: Callable[[], int] | None = None,
    ) -> None:
        self._bcast_object = bcast_object or self._broadcast
        self._rank = get_rank or self._frontend_rank
        self._reset_callbacks: list[Callable[[], Any]] = []
        self._counter = StepCounter(lambda version: self._frontend.report_version(version))
        self._root = 0
        self._loop = 1
        self._entering = False

    # --- called by users ------------------------------------------------------------------------

    def register_reset_callbacks(self, callbacks: Iterable[Callable[[], Any]]) -> None:
        """Register functions to call each time the world has changed, before the state is synchronised.

        A newcomer may not call them, and no member waits for another: their collectives return each member's own
        values, and the steps that they train are not counted.

        Args:
            callbacks: Functions without arguments.
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
        """Leave the loop if the world is about to change. Cheaper than a commit: no tensor is copied.

        Raises:
            HostsUpdatedInterrupt: The world is about to change; on every member at the same check.
        """
        self.resume_here()
        self.leave_if_updated()

    def commit_here(self) -> None:
        """Commit without a check for updated hosts; `leave_if_updated` makes it later."""
        if not self._counter.alone:
            self._commit()

    def resume_here(self) -> None:
        """Have training resume here, and not at the last commit, if a collective fails before the next step."""
        if not self._counter.alone:
            self._counter.mark()

    def leave_if_updated(self) -> None:
        """Leave the loop if the world is about to change.

        Raises:
            HostsUpdatedInterrupt: The world is about to change; on every member at the same call.
        """
        if self._frontend.agree_on_update():
            raise HostsUpdatedInterrupt()

    def on_reset(self) -> None:
        """Handle a change of the world, before the state is synchronised."""
        self.reset()
        for callback in self._reset_callbacks:
            callback()

    def on_hosts_updated(self, timestamp: Any, update_res: Any) -> None:
        """Do nothing: it is part of Horovod's interface, and updates arrive in another way here."""

    # --- defined by subclasses ------------------------------------------------------------------

    def save(self) -> None:
        """Copy the state, for `restore`."""
        raise NotImplementedError

    def restore(self) -> None:
        """Return to what `save` copied."""
        raise NotImplementedError

    def sync(self) -> None:
        """Make every member's state that of one of them."""
        raise NotImplementedError

    def reset(self) -> None:
        """Adapt what depends on rank or size; nothing by default."""

    def _commit(self) -> None:
        self._counter.advance()
        self.save()
        self._counter.saved_version = self._counter.version

    # --- called by the loop ---------------------------------------------------------------------

    @property
    def progress(self) -> int | None:
        """Optimizer steps in this state (commits, without an optimizer); None before it was first synchronised."""
        version = self.version
        return None if version is None else version.steps

    @property
    def version(self) -> StateVersion | None:
        """How far this state is, as the members compare them; None before it was first synchronised."""
        return self._counter.version

    def _before_joining(self) -> None:
        """Do what would take long in the first step of a newcomer, for which the others would wait.

        Changes of the state are overwritten when it is synchronised.
        """

    def _reset_alone(self) -> None:
        """Call `on_reset`. Its steps count for nothing, and the sync afterwards makes all members' states equal."""
        self._counter.alone = True
        try:
            with self._frontend.alone():
                self.on_reset()
        finally:
            self._counter.alone = False

    def _sync_from(self, root: int, version: StateVersion | None) -> None:
        """Take over the state of `root`, and make it the one that `restore` returns to: `sync` need not save."""
        self._take_over_from(root, version)
        self.save()

    def _refresh_from(self, root: int, version: StateVersion | None) -> None:
        """Make sure that all members hold the same state; all have reported this version."""
        self._sync_from(root, version)

    def _take_over_from(self, root: int, version: StateVersion | None) -> None:
        self._root = root
        self._entering = True
        try:
            self.sync()
        except HorovodInternalError:
            self._sync_failed()
            raise
        finally:
            self._root = 0
            self._entering = False
        if version is None or version.loop < self._loop:  # a version of the loop before: this loop begins
            version = StateVersion(self._loop)
        self._counter.set(version)
        self._counter.saved_version = version

    def _sync_failed(self) -> None:
        """Return to the copy: a state that overwrites itself piece by piece is unusable when a sync breaks off."""
        self.restore()

    def _function_begins(self) -> None:
        """Prepare for a call of the loop's function: the state is that of all members."""

    def _recover(self, error: HorovodInternalError) -> None:
        """Bring the state to a point that training can resume from, after a collective has failed in the loop."""
        self.restore()
        self._counter.version = self._counter.saved_version

    def _interrupted(self) -> None:
        """Leave the function for the next world, at a resume point."""

    def _loop_over(self) -> None:
        """Tidy up: the loop has returned or raised."""
        self._counter.in_loop = False

    def _take_up(self, kept: Any) -> None:
        """Become what `kept` was when it was last saved: the state of the same loop in an earlier call of the function.

        A `sync` defined by the user is called on both states: that of `kept` broadcasts, and this one receives.

        Raises:
            StateNotMovableError: `sync` broadcasts without `bcast_object`.
        """
        kept.restore()
        broadcasts = _RecordedBroadcasts(type(self).__qualname__)
        kept._bcast_object, own, self._bcast_object = broadcasts.send, self._bcast_object, broadcasts.receive
        kept.sync()
        if not broadcasts.values:
            raise StateNotMovableError(kind=type(self).__qualname__)
        self.sync()
        self._bcast_object = own
        self._counter.version = kept._counter.version
        self.save()

    def _broadcast(self, value: Any, root_rank: int | None = None) -> Any:
        return self._frontend.broadcast_object(value, self._root if root_rank is None else root_rank)

    def _frontend_rank(self) -> int:
        return self._frontend.rank()


class ElasticState(State):
    """Values of a framework and plain ones, each an attribute. Training resumes without a return to the commit.

    Args:
        handler_for: Returns a handler that copies and synchronises a value; None for a plain Python value, which must
            be picklable.
        watch: The class of the framework's `LoopWatch`.
        steps: The class of its `OptimizerSteps`, or another function that makes one.
        values: The values by name.
    """

    def __init__(
        self,
        handler_for: Callable[[Any], StateHandler | None],
        watch: type[LoopWatch],
        steps: Callable[[Handlers, StepCounter, Any], OptimizerSteps],
        values: Mapping[str, Any],
    ) -> None:
        super().__init__()
        self._handlers = Handlers(self, handler_for, values)
        self._watch = watch(self._handlers, self._counter)
        self._steps = steps(self._handlers, self._counter, self._watch)
        self._resume_point = ResumePoint()
        self._known: Descriptions | None = None
        """Descriptions of the tensors, while a state is taken over that is probably the same."""
        self._root_unbuilt = False
        """A model was not built at the root when the state was synchronised, so its variables could not be sent."""
        for name in self._handlers.by_name:
            self._steps.attach(name)
        self._steps.before_sync()
        self.save()

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any: ...

    def __setattr__(self, name: str, value: Any) -> None:
        parts = self.__dict__
        handler = parts["_handlers"].by_name.get(name) if "_handlers" in parts else None
        if handler is not None and value is not handler.value:
            handler.set_value(value)
            object.__setattr__(self, name, value)
            self._steps.attach(name)
            return
        if "_watch" in parts and parts["_watch"].log.follows(name):
            parts["_watch"].log.assigned(name, parts.get(name), value, calling_line(1))
        object.__setattr__(self, name, value)

    @property
    def version(self) -> StateVersion | None:
        """How far this state is, as the members compare them; None before it was first synchronised."""
        self._steps.poll()
        return self._counter.version

    # --- called by users ------------------------------------------------------------------------

    def commit_here(self) -> None:
        """Commit without a check for updated hosts; `leave_if_updated` makes it later."""
        if self._may_mark():
            self._commit()

    def resume_here(self) -> None:
        """Have training resume here, and not at the last commit, if a collective fails before the next step.

        It does nothing in the middle of a step.
        """
        if self._may_mark():
            self._counter.mark()
            self._mark_resume_point()

    def leave_if_updated(self) -> None:
        """Leave the loop if the world is about to change.

        Raises:
            HostsUpdatedInterrupt: The world is about to change; on every member at the same call.
        """
        if self._steps.may_leave():
            super().leave_if_updated()

    def save(self) -> None:
        self._steps.before_save()
        self._handlers.save()
        self._counter.saved_version = self._counter.version

    def restore(self) -> None:
        self._steps.poll()
        self._handlers.restore()
        if self._counter.saved_version is not None:
            self._counter.set(self._counter.saved_version)
        self._steps.values_replaced()

    def sync(self) -> None:
        """Take over the state of the most advanced member, or of rank 0 when called in the loop, and commit it."""
        if not self._entering:
            self._steps.poll()
        self._steps.before_sync()
        extra = self._handlers.unbuilt, self._watch.log.learnt
        staged = self._counter.version is not None
        self._root_unbuilt, learnt = self._handlers.sync(self._root, extra, staged=staged, known=self._known)
        self._watch.log.learn_from(learnt)
        self._steps.values_replaced()
        if not self._entering:
            self._commit()

    def sync_if_built_late(self) -> None:
        """Take over the variables of a model that the root had not built when the state was synchronised.

        Every member calls it after each batch. A model may be built as late as with its first step, which was then
        each member's own.
        """
        if self._root_unbuilt:
            self._steps.poll()
            self.sync()
            self._root_unbuilt = False
            self.save()

    def reset(self) -> None:
        for handler in self._handlers.by_name.values():
            handler.reset()

    # --- called by the loop ---------------------------------------------------------------------

    def _before_joining(self) -> None:
        self._steps.before_joining()

    def _refresh_from(self, root: int, version: StateVersion | None) -> None:
        known = self._handlers.describe()
        if self._handlers.agree_that_equal(known):
            return
        # without another copy of everything: the last commit is the same on every member, and as good as before
        saved = self._counter.saved_version
        self._known = known
        try:
            self._take_over_from(root, version)
        finally:
            self._known = None
        self._counter.saved_version = saved

    def _sync_failed(self) -> None:
        """Do nothing: values are set only after they have arrived."""

    def _function_begins(self) -> None:
        self._mark_resume_point(called=True)

    def _recover(self, error: HorovodInternalError) -> None:
        self._steps.function_left()
        if self._counter.version is not None:  # otherwise this member holds no state yet
            self._resume_after(error)
        self._steps.drop_unfinished()

    def _interrupted(self) -> None:
        self._steps.function_left()
        self._steps.drop_unfinished()

    def _loop_over(self) -> None:
        super()._loop_over()
        self._watch.end()
        self._steps.loop_over()

    def _take_up(self, kept: Any) -> None:
        kept.restore()
        self._steps.before_sync()
        self._handlers.take_up(kept._handlers)
        self._root_unbuilt = kept._handlers.unbuilt
        self._steps.values_replaced()
        self._counter.version = kept._counter.version
        self.save()

    # --- resume points --------------------------------------------------------------------------

    def _may_mark(self) -> bool:
        return not self._counter.alone and self._steps.may_mark()

    def _commit(self) -> None:
        if self._counter.steps:  # optimizers count the steps, and a commit is a mark between two
            self._counter.mark()
        else:
            self._counter.advance()
        self.save()
        self._mark_resume_point(committed=True)

    def _mark_resume_point(self, committed: bool = False, called: bool = False) -> None:
        """Note that the light and plain values belong to the tensors as they are now.

        Args:
            committed: There is a copy of the tensors as well.
            called: The loop's function is about to be called.
        """
        self._steps.poll()
        self._watch.resume_point(committed)
        self._resume_point = ResumePoint(committed, None if committed else self._handlers.light_values())
        self._counter.reset_steps()
        self._steps.resume_point(called)
        if called or self._watch.log.awaits_step:  # what came before the first step is done, and stays
            self._watch.begin()

    def _resume_after(self, error: HorovodInternalError) -> None:
        steps = self._steps.since_resume_point()
        failure = Failure(
            steps=steps,
            in_reduction=error.in_reduction,
            mid_update=error.mid_update,
            committed=self._resume_point.committed,
            altered=self._watch.altered(any(steps)),
            amid=self._watch.amid(error),
        )
        choice, reason = decide(failure)
        undone = self._watch.undone() if choice is Recovery.LIVE else {}
        if undone is None:
            choice, reason = Recovery.COMMIT, "a value was changed in place, and not as before the first step"
        log.info("resuming from the %s: %s", choice.value, reason)
        if choice is Recovery.COMMIT:
            self.restore()
        elif choice is Recovery.RESUME_POINT:
            self._handlers.assign_light_values(self._resume_point.light)
        elif undone:
            self._watch.put_back(undone)
        self._steps.undo_step(choice)


class _RecordedBroadcasts:
    """The broadcasts of one state's `sync`, received by that of another state in this process."""

    def __init__(self, kind: str) -> None:
        self.values: list[Any] = []
        self._kind = kind
        self._received = 0

    def send(self, value: Any, *_: Any, **__: Any) -> Any:
        self.values.append(independent_copy(value))
        return value

    def receive(self, *_: Any, **__: Any) -> Any:
        if self._received == len(self.values):
            raise StateNotMovableError(kind=self._kind)
        self._received += 1
        return self.values[self._received - 1]
