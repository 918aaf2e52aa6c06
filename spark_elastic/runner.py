"""`run` and `run_async`: an elastic job from a function. The composition root: everything is put together here."""

from __future__ import annotations

import contextlib
import itertools
import os
import pickle
import socket
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TextIO

from spark_elastic.driver import preflight
from spark_elastic.driver.elastic_driver import ElasticDriver, EventSource, PostEvent
from spark_elastic.driver.launcher import Launcher, OnEnded
from spark_elastic.driver.local_launcher import LocalLauncher
from spark_elastic.driver.output import OutputPrinter
from spark_elastic.errors import InvalidSettingsError, NotEnoughSlotsError
from spark_elastic.job import ElasticJob
from spark_elastic.settings import ElasticSettings
from spark_elastic.wire.framing import new_key
from spark_elastic.wire.handover import AgentOrder, interpreter

if TYPE_CHECKING:
    from spark_elastic.driver.executor_watch import ExecutorWatch
    from spark_elastic.driver.host_discovery import HostDiscovery
    from spark_elastic.driver.spark_discovery import SparkHostDiscovery

CONNECT_TIMEOUT_S = 60.0

_job_numbers = itertools.count(1)


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
    cooldown_range: tuple[float, float] | None = (0.5, 60.0),
    heartbeat_timeout: float = 30.0,
    discovery: HostDiscovery | None = None,
    env: Mapping[str, str] | None = None,
    nics: Sequence[str] | str | None = None,
    stdout: TextIO | None = None,
    stderr: TextIO | None = None,
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
        cooldown_range: shortest and longest pause, in seconds, before a place that failed is used again; None: none.
        heartbeat_timeout: seconds of silence after which a worker counts as hung or cut off. Deaths do not wait for it.
        discovery: narrows the hosts and slots to use: `HostDiscoveryScript`, `FixedHosts`, or your own.
        env: added to the workers' environment.
        nics: names of the network interfaces that may carry collectives. Default: those that reach one another.
        stdout, stderr: where the workers' output goes, each line with its rank in front. Default: this process's own.
        verbose: 0: only the workers' output; 1: the membership too; 2: and what is waited for.
        launcher: a `LocalLauncher` runs the workers as plain processes of this machine, without Spark.

    Returns: what `fn` returned in each worker, by rank.
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
        cooldown_range=cooldown_range,
        heartbeat_timeout=heartbeat_timeout,
        discovery=discovery,
        env=env,
        nics=nics,
        stdout=stdout,
        stderr=stderr,
        verbose=verbose,
        launcher=launcher,
    )
    try:
        return job.result()
    except BaseException as error:
        if not job.done():  # Ctrl-C, or the notebook's Cancel, while it was waited for
            job.cancel(f"interrupted by {type(error).__name__}")
        raise


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
    cooldown_range: tuple[float, float] | None = (0.5, 60.0),
    heartbeat_timeout: float = 30.0,
    discovery: HostDiscovery | None = None,
    env: Mapping[str, str] | None = None,
    nics: Sequence[str] | str | None = None,
    stdout: TextIO | None = None,
    stderr: TextIO | None = None,
    verbose: int = 1,
    launcher: LocalLauncher | None = None,
) -> ElasticJob:
    """Start a job and return its handle at once. Arguments as for `run`.

    Returns: an `ElasticJob` with `result()`, `cancel()`, `status()` and `events()`.
    Raises:
        UsageError: the call has to be changed; nothing was run.
    """
    function = preflight.pickled(fn, tuple(args), kwargs)
    context = None if launcher is not None else preflight.check_spark(spark)
    spark_slots = None if context is None else _spark_discovery(context)
    want = num_proc if num_proc is not None else (max_num_proc or min_num_proc or _slots(spark_slots))
    settings = ElasticSettings(
        num_proc=want,
        min_num_proc=min_num_proc if min_num_proc is not None else want,
        max_num_proc=max_num_proc if max_num_proc is not None else want,
        start_timeout_s=start_timeout,
        elastic_timeout_s=elastic_timeout,
        reset_limit=reset_limit,
        cooldown_range_s=cooldown_range,
        heartbeat_timeout_s=heartbeat_timeout,
    )
    name = f"{os.getpid()}-{next(_job_numbers)}"
    bind, advertise = ("127.0.0.1", "127.0.0.1") if context is None else _driver_addresses(context)
    listening = socket.create_server((bind, 0), backlog=1024)
    order = AgentOrder(
        job=name,
        driver_addresses=((advertise, listening.getsockname()[1]),),
        key=new_key(),
        function=function,
        connect_timeout_s=min(start_timeout, CONNECT_TIMEOUT_S),
        made_by=interpreter(),
        env={key: str(value) for key, value in (env or {}).items()},
        nics=(nics,) if isinstance(nics, str) else tuple(nics) if nics else None,
    )
    sources: list[EventSource] = []
    if spark_slots is not None:
        sources.append(_ExecutorEvents(spark_slots))
    if discovery is not None:
        from spark_elastic.driver.host_manager import HostManager

        sources.append(HostManager(discovery))

    def make_launcher(on_ended: OnEnded) -> Launcher:
        if launcher is not None:
            return launcher.bind(order, on_ended)
        from spark_elastic.driver.spark_launcher import SparkLauncher
        from spark_elastic.task.spark_agent import run_in_task

        payload = pickle.dumps(order)
        return SparkLauncher(
            context, run_in_task, lambda slot: payload, on_ended, description=f"spark_elastic job {name}"
        )

    printer = OutputPrinter(stdout, stderr)
    driver = ElasticDriver(order, settings, make_launcher, listening, sources=sources, printer=printer, verbose=verbose)

    def prepare() -> None:
        if spark_slots is not None:
            _wait_for_gang(spark_slots, settings, driver)

    def clean_up() -> None:
        listening.close()
        printer.close()

    return ElasticJob(name, driver, prepare, clean_up)


