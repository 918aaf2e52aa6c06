"""The state that outlives a change of the world, and the loop that retries: free of any framework.

A frontend (torch, tensorflow) brings a `Frontend` and states for its models; everything about when to commit, what to
go back to and when to take over another member's state is here.
"""

from __future__ import annotations

import copy
import functools
import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar, cast

from spark_elastic.core.recovery import Failure, Recovery, decide
from spark_elastic.errors import HorovodInternalError, HostsUpdatedInterrupt

log = logging.getLogger("spark_elastic.state")

_ATOMS: frozenset[type] = frozenset({int, float, bool, str, bytes, complex, type(None)})


@dataclass(frozen=True, slots=True)
class Entry:
    """How a member came into the world that it now stands in.

    root: rank of the member whose state everybody takes over. progress: optimizer steps in that state; None: nobody
    holds one yet. sync: False if all members hold the same state already. moved: rank or size are not what they were.
    """

    root: int
    progress: int | None
    sync: bool
    moved: bool


class Frontend(Protocol):
    """What the loop and the states need of a framework's collectives."""

    def rank(self) -> int: ...

    def broadcast_object(self, value: Any, root: int) -> Any: ...

    def agree_on_update(self) -> bool:
        """Whether any member has been told of a coming world. The same answer on every member."""
        ...

    def enter(self, prepare: Callable[[], None]) -> Entry:
        """The loop was entered: a newcomer waits here for its first world.

        prepare: called by a newcomer before it says that it is ready; the others train meanwhile.

        Raises: HorovodInternalError: the world broke while it was being connected.
        """
        ...

    def rejoin(self, progress: int | None) -> Entry:
        """Leave the world that broke or is about to change, and wait for the next.

        Returns only when the new world is connected, however many worlds break on the way.
        """
        ...

    def report_progress(self, progress: int) -> None: ...


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
        self._progress: int | None = None
        self._root = 0
        self._in_loop = False

    # --- what users call ----------------------------------------------------------------------

    def register_reset_callbacks(self, callbacks: Iterable[Callable[[], Any]]) -> None:
        """Have these called, without arguments, each time the world has changed, before the state is synchronised."""
        self._reset_callbacks.extend(callbacks)

    def commit(self) -> None:
        """Make the present state the one that `restore` returns to, then check for updated hosts.

        Raises: HostsUpdatedInterrupt: the world is about to change; on every member at the same commit.
        """
        self.save()
        self._committed()
        self._check_host_updates()

    def check_host_updates(self) -> None:
        """Leave the loop if the world is about to change. Cheaper than a commit: no tensor is copied.

        Raises: HostsUpdatedInterrupt: on every member at the same check.
        """
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
        return self._progress

    def _sync_from(self, root: int, progress: int | None) -> None:
        self._root = root
        try:
            self.sync()
        except HorovodInternalError:
            self._sync_failed()
            raise
        self._set_progress(progress or 0)

    def _sync_failed(self) -> None:
        """A sync broke off. A state that overwrites itself piecemeal is not usable now; go back to the copy."""
        self.restore()

    def _recover(self, error: HorovodInternalError) -> None:
        """Bring the state to a point that training can go on from after a collective has failed in the loop."""
        self.restore()

    def _before_joining(self) -> None:
        """This is a newcomer, and the others will wait for its first step: do now what that would take long for.

        Whatever it changes in the state is overwritten when the state is synchronised.
        """

    def _committed(self) -> None:
        self._advance()

    def _interrupted(self) -> None:
        """The loop is left for the next world at a resume point."""

    def _left_loop(self) -> None:
        """The loop has returned or raised."""

    def _mark_resume_point(self) -> None:
        """The loop's plain values belong to the state as it is now."""

    def _may_leave(self) -> bool:
        """Whether the loop can be left here without losing work. The same answer on every member."""
        return True

    def _check_host_updates(self) -> None:
        frontend = self._frontend
        if frontend is not None and self._may_leave() and frontend.agree_on_update():
            raise HostsUpdatedInterrupt()

    def _advance(self) -> None:
        self._set_progress((self._progress or 0) + 1)

    def _set_progress(self, progress: int) -> None:
        self._progress = progress
        if self._frontend is not None:
            self._frontend.report_progress(progress)

    def _broadcast(self, value: Any, root_rank: int | None = None) -> Any:
        if self._frontend is None:
            return value
        return self._frontend.broadcast_object(value, self._root if root_rank is None else root_rank)

    def _frontend_rank(self) -> int:
        return self._frontend.rank() if self._frontend is not None else 0


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

    def restore(self) -> None:
        self._put_plain_values(self._saved_values)

    def sync(self) -> None:
        if self._names:
            self._saved_values = self._bcast_object(self._plain_values())
            self._put_plain_values(self._saved_values)

    def _sync_failed(self) -> None:
        """Nothing was overwritten: the values are set after they have arrived."""

    def _plain_values(self) -> dict[str, Any]:
        return {name: independent_copy(getattr(self, name)) for name in self._names}

    def _put_plain_values(self, values: dict[str, Any]) -> None:
        for name, value in values.items():
            setattr(self, name, independent_copy(value))


