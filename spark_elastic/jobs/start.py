"""`start`: from the arguments of `run` to a job that runs, with its driver, its output and its status page."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import functools
import itertools
import os
import pickle
import socket
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from spark_elastic import clock
from spark_elastic.driver.addresses import check_interfaces
from spark_elastic.driver.elastic_driver import ElasticDriver, EventSource
from spark_elastic.driver.hosts import HostManager
from spark_elastic.driver.launcher import LocalLauncher
from spark_elastic.driver.output import OutputFiles, OutputPrinter
from spark_elastic.driver.peers import JobObserver
from spark_elastic.driver.pickled_call import pickled
from spark_elastic.driver.status_server import TOKEN_VARIABLE, StatusServer, listen_for_pages, make_token
from spark_elastic.errors import InvalidSettingsError, UnknownInterfaceError
from spark_elastic.jobs.job import ElasticJob
from spark_elastic.jobs.settings import RunCall, RunSettings
from spark_elastic.jobs.tracking import tracking_environment, warn_of_local_store
from spark_elastic.membership.launcher import Launcher, OnEnded
from spark_elastic.membership.topology import SlotReport
from spark_elastic.reporting.job_status import StatusModel
from spark_elastic.reporting.progress import ProgressModel
from spark_elastic.reporting.screens import in_notebook
from spark_elastic.runs.lease import RunLease
from spark_elastic.settings import ElasticSettings
from spark_elastic.spark.cluster import Cluster
from spark_elastic.spark.discovery import SlotWait, place_workers
from spark_elastic.spark.own_modules import check_modules
from spark_elastic.spark.session import checked_cluster
from spark_elastic.task import spark_agent
from spark_elastic.task.reaper import default_child_signal
from spark_elastic.task.user_frames import ALL_FRAMES_SETTING
from spark_elastic.wire.framing import new_key, require_encryption
from spark_elastic.wire.interfaces import THIS_MACHINE, address_of, on_this_machine
from spark_elastic.wire.messages import LaunchSpec, interpreter, modules_of, slowest_import
from spark_elastic.wire.ports import Ports, listen

CONNECT_TIMEOUT_S = 60.0
KEPT_S = 60.0
"""The default of `keep_workers` in notebooks, whose cells run jobs in a row, and with `restart`."""
KEPT_IN_LOCAL_MODE_S = 20.0
"""The default in Spark's local mode, where one process can import PyTorch for all workers."""

_job_numbers = itertools.count(1)


# --- where a job runs: in a `Cluster` of Spark, or as plain processes of this machine ----------------


class ThisMachine:
    """Runs workers as plain processes of this machine. Has those members of `Cluster` that a job needs."""

    is_local = True
    master = "local"

    def __init__(self, launcher: LocalLauncher) -> None:
        self._launcher = launcher

    def worker_bounds(self) -> tuple[int, int]:
        raise InvalidSettingsError("a LocalLauncher has no slots to count; set num_proc")

    def fixed_slots(self) -> int | None:
        return None

    def listen_at(self) -> tuple[str, tuple[str, ...]]:
        host = "::1" if "::1" in self._launcher.hosts else THIS_MACHINE
        return host, (host,)

    def ports(self, setting: str, given: int | str | None) -> Ports:
        return Ports.parse(given or 0)

    def host_of(self, name: str) -> str:
        address = address_of(name)
        return address if address in self._launcher.hosts else on_this_machine(address)

    def make_launcher(
        self, spec: LaunchSpec, settings: ElasticSettings, on_ended: OnEnded, agent: Callable[..., Any]
    ) -> Launcher:
        return self._launcher.bind(spec, on_ended)

    def sources(self) -> list[EventSource]:
        return []

    def console(self, verbose: int) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()


Site = Cluster | ThisMachine


def site_of(call: RunSettings) -> Site:
    """Return the site in which a call of `run` has its workers; raises as `checked_cluster`."""
    if call.launcher is not None:
        return ThisMachine(call.launcher)
    cluster = checked_cluster(call.spark)
    cluster.check_platform(call.driver_host)
    cluster.apply(call.driver_host, call.ship_package)
    cluster.take_resources(call.resources, gpu_each=call.device != "cpu")
    return cluster


# --- the job ---------------------------------------------------------------------------------------