def _driver_addresses(context: Any) -> tuple[str, str]:
    """Where to listen, and the address that executors reach it at: the same as Spark's own."""
    conf = context.getConf()
    host = conf.get("spark.driver.host", "127.0.0.1")
    return conf.get("spark.driver.bindAddress", host), host


def _spark_discovery(context: Any) -> SparkHostDiscovery:
    from spark_elastic.driver.spark_discovery import SparkHostDiscovery
    from spark_elastic.task.spark_task import slot_report

    return SparkHostDiscovery(context, slot_report)


def _slots(discovery: SparkHostDiscovery | None) -> int:
    """The cluster's task slots, the number of workers if the caller names none."""
    if discovery is None:
        raise InvalidSettingsError("the local launcher has no slots to count; give num_proc")
    now = discovery.slots().now
    if now < 1:
        raise InvalidSettingsError("the cluster has no task slot at the moment; give num_proc to wait for some")
    return now


def _wait_for_gang(discovery: SparkHostDiscovery, settings: ElasticSettings, driver: ElasticDriver) -> None:
    """Hold the job back until its workers can be placed together: all of them soon, or the fewest it can live with.

    Raises:
        NotEnoughSlotsError: not even those within start_timeout.
    """
    stop = driver.stop_requested
    if settings.num_proc > settings.min_num_proc:
        with contextlib.suppress(NotEnoughSlotsError):
            discovery.probe(settings.num_proc, min(settings.start_grace_s, settings.start_timeout_s), stop=stop)
            return
    probe = discovery.probe(settings.min_num_proc, settings.start_timeout_s, stop=stop)
    if probe.refused:
        driver.note_waiting(probe.why)


class _ExecutorEvents:
    """Spark's news of executors as a source of the driver's events."""

    def __init__(self, discovery: SparkHostDiscovery) -> None:
        self._discovery = discovery
        self._watch: ExecutorWatch | None = None

    def start(self, post: PostEvent) -> None:
        self._watch = self._discovery.watch(post)

    def close(self) -> None:
        if self._watch is not None:
            self._watch.close()
