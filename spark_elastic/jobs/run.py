"""`run` and `run_async`: start a function as an elastic job. All parts of a job are put together here."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import itertools
import os
import socket
import textwrap
import warnings
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

from spark_elastic.driver import preflight
from spark_elastic.driver.elastic_driver import ElasticDriver
from spark_elastic.driver.hosts import HostManager
from spark_elastic.driver.output import OutputFiles, OutputPrinter
from spark_elastic.errors import InvalidSettingsError, nearest
from spark_elastic.jobs.backends import Backend, LocalBackend, SparkBackend
from spark_elastic.jobs.job import ElasticJob
from spark_elastic.jobs.settings import RunCall
from spark_elastic.reporting.progress import ProgressModel
from spark_elastic.settings import ElasticSettings, declarations
from spark_elastic.wire.framing import new_key
from spark_elastic.wire.messages import LaunchSpec, interpreter, modules_of

CONNECT_TIMEOUT_S = 60.0

_job_numbers = itertools.count(1)

_P = ParamSpec("_P")
_R = TypeVar("_R")

_WITHOUT_EFFECT = {
    "use_gloo": "collectives always run over Gloo, and over NCCL where each worker has its own GPU",
    "use_mpi": "there is no MPI here; collectives run over Gloo",
    "mpi_args": "there is no MPI here",
    "extra_mpi_args": "there is no MPI here",
    "executable": "workers run the Python of their executors (spark.pyspark.python)",
    "prefix_output_with_timestamp": "each line has its rank in front",
}
"""Arguments of Horovod's `run` that are accepted, and why they are ignored."""


def _takes_arguments_of(make_call: Callable[_P, RunCall]) -> Callable[[Callable[[RunCall], _R]], Callable[_P, _R]]:
    """Give a function of a `RunCall` the arguments of `RunCall`, for callers, `help()` and type checkers."""

    def decorate(function: Callable[[RunCall], _R]) -> Callable[_P, _R]:
        @functools.wraps(function)
        def called(*args: _P.args, **kwargs: _P.kwargs) -> _R:
            given: dict[str, Any] = _current_names(function.__name__, kwargs)
            return function(make_call(*args, **given))

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
            warnings.warn(f"{old}= has no effect: {_WITHOUT_EFFECT[old]}", stacklevel=3)
        elif new is None:
            close = nearest(old, names)
            hint = f"; did you mean {close!r}?" if close else ""
            raise TypeError(f"{function}() got an unexpected keyword argument {old!r}{hint}")
        elif new in current:
            raise InvalidSettingsError(f"{old}={value!r} and {new}={current[new]!r} are the same setting; give {new}")
        else:
            warnings.warn(f"{old}= is Horovod's name for this; it is called {new}= here", stacklevel=3)
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
def run(call: RunCall) -> list[Any]:
    """Run `fn(*args, **kwargs)` in `num_proc` workers and keep it running while executors come and go.

    Returns:
        What `fn` returned in each worker, by rank.

    Raises:
        UsageError: The call has to be changed; nothing was run.
        UserFunctionError: `fn` raised; carries rank, host and traceback.
        JobError: The job could not continue (NotEnoughSlotsError, StateLostError, ResetLimitError, ...).
    """
    job = _start(call)
    try:
        return job.result()
    except BaseException as error:
        if not job.done():  # Ctrl-C, or the notebook's Cancel
            job.cancel(f"interrupted by {type(error).__name__}")
        raise


@_takes_arguments_of(RunCall)
def run_async(call: RunCall) -> ElasticJob:
    """Start `fn(*args, **kwargs)` in `num_proc` workers, as `run` does, and return at once.

    Returns:
        The handle of the job, with `result()`, `cancel()`, `status()`, `events()` and `changes()`.

    Raises:
        UsageError: The call has to be changed; nothing was run.
    """
    return _start(call)


def _start(call: RunCall) -> ElasticJob:
    function = preflight.pickled(call.fn, tuple(call.args), call.kwargs)
    backend: Backend = SparkBackend(call.spark) if call.launcher is None else LocalBackend(call.launcher)
    settings, fewer = _within(backend.most_slots(), call.resolve(backend.slots))
    sources = backend.sources()
    if call.discovery is not None:
        sources.append(HostManager(call.discovery, backend.host_of))
    bind, advertise = backend.listen_at()
    listening = _listen(bind)
    spec = LaunchSpec(
        job=f"{os.getpid()}-{next(_job_numbers)}",
        driver_addresses=((advertise, listening.getsockname()[1]),),
        key=new_key(),
        function=function,
        connect_timeout_s=min(call.start_timeout, CONNECT_TIMEOUT_S),
        made_by=interpreter(),
        env=dict(call.env or {}),
        nics=None if call.nics is None else tuple(call.nics),
        device=call.device,
        preimport=modules_of(function),
    )
    with contextlib.ExitStack() as undo:  # releases everything if the job cannot be started
        undo.callback(listening.close)
        progress = ProgressModel() if call.verbose else None
        files = None if call.output_dir is None else OutputFiles(call.output_dir)
        if files is not None:
            undo.callback(files.close)
        printer = OutputPrinter(call.stdout, call.stderr, progress, None if files is None else files.take)
        undo.callback(printer.close)
        if fewer and call.verbose:
            printer.line(f"spark_elastic: {fewer}")
        driver = ElasticDriver(
            spec,
            settings,
            lambda on_ended: backend.make_launcher(spec, settings, on_ended),
            listening,
            sources=sources,
            printer=printer,
            verbose=call.verbose,
            progress=progress,
        )
        undo.callback(driver.close)
        if progress is not None:
            progress.describe_cluster = lambda: backend.load(driver.tasks_pending)
        clean_up = undo.pop_all()
    return ElasticJob(spec.job, driver, lambda: backend.gather(spec, settings, driver), clean_up.close)


def _listen(bind: str) -> socket.socket:
    try:
        return socket.create_server((bind, 0), backlog=1024)
    except OSError as error:
        fix = "spark.driver.bindAddress must be an IPv4 address of this machine, or a name for one"
        raise InvalidSettingsError(f"the driver cannot listen at {bind}: {error.strerror or error}; {fix}") from None


def _within(most: tuple[int, str] | None, settings: ElasticSettings) -> tuple[ElasticSettings, str]:
    """Limit the workers to the slots that there can ever be (`most`), if those are enough for the minimum.

    Returns:
        The settings, and a line that says that fewer workers than num_proc start; empty if as many start.
    """
    if most is None or not settings.min_num_proc <= most[0] < settings.max_num_proc:
        return settings, ""
    slots, where = most
    limited = dataclasses.replace(settings, num_proc=min(settings.num_proc, slots), max_num_proc=slots)
    if slots >= settings.num_proc:
        return limited, ""
    return limited, f"starting with {slots} workers instead of num_proc={settings.num_proc}: {where} has no more slots"
