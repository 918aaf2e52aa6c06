"""`run` and `run_async`: run a function as an elastic job; their arguments, and Horovod's names for them."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import textwrap
import warnings
from collections.abc import Callable, Iterator
from typing import Any, ParamSpec, TypeVar

from spark_elastic import clock
from spark_elastic.errors import InvalidSettingsError, nearest
from spark_elastic.jobs.driver_callbacks import CallbackSession, DriverResult, DriverRun
from spark_elastic.jobs.job import ElasticJob
from spark_elastic.jobs.settings import RunCall
from spark_elastic.jobs.start import start
from spark_elastic.reporting.descriptions import describe_settings
from spark_elastic.reporting.event_log import event_rows
from spark_elastic.settings import declarations
from spark_elastic.task.reaper import default_child_signal
from spark_elastic.task.script import Script
from spark_elastic.task.user_frames import without_own_frames

_P = ParamSpec("_P")
_R = TypeVar("_R")

_WITHOUT_EFFECT = {
    "use_gloo": "collectives always run over Gloo, and over NCCL where each worker has its own GPU",
    "use_mpi": "there is no MPI here; collectives run over Gloo",
    "mpi_args": "there is no MPI here",
    "extra_mpi_args": "there is no MPI here",
    "executable": "workers run the Python of their executors (PYSPARK_PYTHON)",
    "prefix_output_with_timestamp": "each line has its rank in front",
}
"""Arguments of Horovod's `run` that are accepted, and why they are ignored."""


def _takes_arguments_of(make_call: Callable[_P, RunCall]) -> Callable[[Callable[[RunCall], _R]], Callable[_P, _R]]:
    """Give a function of a `RunCall` the arguments of `RunCall`, for callers, `help()` and type checkers."""

    def decorate(function: Callable[[RunCall], _R]) -> Callable[_P, _R]:
        @without_own_frames(lambda *_, verbose=1, **__: verbose not in (None, 0, 1))
        @functools.wraps(function)
        def called(*args: _P.args, **kwargs: _P.kwargs) -> _R:
            return function(make_call(*args, **_current_names(function.__name__, kwargs)))

        called.__signature__ = _signature(function)  # type: ignore[attr-defined]
        called.__doc__ = _with_arguments(inspect.getdoc(function) or "")
        return called

    return decorate


def _current_names(function: str, given: dict[str, Any]) -> dict[str, Any]:
    """Replace Horovod's names of arguments. Called from the wrapper that the user calls."""
    known = declarations(RunCall)
    renamed = {each.setting.horovod_name: each.name for each in known if each.setting.horovod_name}
    names = [each.name for each in known]
    current = {name: value for name, value in given.items() if name in names}
    for old, value in given.items():
        new = renamed.get(old)
        if old in names:
            continue
        if old in _WITHOUT_EFFECT:
            warnings.warn(f"{old}= has no effect: {_WITHOUT_EFFECT[old]}", stacklevel=4)
        elif new is None:
            close = nearest(old, names)
            hint = f"; did you mean {close!r}?" if close else ""
            raise TypeError(f"{function}() got an unexpected keyword argument {old!r}{hint}")
        elif new in current:
            raise InvalidSettingsError(f"{old}={value!r} and {new}={current[new]!r} are the same setting; give {new}")
        else:
            warnings.warn(f"{old}= is Horovod's name for this; it is called {new}= here", stacklevel=4)
            current[new] = value
    return current


def _signature(function: Callable[[RunCall], Any]) -> inspect.Signature:
    parameters = []
    for each in declarations(RunCall):
        is_positional = each.name in ("fn", "args", "kwargs")
        kind = inspect.Parameter.POSITIONAL_OR_KEYWORD if is_positional else inspect.Parameter.KEYWORD_ONLY
        default = inspect.Parameter.empty if each.default is dataclasses.MISSING else each.default
        parameters.append(inspect.Parameter(each.name, kind, default=default, annotation=each.type))
    return inspect.Signature(parameters, return_annotation=inspect.signature(function).return_annotation)


def _with_arguments(doc: str) -> str:
    """Insert the section on the arguments into a docstring, before `Returns:`."""
    arguments = [
        textwrap.fill(f"{each.name}: {each.setting.doc}", 110, initial_indent="    ", subsequent_indent=" " * 8)
        for each in declarations(RunCall)
    ]
    head, returns, tail = doc.partition("Returns:")
    return "\n".join([f"{head}Args:", *arguments, "", f"{returns}{tail}"])


@_takes_arguments_of(RunCall)
@default_child_signal()
def run(call: RunCall) -> list[Any]:
    """Run `fn(*args, **kwargs)` in `num_proc` workers and keep it running while executors come and go.

    Returns:
        What `fn` returned in each worker, by rank.

    Raises:
        UsageError: The call has to be changed.
        UserFunctionError: `fn` raised; carries rank, host and traceback.
        JobError: The job could not continue (NotEnoughSlotsError, StateLostError, ResetLimitError, ...).
    """
    session, began = CallbackSession(call.callbacks), clock.wall()
    name = call.fn.name if isinstance(call.fn, Script) else getattr(call.fn, "__qualname__", type(call.fn).__name__)
    with session.fit(DriverRun(name, plain_settings(call), run_id=call.run_id)):
        job = start(call, session if session else None)
        try:
            with cancelled_on_error(job):
                if session:
                    session.deliver(until_stop=True)
                if session.stop_reason and not job.done():
                    job.cancel(session.stop_reason)
                returned = job.result()
        finally:
            session.note_events(event_rows(job.changes(), began))
        session.succeeded(DriverResult(returned=returned, events=event_rows(job.changes(), began)))
    return returned


@_takes_arguments_of(RunCall)
def run_async(call: RunCall) -> ElasticJob:
    """Start `fn(*args, **kwargs)` in `num_proc` workers, as `run` does, and return at once.

    Returns:
        The handle of the job, with `result()`, `cancel()`, `status()`, `timeline()` and `changes()`.

    Raises:
        UsageError: The call has to be changed.
    """
    if call.callbacks:
        raise InvalidSettingsError(
            "run_async takes no callbacks, because they are called on the thread that waits for the job; give them to "
            "run or to an estimator, or use job.changes()"
        )
    return start(call)


@contextlib.contextmanager
def cancelled_on_error(job: ElasticJob) -> Iterator[None]:
    """Cancel the job if the block raises while it runs: Ctrl-C, the notebook's Cancel, an error of a callback."""
    try:
        yield
    except BaseException as error:
        if not job.done():
            job.cancel(f"interrupted by {type(error).__name__}")
        raise


def plain_settings(call: RunCall) -> dict[str, Any]:
    """Return the arguments that were given as text for people, without the values of environment variables."""
    names = [each.name for each in declarations(RunCall)]
    given = {name: getattr(call, name) for name in names if name not in ("fn", "args", "kwargs", "callbacks", "spark")}
    return describe_settings({name: value for name, value in given.items() if value is not None})
