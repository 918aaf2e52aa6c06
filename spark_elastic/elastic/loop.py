"""The elastic loop: calls the user's function again in each new world until it returns."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Concatenate, ParamSpec, TypeVar, cast

from spark_elastic.elastic.frontend import CollectiveFrontend, Entry, SentOn, frontend
from spark_elastic.elastic.state import State
from spark_elastic.errors import HorovodInternalError, HostsUpdatedInterrupt

log = logging.getLogger("spark_elastic.elastic.loop")

P = ParamSpec("P")
R = TypeVar("R")
S = TypeVar("S", bound=State)


def run(func: Callable[Concatenate[S, P], R]) -> Callable[Concatenate[S, P], R]:
    """Decorator: run `func(state, ...)` so that it outlives the loss and the arrival of workers.

    Each time the world has changed, the reset callbacks are called, the state is synchronised and `func` is called
    again. No collective may be called on the way to it that a newcomer would not call at the same time.
    """
    return elastic_loop(func, frontend)


def elastic_loop(func: Callable[Concatenate[S, P], R], frontend: CollectiveFrontend) -> Callable[Concatenate[S, P], R]:
    """Wrap `func(state, ...)` so that it is called again in each new world until it returns.

    A `HorovodInternalError` returns the state to a point from which the survivors can resume; a `HostsUpdatedInterrupt`
    is raised at one. Then the next world is joined, the reset callbacks run, the state is taken over from the most
    advanced member, and `func` is called again.

    When the user's function is called again because its world broke after a loop, that loop takes up the state that it
    had left, and ends at once; loops before it are skipped.
    """

    def wrapper(state: S, *args: P.args, **kwargs: P.kwargs) -> R:
        state._frontend = frontend
        loops = frontend.loops
        loop = state._loop = loops.enter()
        kept = loops.kept(loop)
        if kept is not None and kept.state is not None:
            state._take_up(kept.state)
        if kept is not None and loop < loops.last:
            return cast(R, kept.result)
        try:
            entry = _enter(state, frontend, again=kept is not None)
            result = call_until_done(state, entry, *args, **kwargs)
            if kept is not None and kept.state is not None and not _has_stepped(state, kept.state):
                result = cast(R, kept.result)  # made of the steps of the first call; this one found none left
        except SentOn:
            if kept is not None:
                return cast(R, kept.result)
            result = frontend.result_of(loop)
            loops.finish(loop, None, result)
            return result
        frontend.finished(loop, state, result)
        return result

    def call_until_done(state: S, entry: Entry, *args: P.args, **kwargs: P.kwargs) -> R:
        state._counter.in_loop = True
        try:
            while True:
                try:
                    _prepare(state, entry)
                except HorovodInternalError as error:
                    if entry.from_last_loop:
                        raise
                    log.info("the world broke before the function was called: %s", error)
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
            state._loop_over()

    functools.update_wrapper(wrapper, func)
    return cast("Callable[Concatenate[S, P], R]", wrapper)  # `state` may be given by name


def _has_stepped(state: State, since: State) -> bool:
    return state.version is not None and since.version is not None and state.version.is_steps_after(since.version)


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


def _prepare(state: State, entry: Entry) -> None:
    """Give the state to all members of a new world alike."""
    if entry.moved:
        state._reset_alone()
    # where all members bring the result of the loop before, none of them has the state of this loop yet
    before_this_loop = entry.version is not None and entry.version.loop < state._loop
    if entry.sync or before_this_loop:
        state._sync_from(entry.root, entry.version)
    else:
        state._refresh_from(entry.root, entry.version)
    state._function_begins()
