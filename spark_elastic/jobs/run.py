"""`run` and `run_async`: an elastic job from a function. The composition root: everything is put together here."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import os
import socket
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO

from spark_elastic.data.store import Store
from spark_elastic.driver import preflight
from spark_elastic.driver.elastic_driver import ElasticDriver
from spark_elastic.driver.hosts import HostDiscovery
from spark_elastic.driver.local_launcher import LocalLauncher
from spark_elastic.driver.output import OutputFiles, OutputPrinter
from spark_elastic.errors import InvalidSettingsError
from spark_elastic.jobs.backends import Backend, HostEvents, LocalBackend, SparkBackend
from spark_elastic.jobs.job import ElasticJob
from spark_elastic.reporting.progress import ProgressModel
from spark_elastic.settings import ElasticSettings, whole_number
from spark_elastic.wire.framing import new_key
from spark_elastic.wire.launch_spec import AgentOrder, interpreter, modules_of

CONNECT_TIMEOUT_S = 60.0

_job_numbers = itertools.count(1)


@preflight.with_horovods_names
def run(
    fn: Callable[..., Any],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    num_proc: int | None = None,
    min_num_proc: int | None = None,
    max_num_proc: int | None = None,
    spark: Any = None,
    start_timeout: float = 600.0,
    elastic_timeout: float = 600.0,
    reset_limit: int | None = None,
    crash_limit: int | None = 3,
    cooldown_range: tuple[float, float] | None = (0.5, 60.0),
    heartbeat_timeout: float = 30.0,
    stall_timeout: float = 600.0,
    discovery: HostDiscovery | None = None,
    env: Mapping[str, str] | None = None,
    nics: Sequence[str] | str | None = None,
    device: str = "auto",
    stdout: TextIO | None = None,
    stderr: TextIO | None = None,
    output_dir: str | Path | Store | None = None,
    verbose: int = 1,
    launcher: LocalLauncher | None = None,
) -> list[Any]:
    """Run `fn(*args, **kwargs)` in `num_proc` workers and keep it running while executors come and go.

    Args:
        fn: the function; it and its arguments travel by cloudpickle.
        num_proc: workers to start with. Default: the task slots of the cluster.
        min_num_proc: fewer than these, and the job waits up to `elastic_timeout`, then fails. Default: `num_proc`.
        max_num_proc: more are not used. Default: `num_proc`.
        spark: a SparkSession or SparkContext. Default: the active one.
        start_timeout: seconds that the first `min_num_proc` workers may take to be ready.
        elastic_timeout: seconds that the job waits for workers when it has too few, keeping the state.
        reset_limit: how often the world may be rebuilt. Default: without limit.
        crash_limit: how many worlds in a row may lose a crashed process before one more step is applied; then the job
            fails instead of starting it again. None: without limit.
        cooldown_range: shortest and longest pause, in seconds, before a place that failed is used again; None: none.
        heartbeat_timeout: seconds of silence after which a worker counts as hung or cut off. Deaths do not wait for it.
        stall_timeout: seconds that a live worker may keep the others waiting, in a collective or on the way to the
            next world; raise it if one rank works alone for longer (a long evaluation, a slow checkpoint).
        discovery: narrows the hosts and slots to use: `HostDiscoveryScript`, `FixedHosts`, or your own.
        env: added to the workers' environment.
        nics: names of the network interfaces that may carry collectives. Default: those that reach one another.
        device: what the workers compute on, `hvd.device()` in them. "auto": a GPU where they have one; "cpu": GPUs are
            hidden from them; "cuda": a worker without a GPU fails at once. Gradients on GPUs are reduced by NCCL where
            each worker has a GPU of its own.
        stdout, stderr: where the workers' output goes, each line with its rank in front. Default: this process's own.
        output_dir: path, URI or Store to write it to as well: `rank.0/stdout`, `rank.0/stderr`, and so on.
        verbose: 0: only the workers' output; 1: a bar (in a terminal or a notebook, few lines elsewhere) and a line for
            each change of the workers; 2: each step of them.
        launcher: a `LocalLauncher` runs the workers as plain processes of this machine, without Spark.

    Returns: what `fn` returned in each worker, by rank; without the results that were lost with their executors after
        the function had returned, of which a line is printed.
    Raises:
        UsageError: the call has to be changed; nothing was run.
        UserFunctionError: `fn` raised; carries rank, host and traceback.
        JobError: the job could not go on (NotEnoughSlotsError, StateLostError, ResetLimitError, ...).
    """
    job = run_async(
        fn,
        args,
        kwargs,
        num_proc=num_proc,
        min_num_proc=min_num_proc,
        max_num_proc=max_num_proc,
        spark=spark,
        start_timeout=start_timeout,
        elastic_timeout=elastic_timeout,
        reset_limit=reset_limit,
        crash_limit=crash_limit,
        cooldown_range=cooldown_range,
        heartbeat_timeout=heartbeat_timeout,
        stall_timeout=stall_timeout,
        discovery=discovery,
        env=env,
        nics=nics,
        device=device,
        stdout=stdout,
        stderr=stderr,
        output_dir=output_dir,
        verbose=verbose,
        launcher=launcher,
    )
    try:
        return job.result()
    except BaseException as error:
        if not job.done():  # Ctrl-C, or the notebook's Cancel, while it was waited for
            job.cancel(f"interrupted by {type(error).__name__}")
        raise


@preflight.with_horovods_names
def run_async(
    fn: Callable[..., Any],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    num_proc: int | None = None,
    min_num_proc: int | None = None,
    max_num_proc: int | None = None,
    spark: Any = None,
    start_timeout: float = 600.0,
    elastic_timeout: float = 600.0,
    reset_limit: int | None = None,
    crash_limit: int | None = 3,
    cooldown_range: tuple[float, float] | None = (0.5, 60.0),
    heartbeat_timeout: float = 30.0,
    stall_timeout: float = 600.0,
    discovery: HostDiscovery | None = None,
    env: Mapping[str, str] | None = None,
    nics: Sequence[str] | str | None = None,
    device: str = "auto",
    stdout: TextIO | None = None,
    stderr: TextIO | None = None,
    output_dir: str | Path | Store | None = None,
    verbose: int = 1,
    launcher: LocalLauncher | None = None,
) -> ElasticJob:
    """Start a job and return its handle at once. Arguments as for `run`.

    Returns: an `ElasticJob` with `result()`, `cancel()`, `status()` and `events()`.
    Raises:
        UsageError: the call has to be changed; nothing was run.
    """
    preflight.check_call(fn, args, kwargs)
    environment, interfaces = preflight.environment(env), preflight.interface_names(nics)
    preflight.check_discovery(discovery)
    preflight.check_output(stdout, stderr, verbose)
    if launcher is not None and not isinstance(launcher, LocalLauncher):
        raise InvalidSettingsError(f"launcher must be a LocalLauncher, not {launcher!r}; without one, Spark is used")
    function = preflight.pickled(fn, tuple(args), kwargs)
    backend: Backend = SparkBackend(spark) if launcher is None else LocalBackend(launcher)
    settings = _settings(
        backend,
        num_proc,
        min_num_proc,
        max_num_proc,
        start_timeout_s=start_timeout,
        elastic_timeout_s=elastic_timeout,
        reset_limit=reset_limit,
        crash_limit=crash_limit,
        cooldown_range_s=cooldown_range,
        heartbeat_timeout_s=heartbeat_timeout,
        stall_timeout_s=stall_timeout,
    )
    settings, fewer = _within(backend.most_slots(), settings)
    sources = backend.sources()
    if discovery is not None:
        sources.append(HostEvents(discovery, backend.host_of))
    bind, advertise = backend.listen_at()
    listening = _listen(bind)
    order = AgentOrder(
        job=f"{os.getpid()}-{next(_job_numbers)}",
        driver_addresses=((advertise, listening.getsockname()[1]),),
        key=new_key(),
        function=function,
        connect_timeout_s=min(start_timeout, CONNECT_TIMEOUT_S),
        made_by=interpreter(),
        env=environment,
        nics=interfaces,
        device=preflight.device(device),
        preimport=modules_of(function),
    )
    with contextlib.ExitStack() as undo:  # until the job takes over, what is held is given back here
        undo.callback(listening.close)
        progress = ProgressModel() if verbose else None
        files = None if output_dir is None else OutputFiles(output_dir)
        if files is not None:
            undo.callback(files.close)
        printer = OutputPrinter(stdout, stderr, progress, None if files is None else files.take)
        undo.callback(printer.close)
        if fewer and verbose:
            printer.line(f"spark_elastic: {fewer}")
        driver = ElasticDriver(
            order,
            settings,
            lambda on_ended: backend.make_launcher(order, settings, on_ended),
            listening,
            sources=sources,
            printer=printer,
            verbose=verbose,
            progress=progress,
        )
        undo.callback(driver.close)
        if progress is not None:
            progress.describe_cluster = lambda: backend.around(driver.tasks_pending)
        clean_up = undo.pop_all()
    return ElasticJob(order.job, driver, lambda: backend.gather(order, settings, driver), clean_up.close)


def _listen(bind: str) -> socket.socket:
    try:
        return socket.create_server((bind, 0), backlog=1024)
    except OSError as error:
        raise InvalidSettingsError(
            f"the driver cannot listen at {bind}: {error.strerror or error}; spark.driver.bindAddress must be an IPv4 "
            "address of this machine, or a name for one"
        ) from None


def _within(most: tuple[int, str] | None, settings: ElasticSettings) -> tuple[ElasticSettings, str]:
    """Ask for no more workers than there can ever be slots, if those are enough. Returns: also what to say of it."""
    if most is None or not settings.min_num_proc <= most[0] < settings.max_num_proc:
        return settings, ""
    slots, where = most
    start = min(settings.num_proc, slots)
    fewer = (
        ""
        if start == settings.num_proc
        else (f"starting with {start} workers instead of num_proc={settings.num_proc}: {where} has no more slots")
    )
    return dataclasses.replace(settings, num_proc=start, max_num_proc=slots), fewer


def _settings(
    backend: Backend, num_proc: int | None, min_num_proc: int | None, max_num_proc: int | None, **others: Any
) -> ElasticSettings:
    """With what the caller left out: as many workers as there are slots, within the bounds that were given."""
    given = {"num_proc": num_proc, "min_num_proc": min_num_proc, "max_num_proc": max_num_proc}
    for name, value in given.items():
        if value is not None:
            whole_number(name, value, at_least=1)
    if min_num_proc is not None and max_num_proc is not None and min_num_proc > max_num_proc:
        raise InvalidSettingsError(f"min_num_proc={min_num_proc} is larger than max_num_proc={max_num_proc}")
    if num_proc is None:
        if min_num_proc is not None and min_num_proc == max_num_proc:
            num_proc = min_num_proc
        else:
            num_proc = min(backend.slots(), max_num_proc or sys.maxsize)
            num_proc = max(num_proc, min_num_proc or 1)
    return ElasticSettings(
        num_proc=num_proc,
        min_num_proc=num_proc if min_num_proc is None else min_num_proc,
        max_num_proc=num_proc if max_num_proc is None else max_num_proc,
        **others,
    )