class SteppingState(ObjectState):
    """A state whose optimizers tell when they step, so that it can go on without returning to a commit.

    Subclasses keep `_steps` (by optimizer, since the last resume point) by calling `_stepped`, and define the
    `_light_values` that are copied at every resume point, which must be cheap.
    """

    def __init__(self, **kwargs: Any) -> None:
        self._steps: dict[str, int] = {}
        super().__init__(**kwargs)
        self._resume_values: Any = None

    def _stepped(self, optimizer: str) -> None:
        self._steps[optimizer] += 1
        self._set_progress((self._progress or 0) + 1)

    def _recover(self, error: HorovodInternalError) -> None:
        if self._progress is None:
            return  # never synchronised: another member has the state, or nobody
        failure = Failure(
            steps=self._steps_since_resume_point(),
            in_reduction=bool(getattr(error, "in_reduction", False)),
            mid_update=bool(getattr(error, "mid_update", False)),
        )
        choice, reason = decide(failure)
        log.info("going on from the %s: %s", choice.value, reason)
        if choice is Recovery.COMMIT:
            self.restore()
        elif choice is Recovery.RESUME_POINT:
            self._put_light_values(self._resume_values)
        self._settle(choice)

    def _steps_since_resume_point(self) -> list[int]:
        """Of each optimizer that takes part in the training."""
        return list(self._steps.values())

    def _committed(self) -> None:
        if not self._steps:
            self._advance()

    def _mark_resume_point(self) -> None:
        self._resume_values = self._light_values()
        self._start_counting()

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
    advanced member unless all stand at the same step, and `func` starts again.
    """

    def wrapper(state: S, *args: P.args, **kwargs: P.kwargs) -> R:
        if state._frontend is None:
            state._frontend = frontend
        entry = _entered(state, frontend)
        state._in_loop = True
        try:
            return turns(state, entry, *args, **kwargs)
        finally:
            state._in_loop = False
            state._left_loop()

    def turns(state: S, entry: Entry, *args: P.args, **kwargs: P.kwargs) -> R:
        while True:
            try:
                _prepare(state, entry)
            except HorovodInternalError as error:
                log.info("the world broke before the loop went on: %s", error)
                entry = frontend.rejoin(state.progress)
                continue
            try:
                return func(state, *args, **kwargs)
            except HorovodInternalError as error:
                log.info("a collective failed: %s", error)
                state._recover(error)
            except HostsUpdatedInterrupt:
                log.info("leaving the loop for the next world")
                state._interrupted()
            entry = frontend.rejoin(state.progress)

    functools.update_wrapper(wrapper, func)
    return cast("Callable[Concatenate[S, P], R]", wrapper)  # `state` may be given by name


def _entered(state: State, frontend: Frontend) -> Entry:
    try:
        return frontend.enter(state._before_joining)
    except HorovodInternalError as error:
        log.info("the first world broke: %s", error)
        return frontend.rejoin(state.progress)


def _prepare(state: State, entry: Entry) -> None:
    if entry.moved:
        state.on_reset()
    if entry.sync:
        state._sync_from(entry.root, entry.progress)
    state._mark_resume_point()


def independent_copy(value: Any) -> Any:
    """A copy that later changes to `value` do not reach; fast for the plain values that a training loop counts with.

    What cannot be copied is returned itself.
    """
    kind = type(value)
    if kind in _ATOMS:
        return value
    if kind is list or kind is tuple or kind is set:
        if _ATOMS.issuperset(map(type, value)):
            return kind(value)
        return kind(independent_copy(item) for item in value)
    if kind is dict:
        return {key: independent_copy(item) for key, item in value.items()}
    try:
        return copy.deepcopy(value)
    except Exception:  # a lock, a file, a generator: shared, as with Horovod
        return value
