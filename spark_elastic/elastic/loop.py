"""The elastic loop: call the user's function again in each new world until it returns.

`CollectiveFrontend` is how the loop and the states leave a world, join the next one, and agree on when to do so.
"""

from __future__ import annotations

import functools
import inspect
import logging
import traceback
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, TypeVar, cast

import torch

from spark_elastic.collective.objects import broadcast_object
from spark_elastic.collective.operations import barrier
from spark_elastic.collective.process import process
from spark_elastic.collective.reduction import Max
from spark_elastic.elastic.finish import LaterLoop, loops, offer_result, result_of
from spark_elastic.elastic.mark import of_loop
from spark_elastic.elastic.run_checkpoints import RunCheckpoints
from spark_elastic.errors import HorovodInternalError, HostsUpdatedInterrupt, UsageError
from spark_elastic.membership.topology import StateVersion
from spark_elastic.wire.worker_link import ProvisionalPosition

if TYPE_CHECKING:
    from spark_elastic.elastic.state import State

log = logging.getLogger("spark_elastic.elastic.loop")

P = ParamSpec("P")
R = TypeVar("R")
S = TypeVar("S", bound="State")


@dataclass(frozen=True, slots=True)
class Entry:
    """Facts about the world that a member has entered.

    Attributes:
        root: Rank of the member whose state all members take over.
        version: Version of that state; None if no member holds one yet.
        sync: False if all members report the same version.
        moved: Rank or size have changed.
        from_last_loop: All members have just come from the previous loop together. Until they have the same state, a
            failure is recovered from by running the end of that loop again.
    """

    root: int
    version: StateVersion | None
    sync: bool
    moved: bool
    from_last_loop: bool = False


class CollectiveFrontend:
    """The access of loops and states to this process's connection to the driver and to its groups."""

    loops = loops
    checkpoints: RunCheckpoints | None = None
    """Set by `WithCheckpoints` before it calls the user's function."""

    def rank(self) -> int:
        return process.require().rank

    def broadcast_object(self, value: Any, root: int) -> Any:
        return broadcast_object(value, root)

    def alone(self) -> AbstractContextManager[None]:
        """Return a context in which collectives reach no other member and return this member's own values."""
        return process.local_collectives()

    def agree_on_update(self) -> bool:
        """Return True, on every member alike, if any member knows of a coming world.

        This needs a small reduction, unless gradients were reduced since the last check.
        """
        if process.link is None or process.provisional:
            return False
        agreed, process.update_agreed = process.update_agreed, None
        if agreed is not None:
            return agreed
        group = process.group()
        pending = process.update_pending
        if group is None:
            return pending
        token = torch.tensor([pending], dtype=torch.uint8, device="cpu")
        group.wait(group.allreduce(token, Max.gloo))
        return bool(token.item())

    def enter(self, prepare: Callable[[], None]) -> Entry:
        """Enter a loop; a newcomer waits here for its first world.

        Args:
            prepare: A function that a newcomer calls before it reports that it is ready; the others train meanwhile.

        Raises:
            HorovodInternalError: The world broke while it was being connected, or on the way from the previous loop.
            LaterLoop: The job is in a later loop.
        """
        process.require()
        link = process.link
        if link is None:
            return Entry(root=0, version=None, sync=True, moved=False)
        if process.provisional:
            link.entered_loop()
            prepare()
            return self.rejoin(loops.version_before(), moved=False)
        assert process.assignment is not None
        world = process.assignment.world
        process.group()  # raises, if the world broke meanwhile
        if loops.entered == 1:
            link.entered_loop()
            return Entry(root=world.root, version=world.version, sync=True, moved=False)
        offer_result(loops.entered - 1)
        barrier()  # no member enters while another may still be in the last collective of the loop before
        link.entered_loop()
        return Entry(root=0, version=None, sync=True, moved=False, from_last_loop=True)

    def rejoin(self, version: StateVersion | None, moved: bool = True) -> Entry:
        """Leave a world that broke or is about to change, and wait until another one is connected.

        Args:
            version: The version of this member's state.
            moved: Whether `Entry.moved` is True in any case.

        Raises:
            LaterLoop: The job is in a later loop.
        """
        if process.link is None:
            return Entry(root=0, version=version, sync=False, moved=True)
        while True:
            round = process.assignment.world.round if process.assignment is not None else 0
            try:
                return self._join(round, version, moved)
            except HorovodInternalError as error:
                moved = True
                log.info("the next world broke before it was connected: %s", error)

    def finished(self, loop: int, state: State, result: Any) -> None:
        """Keep state and result of a loop that has returned, for the case that the function is called again."""
        if process.link is not None:
            state.save()
            loops.finish(loop, state, result)
            process.link.left_loop()

    def result_of(self, loop: int) -> Any:
        return result_of(loop)

    def report_version(self, version: StateVersion) -> None:
        if process.link is not None:
            process.link.report_version(version)

    def _join(self, round: int, version: StateVersion | None, moved: bool) -> Entry:
        assert process.link is not None
        before = process.require()
        process.updates_handled = max(process.updates_handled, process.link.updates_seen())
        # closing the groups takes as long as the driver needs for the next world
        assignment = process.link.join(round, version, loops.entered, meanwhile=process.leave)
        if isinstance(assignment, ProvisionalPosition):
            process.leave_until_loop()
            raise LaterLoop()
        process.adopt(assignment)
        after = process.require()
        world = assignment.world
        changed = (before.rank, before.size) != (after.rank, after.size)
        return Entry(root=world.root, version=world.version, sync=world.sync, moved=moved or changed)


