"""The elastic loop: call the user's function again in each new world until it returns."""

from __future__ import annotations

import functools
import inspect
import logging
import traceback
from collections.abc import Callable
from typing import Any, Concatenate, ParamSpec, TypeVar, cast

from spark_elastic.elastic.finish import LaterLoop
from spark_elastic.elastic.frontend import Entry, frontend
from spark_elastic.elastic.mark import running_loop
from spark_elastic.elastic.run_checkpoints import RunCheckpoints
from spark_elastic.elastic.state import State
from spark_elastic.errors import HorovodInternalError, HostsUpdatedInterrupt, UsageError
from spark_elastic.wire import worker_link

log = logging.getLogger("spark_elastic.elastic.loop")

P = ParamSpec("P")
R = TypeVar("R")
S = TypeVar("S", bound=State)


def call_with_checkpoints(function: Callable[..., R], checkpoints: RunCheckpoints, /, *args: Any, **kwargs: Any) -> R:
    """Call a user's function whose loops write checkpoints."""
    frontend.checkpoints = checkpoints
    return function(*args, **kwargs)


def run(func: Callable[Concatenate[S, P], R]) -> Callable[Concatenate[S, P], R]:
    """Decorate `func(state, ...)` so that it is called again whenever workers are lost or arrive, until it returns.

    Each time the world has changed, the reset callbacks are called, the state is synchronised and `func` is called
    again. Before `func`, call only collectives that a newcomer calls at the same time.

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
        link = worker_link.current()
        if link is not None and link.restarts_world:
            raise UsageError(
                f"{name} is a loop of hvd.elastic.run, whose workers keep their state after a loss; with "
                "restart='world' (--torchrun) all start again: leave out one of the two"
            )
        if running_loop.get() is not None:
            raise UsageError(
                f"{name}, a loop of hvd.elastic.run, was called within another one, which could not be "
                "repeated after a loss; call loops one after the other"
            )
        frontend = state._frontend
        loops = frontend.loops
        loop = state._loop = loops.enter()
        kept = loops.kept(loop)
        if kept is not None and kept.state is not None:
            state._copy_from(kept.state)
        if kept is not None and loop < loops.last:
            return cast(R, kept.result)
        if frontend.checkpoints is not None:
            frontend.checkpoints.start_loop(state)
        try:
            entry = _enter(state, again=kept is not None)
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
        outer = running_loop.set(state._counter)
        state._counter.in_loop = True
        try:
            while True:
                try:
                    _prepare(state, entry)
                except HorovodInternalError as error:
                    if entry.from_last_loop:
                        raise
                    log.info("the world broke before the function was called: %s", error)
                    entry = state._frontend.rejoin(state.version)
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
                entry = state._frontend.rejoin(state.version)
        finally:
            running_loop.reset(outer)
            state._loop_over()

    functools.update_wrapper(wrapper, func)
    return cast("Callable[Concatenate[S, P], R]", wrapper)  # `state` may be given by name


def _call(function: Callable[[], R]) -> R:
    """Return the result of the function of a loop; raise HorovodInternalError also if the function has caught one."""
    HorovodInternalError.last_message = None
    result = function()
    caught: str | None = HorovodInternalError.last_message
    if caught is None:
        return result
    log.warning(
        "the function of the elastic loop has caught the error of a collective (%s) and returned, so steps are left "
        "out: it is called again. Let HorovodInternalError pass, which a bare `except Exception`, or a `return` in "
        "`finally`, does not",
        caught,
    )
    raise HorovodInternalError(caught)


def _enter(state: State, *, again: bool) -> Entry:
    frontend = state._frontend
    if again:
        return frontend.rejoin(state.version)
    try:
        return frontend.enter(state._before_joining)
    except HorovodInternalError as error:
        if state._loop > 1:
            raise
        log.info("the first world broke: %s", error)
        return frontend.rejoin(state.version)


def _prepare(state: State, entry: Entry) -> None:
    """Make the states of all members of a new world equal, after the reset callbacks."""
    # if all members come from the previous loop, none of them has the state of this loop yet
    before_this_loop = entry.version is not None and entry.version.loop < state._loop
    checkpoints, resumed = state._frontend.checkpoints, False
    if checkpoints is not None and (entry.version is None or before_this_loop):
        resumed = checkpoints.load(state, state._frontend.rank() == entry.root)
    if entry.moved or resumed:
        state._reset_alone()
    state._sync_from(entry.root, entry.version, equal=not entry.sync and not before_this_loop)
    state._function_begins()
