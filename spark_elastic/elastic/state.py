"""The state that outlives a change of the world, and the loop that retries: free of any framework.

A frontend (torch, tensorflow) brings a `Frontend` and states for its models; everything about when to commit, what to
go back to and when to take over another member's state is here.
"""

from __future__ import annotations

import copy
import functools
import logging
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar, cast

from spark_elastic.elastic.plain_values import PlainValues
from spark_elastic.elastic.recovery import Failure, Recovery, decide
from spark_elastic.errors import HorovodInternalError, HostsUpdatedInterrupt, StateNotMovableError
from spark_elastic.membership.topology import StateVersion
from spark_elastic.wire.worker_link import Loops

log = logging.getLogger("spark_elastic.elastic.state")

_ATOMS: frozenset[type] = frozenset({int, float, bool, str, bytes, complex, type(None)})


@dataclass(frozen=True, slots=True)
class Entry:
    """How a member came into the world that it now stands in.

    root: rank of the member whose state everybody takes over. version: of that state; None: nobody holds one yet.
    sync: False if all members report the same version. moved: rank or size are not what they were. from_last_loop: all
    members have just come here from the loop before, together; until they share a state, what fails is done again from
    the end of that loop.
    """

    root: int
    version: StateVersion | None
    sync: bool
    moved: bool
    from_last_loop: bool = False


class SentOn(Exception):
    """The job is in a later loop than this; the function goes on to that one, with this one's result."""


class Frontend(Protocol):
    """What the loop and the states need of a framework's collectives."""

    loops: Loops

    def rank(self) -> int: ...

    def broadcast_object(self, value: Any, root: int) -> Any: ...

    def alone(self) -> AbstractContextManager[None]:
        """Within it this member's collectives reach nobody, and give its own values."""
        ...

    def agree_on_update(self) -> bool:
        """Whether any member has been told of a coming world. The same answer on every member."""
        ...

    def enter(self, prepare: Callable[[], None]) -> Entry:
        """The loop was entered: a newcomer waits here for its first world.

        prepare: called by a newcomer before it says that it is ready; the others train meanwhile.

        Raises:
            HorovodInternalError: the world broke while it was being connected, or while all came from the loop before.
            SentOn.
        """
        ...

    def finished(self, loop: int, state: State, result: Any) -> None:
        """The loop has returned: keep what it has come to, in case that the function has to be called again."""
        ...

    def result_of(self, loop: int) -> Any:
        """What the others had returned from a loop that this process is sent past.

        Raises: LoopResultError: that cannot be had.
        """
        ...

    def rejoin(self, version: StateVersion | None) -> Entry:
        """Leave the world that broke or is about to change, and wait for the next.

        Returns only when the new world is connected, however many worlds break on the way.

        Raises: SentOn.
        """
        ...

    def report_version(self, version: StateVersion) -> None: ...