@default_child_signal()
def start(call: RunCall, observer: JobObserver | None = None, lease: RunLease | None = None) -> ElasticJob:
    """Start a job, and return its handle; the observer is told of the job's epochs and changes, and of its end.

    The job is cancelled if another driver takes over the run of `lease`, which is that of a fit. Raises `UsageError`
    before anything is started if the call has to be changed.
    """
    function = pickled(call.function, tuple(call.args), call.kwargs)
    site = site_of(call)
    if isinstance(site, Cluster):
        check_modules(site, function, call.env)
    settings, fewer = _within(site, call.resolve(site.worker_bounds))
    sources: list[EventSource] = [*site.sources()]
    if call.discovery is not None:
        sources.append(HostManager(call.discovery, site.host_of))
    bind, addresses = site.listen_at()
    with contextlib.ExitStack() as undo:  # releases everything if the job cannot be started
        folder = None
        if call.checkpoint_dir is not None:
            from spark_elastic.jobs.run_folder import open_run  # it imports torch

            folder = open_run(call, site if isinstance(site, Cluster) else None, undo)
            function, lease = pickled(folder.writing(call.function), tuple(call.args), call.kwargs), folder.lease
        listening = _listen(bind, site.ports("driver_port", call.driver_port), call.launcher is not None)
        undo.callback(listening.close)
        port = listening.getsockname()[1]
        spec = _launch_spec(call, site, function, tuple((address, port) for address in addresses))
        progress = ProgressModel() if call.verbose else None
        files = None if call.output_dir is None else OutputFiles(call.output_dir)
        if files is not None:
            undo.callback(files.close)
        printer = OutputPrinter(call.stdout, call.stderr, progress, None if files is None else files.add)
        undo.callback(printer.close)
        undo.enter_context(site.console(call.verbose))
        if fewer and call.verbose:
            printer.say(f"spark_elastic: {fewer}")
        if folder is not None and call.verbose:
            printer.say(f"spark_elastic: {folder.in_words()}")
        if isinstance(site, Cluster) and call.verbose and call.device != "cpu":
            amount = site.setting("spark.task.resource.gpu.amount")
            if says := gpus_in_words(amount, site.resources):
                printer.say(f"spark_elastic: {says}")
        has_page = call.status_port is not None
        if call.status_port == "auto":
            has_page = site.is_local and call.verbose > 0
        status = StatusModel(spec.job, settings, clock.monotonic()) if has_page else None
        driver = ElasticDriver(
            spec,
            settings,
            lambda on_ended: site.make_launcher(spec, settings, on_ended, spark_agent.run_in_task),
            listening,
            sources=sources,
            printer=printer,
            verbose=call.verbose,
            progress=progress,
            status=status,
            observer=observer,
            resumable=None if folder is None else folder.resumable,
        )
        if observer is not None:
            undo.callback(observer.job_over)
        undo.callback(driver.close)
        page = None
        if status is not None:
            bind, host = (THIS_MACHINE, THIS_MACHINE) if site.is_local else (bind, addresses[0])
            page_socket = listen_for_pages(bind, call.status_port if isinstance(call.status_port, int) else 0)
            page = StatusServer(page_socket, host, make_token(), functools.partial(driver.document, status))
            page.start()
            undo.callback(page.close)
            if call.verbose:
                given = TOKEN_VARIABLE in os.environ  # a token that was made for this job alone may be shown
                shown = f"{page.address} (token: ${TOKEN_VARIABLE})" if given else page.url
                printer.say(f"spark_elastic: status page: {shown}")
        if progress is not None:
            progress.imports = slowest_import(spec.preimport)
            if isinstance(site, Cluster):
                progress.describe_cluster = lambda: site.load(driver.tasks_pending)
        clean_up = undo.pop_all()

    def prepare() -> None:
        if isinstance(site, Cluster):
            waiting = SlotWait(driver.stop_requested, driver.note_waiting)
            _check_interfaces(place_workers(site, spec, settings, listening, waiting), spec, settings)

    return ElasticJob(spec.job, driver, prepare, clean_up.close, None if page is None else page.url, lease)


def _check_interfaces(reports: Sequence[SlotReport], spec: LaunchSpec, settings: ElasticSettings) -> None:
    """Raise UnknownInterfaceError if too few slots are on hosts with the interfaces in `nics`."""
    unusable: list[UnknownInterfaceError] = []
    for report in reports:
        try:
            check_interfaces(report.host, report.addresses, spec.nics)
        except UnknownInterfaceError as error:
            unusable.append(error)
    if unusable and len(reports) - len(unusable) < settings.min_num_proc:
        raise unusable[0]