frontend = CollectiveFrontend()


class WithCheckpoints:
    """A user's function that has its loops write checkpoints; pickled in place of the function."""

    def __init__(self, function: Callable[..., Any], checkpoints: RunCheckpoints) -> None:
        functools.update_wrapper(self, function, updated=())
        self._function = function
        self._checkpoints = checkpoints

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        frontend.checkpoints = self._checkpoints
        return self._function(*args, **kwargs)


def run(func: Callable[Concatenate[S, P], R]) -> Callable[Concatenate[S, P], R]:
    """Decorate `func(state, ...)` so that it is called again whenever workers are lost or arrive.

    Each time the world has changed, the reset callbacks are called, the state is synchronised and `func` is called
    again. Before `func`, call only collectives that a newcomer calls at the same time.
    """
    return elastic_loop(func, frontend)


def elastic_loop(func: Callable[Concatenate[S, P], R], frontend: CollectiveFrontend) -> Callable[Concatenate[S, P], R]:
    """Wrap `func(state, ...)` so that it is called again in each new world until it returns.

    A `HorovodInternalError` returns the state to a point from which the survivors can resume; a `HostsUpdatedInterrupt`
    is raised at such a point. Then the next world is joined, the reset callbacks run, the state is taken over from the
    most advanced member, and `func` is called again.

    An error of a collective that the function has caught itself is raised again by the next mark, or counts when the
    function returns: the steps since then are incomplete.

    If the world breaks after a loop, the user's function is called again as a whole: that loop takes over the state
    that it had kept, and ends at once; loops before it are skipped.
    """
    name = getattr(func, "__name__", repr(func))
    if inspect.iscoroutinefunction(func) or inspect.isgeneratorfunction(func) or inspect.isasyncgenfunction(func):
        raise UsageError(
            f"{name}, a loop of hvd.elastic.run, is a generator or async function, so its code would run after the "
            "loop has ended; make it a plain function"
        )

    def wrapper(state: S, *args: P.args, **kwargs: P.kwargs) -> R:
        if not hasattr(state, "_counter"):
            raise UsageError(
                f"the first argument of {name}, a loop of hvd.elastic.run, is a {type(state).__name__} and has "
                "to be a state, such as a TorchState; within a class, decorate a function in a method, not the method"
            )
        if of_loop.get() is not None:
            raise UsageError(
                f"{name}, a loop of hvd.elastic.run, was called within another one, which could not be "
                "repeated after a loss; call loops one after the other"
            )
        state._frontend = frontend
        loops = frontend.loops
        loop = state._loop = loops.enter()
        kept = loops.kept(loop)
        if kept is not None and kept.state is not None:
            state._take_up(kept.state)
        if kept is not None and loop < loops.last:
            return cast(R, kept.result)
        if frontend.checkpoints is not None:
            frontend.checkpoints.begin(state)
        try:
            entry = _enter(state, frontend, again=kept is not None)
            result = call_until_done(state, entry, *args, **kwargs)
            if kept is not None and kept.state is not None:
                before, after = kept.state.version, state.version
                if before is None or after is None or not after.is_steps_after(before):
                    result = cast(R, kept.result)  # all steps were made in the first call
        except LaterLoop:
            if kept is not None:
                return cast(R, kept.result)
            result = frontend.result_of(loop)
            loops.finish(loop, None, result)
            return result
        frontend.finished(loop, state, result)
        if frontend.checkpoints is not None:
            frontend.checkpoints.write(state, frontend.rank(), end=True)
        return result

    def call_until_done(state: S, entry: Entry, *args: P.args, **kwargs: P.kwargs) -> R:
        outer = of_loop.set(state._counter)
        state._counter.in_loop = True
        try:
            while True:
                try:
                    _prepare(state, entry, frontend)
                except HorovodInternalError as error:
                    if entry.from_last_loop:
                        raise
                    log.info("the world broke before the function was called: %s", error)
                    entry = frontend.rejoin(state.version)
                    continue
                try:
                    return _call(functools.partial(func, state, *args, **kwargs))
                except (HorovodInternalError, HostsUpdatedInterrupt) as error:
                    ended = error
                # a generator in the function's frames runs its `finally` before the state is restored, not after
                traceback.clear_frames(ended.__traceback__)
                if isinstance(ended, HorovodInternalError):
                    log.info("a collective failed: %s", ended)
                    state._recover(ended)
                else:
                    log.info("leaving the loop for the next world")
                    state._interrupted()
                entry = frontend.rejoin(state.version)
        finally:
            of_loop.reset(outer)
            state._loop_over()

    functools.update_wrapper(wrapper, func)
    return cast("Callable[Concatenate[S, P], R]", wrapper)  # `state` may be given by name