class State:
    """Something to keep across worlds: subclass it with `save`, `restore` and `sync`, as with Horovod.

    A subclass that knows no more than that is restored to its last commit when a collective fails.

    Args:
        bcast_object: Broadcasts an object from rank 0; default: the frontend's.
        get_rank: The rank of this process; default: the frontend's.
    """

    _frontend: Frontend | None = None

    def __init__(
        self,
        bcast_object: Callable[..., Any] | None = None,
        get_rank: Callable[[], int] | None = None,
    ) -> None:
        self._bcast_object = bcast_object or self._broadcast
        self._rank = get_rank or self._frontend_rank
        self._reset_callbacks: list[Callable[[], Any]] = []
        self._version: StateVersion | None = None
        self._root = 0
        self._loop = 1
        self._saved_version: StateVersion | None = None
        self._entering = False
        self._in_loop = False
        self._alone = False

    # --- what users call ----------------------------------------------------------------------

    def register_reset_callbacks(self, callbacks: Iterable[Callable[[], Any]]) -> None:
        """Have these called, without arguments, each time the world has changed, before the state is synchronised.

        A newcomer may not call them, and is not waited for: their collectives and the steps that they train are each
        member's own, as those of a newcomer before the loop.
        """
        self._reset_callbacks.extend(callbacks)

    def commit(self) -> None:
        """Make the present state the one that `restore` returns to, then check for updated hosts.

        Raises: HostsUpdatedInterrupt: the world is about to change; on every member at the same commit.
        """
        if self._may_mark():
            self._commit_here()
        self._check_host_updates()

    def check_host_updates(self) -> None:
        """Leave the loop if the world is about to change. Cheaper than a commit: no tensor is copied.

        Raises: HostsUpdatedInterrupt: on every member at the same check.
        """
        if self._may_mark():
            self._count_mark()
            self._mark_resume_point()
        self._check_host_updates()

    def on_reset(self) -> None:
        """The world has changed; called before the state is synchronised."""
        self.reset()
        for callback in self._reset_callbacks:
            callback()

    def on_hosts_updated(self, timestamp: Any, update_res: Any) -> None:
        """Kept for Horovod's interface; updates arrive through the frontend."""

    # --- what subclasses define ---------------------------------------------------------------

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

    # --- what the loop calls ------------------------------------------------------------------

    @property
    def progress(self) -> int | None:
        """Optimizer steps in this state (commits, if it has no optimizer); None before it was first synchronised."""
        return None if self._version is None else self._version.steps

    @property
    def version(self) -> StateVersion | None:
        """How far this state is, as the members compare them; None before it was first synchronised."""
        return self._version

    def _sync_from(self, root: int, version: StateVersion | None) -> None:
        """Take over the state of `root`, and make it the one that `restore` returns to: `sync` need not save."""
        self._take_over_from(root, version)
        self.save()

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
        if version is None or version.loop < self._loop:  # of the loop before: this one begins
            version = StateVersion(self._loop)
        self._set_version(version)
        self._saved_version = self._version

    def _refresh_from(self, root: int, version: StateVersion | None) -> None:
        """All members report this version: make sure that they hold the same state."""
        self._sync_from(root, version)

    def _sync_failed(self) -> None:
        """A sync broke off. A state that overwrites itself piecemeal is not usable now; go back to the copy."""
        self.restore()

    def _recover(self, error: HorovodInternalError) -> None:
        """Bring the state to a point that training can go on from after a collective has failed in the loop."""
        self.restore()
        self._version = self._saved_version

    def _reset_alone(self, frontend: Frontend) -> None:
        """Call `on_reset`; steps that it trains are not counted, and the sync makes all members' state one again."""
        self._alone = True
        try:
            with frontend.alone():
                self.on_reset()
        finally:
            self._alone = False

    def _before_joining(self) -> None:
        """This is a newcomer, and the others will wait for its first step: do now what that would take long for.

        Whatever it changes in the state is overwritten when the state is synchronised.
        """

    def _commit_here(self) -> None:
        self._count_commit()
        self.save()
        self._saved_version = self._version
        self._mark_resume_point(committed=True)

    def _count_commit(self) -> None:
        self._advance()

    def _count_mark(self) -> None:
        if self._version is not None:
            self._set_version(self._version.marked())

    def _interrupted(self) -> None:
        """The loop is left for the next world at a resume point."""

    def _left_loop(self) -> None:
        """The loop has returned or raised."""

    def _take_up(self, kept: State) -> None:
        """Become what `kept` was when it was last saved: the state of the same loop in an earlier call of the function.

        Of a state with a `sync` of its own, that of `kept` broadcasts and that of this one receives.

        Raises: StateNotMovableError: `sync` broadcasts without `bcast_object`.
        """
        kept.restore()
        broadcasts = _Recorded(type(self).__qualname__)
        kept._bcast_object, own, self._bcast_object = broadcasts.send, self._bcast_object, broadcasts.receive
        kept.sync()
        if not broadcasts.values:
            raise StateNotMovableError(kind=type(self).__qualname__)
        self.sync()
        self._bcast_object = own
        self._version = kept._version
        self.save()

    def _mark_resume_point(self, committed: bool = False, called: bool = False) -> None:
        """The loop's plain values belong to the state as it is now.

        committed: there is a copy of the tensors as well. called: the loop's function is about to be called.
        """

    def _may_mark(self) -> bool:
        """Whether training can go on from here: not in the middle of a step, nor in a reset callback. The same answer
        on every member."""
        return not self._alone

    def _may_leave(self) -> bool:
        """Whether the loop can be left here without losing work. The same answer on every member."""
        return True

    def _check_host_updates(self) -> None:
        frontend = self._frontend
        if frontend is not None and self._may_leave() and frontend.agree_on_update():
            raise HostsUpdatedInterrupt()

    def _advance(self) -> None:
        if self._version is not None and not self._alone:  # what happens before the loop is everybody's own
            self._set_version(self._version.stepped())

    def _set_version(self, version: StateVersion) -> None:
        self._version = version
        if self._frontend is not None:
            self._frontend.report_version(version)

    def _broadcast(self, value: Any, root_rank: int | None = None) -> Any:
        if self._frontend is None:
            return value
        return self._frontend.broadcast_object(value, self._root if root_rank is None else root_rank)

    def _frontend_rank(self) -> int:
        return self._frontend.rank() if self._frontend is not None else 0


class _Recorded:
    """The broadcasts of one state's `sync`, received by another's in this process."""

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