def prepare_workers(call: RunCall) -> None:
    """Let the executors import what the workers of a call will need, if they are to keep it. Returns at once.

    The job that follows need not be started: what was imported is kept as long as after a job. Behind Spark Connect,
    this would cost more than it gains.
    """
    if call.keep_workers == 0:
        return
    site = site_of(call)
    if not isinstance(site, Cluster) or site.remote or (keep_s := _keep_workers_s(call, site)) <= 0:
        return
    env, modules = dict(call.env or {}), modules_of(pickled(call.function, (), None))
    spec = LaunchSpec("", (), b"", b"", 0.0, "", env=env, device=call.device, preimport=modules, keep_workers_s=keep_s)
    payload = pickle.dumps(spec)
    now = site.count_slots().now or 0
    width = min(call.max_num_proc or call.num_proc or now, now)

    def task(_rows: Any) -> list[Any]:
        spark_agent.prepare_workers(payload)
        return []

    if width > 0:
        site.start_tasks(task, width, "spark_elastic: imports of workers")


def _launch_spec(
    call: RunCall, site: Site, function: bytes, driver_addresses: tuple[tuple[str, int], ...]
) -> LaunchSpec:
    tracking = tracking_environment()
    if not site.is_local:
        warn_of_local_store({**tracking, **(call.env or {})})
    agent_ports = site.ports("agent_ports", call.agent_ports)
    if call.encrypt:
        require_encryption()
    return LaunchSpec(
        job=f"{os.getpid()}-{next(_job_numbers)}",
        driver_addresses=driver_addresses,
        key=new_key(),
        encrypt=call.encrypt,
        function=function,
        connect_timeout_s=min(call.start_timeout, CONNECT_TIMEOUT_S),
        made_by=interpreter(),
        env={**({ALL_FRAMES_SETTING: "1"} if call.verbose > 1 else {}), **tracking, **(call.env or {})},
        nics=None if call.nics is None else tuple(call.nics),
        agent_ports=(agent_ports.first, agent_ports.last),
        device=call.device,
        # other packages may read torchrun's variables when they are imported, as Lightning does
        preimport=modules_of(function) if call.restart is None else ("torch", "torch._dynamo"),
        restarts_world=call.restart is not None,
        keep_workers_s=_keep_workers_s(call, site),
    )


def gpus_in_words(amount: str | None, resources: Mapping[str, float]) -> str:
    """Return what follows from a task's GPUs, by Spark's setting and `resources`, if it is not one each; else empty."""
    given = f"spark.task.resource.gpu.amount={amount}"
    try:
        gpus = float(amount or 1)
    except ValueError:  # Spark refuses it
        return ""
    if resources:
        if gpus > 1 and resources.get("gpu") == 1:
            return f"{given}: each worker gets one of them, as with resources={dict(resources)}"
        given, gpus = f"resources={dict(resources)}", resources.get("gpu", 1)
    if gpus > 1:
        return f"{given}, and a worker computes on one GPU; set it to 1 for a worker on each"
    if 0 < gpus < 1:
        return f"{given}: workers that share a GPU reduce gradients through the hosts' memory; set it to 1 for NCCL"
    return ""


def _keep_workers_s(call: RunCall, site: Site) -> float:
    if call.keep_workers is not None:
        return call.keep_workers
    if in_notebook() or call.restart is not None:
        return KEPT_S
    of_local_mode = isinstance(site, Cluster) and site.is_local and not site.remote
    return KEPT_IN_LOCAL_MODE_S if of_local_mode else 0.0


def _listen(bind: str, ports: Ports, local: bool) -> socket.socket:
    try:
        return listen(bind, ports, "driver_port", backlog=1024)
    except OSError as error:
        fix = "spark.driver.bindAddress must be an address of this machine, or a name for one"
        if local:
            fix = "LocalLauncher(hosts=[...]) needs addresses of this machine, such as '::1' where it has IPv6 alone"
        if error.errno == errno.EACCES:
            fix = "ports below 1024 need a right that this user lacks; choose higher ones for driver_port"
        at = bind if ports.are_any else f"{bind}, port {ports}"
        raise InvalidSettingsError(f"the driver cannot listen at {at}: {error.strerror or error}; {fix}") from None


def _within(site: Site, settings: ElasticSettings) -> tuple[ElasticSettings, str]:
    """Limit workers to the slots there can ever be, if enough; return a line if fewer than num_proc start."""
    slots = site.fixed_slots()
    if slots is None or not settings.min_num_proc <= slots < settings.max_num_proc:
        return settings, ""
    limited = dataclasses.replace(settings, num_proc=min(settings.num_proc, slots), max_num_proc=slots)
    if slots >= settings.num_proc:
        return limited, ""
    fewer = f"starting with {slots} workers instead of num_proc={settings.num_proc}"
    return limited, f"{fewer}: master {site.master} has no more slots"