def _call(function: Callable[[], R]) -> R:
    """Call the function of a loop and return its result.

    Raises:
        HorovodInternalError: also if the function has caught one.
    """
    HorovodInternalError.newest = None
    result = function()
    caught: str | None = HorovodInternalError.newest
    if caught is None:
        return result
    log.warning(
        "the function of the elastic loop has caught the error of a collective (%s) and returned, so steps are left "
        "out: it is called again. Let HorovodInternalError pass, which a bare `except Exception`, or a `return` in "
        "`finally`, does not",
        caught,
    )
    raise HorovodInternalError(caught)


def _enter(state: State, frontend: CollectiveFrontend, *, again: bool) -> Entry:
    if again:
        return frontend.rejoin(state.version)
    try:
        return frontend.enter(state._before_joining)
    except HorovodInternalError as error:
        if state._loop > 1:
            raise
        log.info("the first world broke: %s", error)
        return frontend.rejoin(state.version)


def _prepare(state: State, entry: Entry, frontend: CollectiveFrontend) -> None:
    """Make the states of all members of a new world equal, after the reset callbacks."""
    # if all members come from the previous loop, none of them has the state of this loop yet
    before_this_loop = entry.version is not None and entry.version.loop < state._loop
    resumed = False
    if frontend.checkpoints is not None and (entry.version is None or before_this_loop):
        resumed = frontend.checkpoints.load(state, frontend.rank() == entry.root)
    if entry.moved or resumed:
        state._reset_alone()
    if entry.sync or before_this_loop:
        state._sync_from(entry.root, entry.version)
    else:
        state._refresh_from(entry.root, entry.version)
    state._function_begins()