class ObjectState(State):
    """Plain Python values, each a keyword argument and then an attribute of this object.

    Mutable values are copied when they are saved, so that changing one in place does not change the copy.
    """

    def __init__(
        self,
        bcast_object: Callable[..., Any] | None = None,
        get_rank: Callable[[], int] | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(bcast_object, get_rank)
        self._names = list(kwargs)
        for name, value in kwargs.items():
            setattr(self, name, value)
        self._saved_values = self._plain_values()

    def save(self) -> None:
        self._saved_values = self._plain_values()
        self._saved_version = self._version

    def restore(self) -> None:
        self._put_plain_values(self._saved_values)
        if self._saved_version is not None:
            self._set_version(self._saved_version)

    def sync(self) -> None:
        if self._names:
            self._saved_values = self._bcast_object(self._plain_values())
            self._put_plain_values(self._saved_values)
        if not self._entering:  # the user's own call
            self._commit_here()

    def _take_up(self, kept: State) -> None:
        assert isinstance(kept, ObjectState)
        kept.restore()
        self._put_plain_values({name: getattr(kept, name) for name in self._names if name in kept._names})
        self._take_up_more(kept)
        self._version = kept._version
        self.save()

    def _take_up_more(self, kept: ObjectState) -> None:
        """As `_take_up`, of what a subclass keeps besides plain values."""

    def _sync_failed(self) -> None:
        """Nothing was overwritten: the values are set after they have arrived."""

    def _plain_values(self) -> dict[str, Any]:
        values: dict[str, Any] = independent_copy({name: getattr(self, name) for name in self._names})
        return values

    def _put_plain_values(self, values: dict[str, Any]) -> None:
        for name, value in independent_copy(values).items():
            setattr(self, name, value)


class SteppingState(ObjectState):
    """A state whose optimizers tell when they step, so that it can go on without returning to a commit.

    Subclasses keep `_steps` (by optimizer, since the last resume point) by calling `_stepped`, and define the
    `_light_values` that are copied at every resume point, which must be cheap.
    """

    def __init__(self, **kwargs: Any) -> None:
        self._steps: dict[str, int] = {}
        self._follow = PlainValues(independent_copy)
        super().__init__(**kwargs)
        self._resume_values: Any = None
        self._resume_committed = False

    def _stepped(self, optimizer: str) -> None:
        self._steps[optimizer] += 1
        self._advance()

    def _recover(self, error: HorovodInternalError) -> None:
        if self._version is None:
            return  # never synchronised: another member has the state, or nobody
        steps = self._steps_since_resume_point()
        failure = Failure(
            steps=steps,
            in_reduction=error.in_reduction,
            mid_update=error.mid_update,
            committed=self._resume_committed,
            altered=self._altered(any(steps)),
            amid=self._amid(error),
        )
        choice, reason = decide(failure)
        undone = self._follow.undone(self._value_of) if choice is Recovery.LIVE else {}
        if undone is None:
            choice, reason = Recovery.COMMIT, "a value was changed in place, and not as before the first step"
        log.info("going on from the %s: %s", choice.value, reason)
        if choice is Recovery.COMMIT:
            self.restore()
        elif choice is Recovery.RESUME_POINT:
            self._put_light_values(self._resume_values)
        elif undone:
            self._put_back(undone)
        self._settle(choice)

    def _steps_since_resume_point(self) -> list[int]:
        """Of each optimizer that takes part in the training."""
        return list(self._steps.values())

    def _count_commit(self) -> None:
        if self._steps:
            self._count_mark()
        else:
            self._advance()

    def _mark_resume_point(self, committed: bool = False, called: bool = False) -> None:
        self._resume_values = None if committed else self._light_values()
        self._resume_committed = committed
        self._start_counting()
        if called or self._follow.awaits_step:
            self._call_begins()

    def _call_begins(self) -> None:
        """The loop goes on from here to its first step: follow its plain values.

        Its function is about to be called; or there is a resume point before the first step, and what came before that
        is done.
        """

    def _altered(self, stepped: bool) -> bool:
        """See `Failure.altered`; `stepped`: steps were applied since the last resume point."""
        return False

    def _amid(self, error: HorovodInternalError) -> bool:
        """See `Failure.amid`."""
        return False

    def _value_of(self, name: str) -> Any:
        return getattr(self, name)

    def _put_back(self, values: dict[str, Any]) -> None:
        self._put_plain_values(values)

    def _start_counting(self) -> None:
        for name in self._steps:
            self._steps[name] = 0

    def _light_values(self) -> Any:
        raise NotImplementedError

    def _put_light_values(self, values: Any) -> None:
        raise NotImplementedError

    def _settle(self, choice: Recovery) -> None:
        """Undo what the step that will be done again has left behind."""


P = ParamSpec("P")
R = TypeVar("R")
S = TypeVar("S", bound=State)


def elastic_loop(func: Callable[Concatenate[S, P], R], frontend: Frontend) -> Callable[Concatenate[S, P], R]:
    """`func(state, ...)`, called again in each new world until it returns.

    A `HorovodInternalError` brings the state to a point that the survivors can go on from; a `HostsUpdatedInterrupt`
    is raised at one. Then the next world is joined, the reset callbacks run, the state is taken over from the most
    advanced member, and `func` starts again.

    When the user's function is called again because its world broke after a loop, that loop takes up the state that it
    had left, and ends at once; loops before it are not entered any more.
    """

    def wrapper(state: S, *args: P.args, **kwargs: P.kwargs) -> R:
        if state._frontend is None:
            state._frontend = frontend
        loops = frontend.loops
        loop = state._loop = loops.enter()
        kept = loops.kept(loop)
        if kept is not None and kept.state is not None:
            state._take_up(kept.state)
        if kept is not None and loop < loops.last:
            return cast(R, kept.result)
        try:
            entry = _entered(state, frontend, again=kept is not None)
            result = turns(state, entry, *args, **kwargs)
            if kept is not None and kept.state is not None and not _has_stepped(state, kept.state):
                result = cast(R, kept.result)  # what it made of its steps, and not of finding none left
        except SentOn:
            if kept is not None:
                return cast(R, kept.result)
            result = frontend.result_of(loop)
            loops.finish(loop, None, result)
            return result
        frontend.finished(loop, state, result)
        return result

    def turns(state: S, entry: Entry, *args: P.args, **kwargs: P.kwargs) -> R:
        state._in_loop = True
        try:
            while True:
                try:
                    _prepare(state, entry, frontend)
                except HorovodInternalError as error:
                    if entry.from_last_loop:
                        raise
                    log.info("the world broke before the loop went on: %s", error)
                    entry = frontend.rejoin(state.version)
                    continue
                try:
                    return func(state, *args, **kwargs)
                except HorovodInternalError as error:
                    log.info("a collective failed: %s", error)
                    state._recover(error)
                except HostsUpdatedInterrupt:
                    log.info("leaving the loop for the next world")
                    state._interrupted()
                entry = frontend.rejoin(state.version)
        finally:
            state._in_loop = False
            state._left_loop()

    functools.update_wrapper(wrapper, func)
    return cast("Callable[Concatenate[S, P], R]", wrapper)  # `state` may be given by name


def _has_stepped(state: State, since: State) -> bool:
    return state.version is not None and since.version is not None and state.version.is_steps_after(since.version)


def _entered(state: State, frontend: Frontend, *, again: bool) -> Entry:
    if again:
        return frontend.rejoin(state.version)
    try:
        return frontend.enter(state._before_joining)
    except HorovodInternalError as error:
        if state._loop > 1:
            raise
        log.info("the first world broke: %s", error)
        return frontend.rejoin(state.version)


def _prepare(state: State, entry: Entry, frontend: Frontend) -> None:
    if entry.moved:
        state._reset_alone(frontend)
    # where all members bring what the loop before has come to, it is not yet the state of this one on any of them
    before_this_loop = entry.version is not None and entry.version.loop < state._loop
    if entry.sync or before_this_loop:
        state._sync_from(entry.root, entry.version)
    else:
        state._refresh_from(entry.root, entry.version)
    state._mark_resume_point(called=True)


def independent_copy(value: Any) -> Any:
    """A copy that later changes to `value` do not reach; fast for the plain values that a training loop counts with.

    What is in several places of `value` is one object in the copy as well. What cannot be copied is returned itself.
    """
    return _copied(value, {})


def _copied(value: Any, known: dict[int, Any]) -> Any:
    """known: copies by the id of what they are of, as `copy.deepcopy` keeps them."""
    kind = type(value)
    if kind in _ATOMS:
        return value
    if id(value) in known:
        return known[id(value)]
    out: Any
    if kind is list:
        out = known[id(value)] = []
        out.extend(value if _ATOMS.issuperset(map(type, value)) else [_copied(item, known) for item in value])
        return out
    if kind is dict:
        out = known[id(value)] = {}
        out.update({key: _copied(item, known) for key, item in value.items()})
        return out
    if kind is tuple or kind is set:
        out = kind(value) if _ATOMS.issuperset(map(type, value)) else kind([_copied(item, known) for item in value])
        return known.setdefault(id(value), out)
    before = len(known)
    try:
        return copy.deepcopy(value, known)
    except Exception:  # a lock, a file, a generator: shared, as with Horovod
        while len(known) > before:
            known.popitem()  # copies that are not complete
        known[id(value)] = value
        return value
