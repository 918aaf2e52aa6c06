"""Cluster: Spark as this package uses it, through a classic session (`classic`) or one of Spark Connect (`connect`).

`session` makes one for each call of `run`, `fit`, `transform` and `materialize`, which hand it down.
"""

from __future__ import annotations

import abc
import importlib
import re
import threading
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from spark_elastic import clock
from spark_elastic.errors import InvalidSettingsError
from spark_elastic.membership.launcher import Launcher, OnEnded
from spark_elastic.membership.reasons import counted
from spark_elastic.membership.topology import Reach
from spark_elastic.settings import ElasticSettings
from spark_elastic.spark import executor_python
from spark_elastic.spark.agent_task import AgentEntry
from spark_elastic.spark.jvm import is_local_master
from spark_elastic.spark.slot_queue import QueuedLauncher, queue_of
from spark_elastic.wire.interfaces import address_of, on_this_machine
from spark_elastic.wire.messages import LaunchSpec
from spark_elastic.wire.ports import ANY, Ports, valid_ports

if TYPE_CHECKING:
    from spark_elastic.spark.executors import ExecutorWatch

CANCEL_S = 10.0
"""How long Ctrl-C waits until Spark has ended a call."""
_CANCEL_AGAIN_S = 0.2
SESSION_PORTS = {"driver_port": "spark.elastic.driver.port", "agent_ports": "spark.elastic.agent.ports"}
"""Settings of a Spark session that give the ports of its jobs."""


@dataclass(frozen=True, slots=True)
class SlotCount:
    """The task slots of an application."""

    now: int | None
    """Slots of the executors that are registered now, busy or not; limited by cores, spark.task.cpus and GPUs. None if
    the session does not show them."""
    most: int | None
    """Slots that the application may have; `now` without dynamic allocation; None if no limit is known."""
    where: str
    """The executors, in words."""


class Cluster(abc.ABC):
    """A Spark cluster, and the session that leads to it. To make one calls nothing."""

    remote: ClassVar[bool]
    """True behind Spark Connect, for the words of errors."""
    needed: ClassVar[Sequence[str]]
    """Packages that the Python of a task needs if it reads or returns rows."""
    needed_by_workers: ClassVar[Sequence[str]]
    """The same of a task that runs an agent."""
    done: ClassVar[set[tuple[str, ...]]] = set()
    """What this program need not do again: (what, `id` or `application`, details) of checks and files sent."""

    def __init__(self, context: Any) -> None:
        self.context = context
        """The SparkContext, or the session of Spark Connect, which has none."""
        self.resources: dict[str, float] = {}
        """What each worker's task gets; empty: what the session's settings say."""

    # --- the session ------------------------------------------------------------------------------

    @abc.abstractmethod
    def check(self) -> None:
        """Raise a `UsageError` if no job can run: the session was stopped, or has settings that workers cannot bear."""

    def check_speculation(self) -> None:
        """Raise InvalidSettingsError if Spark would run a second copy of every worker that trains for long."""
        threshold = self.setting("spark.speculation.task.duration.threshold")
        if threshold is not None and self.setting("spark.speculation") == "true":
            raise InvalidSettingsError(
                f"spark.speculation.task.duration.threshold={threshold} would have Spark run a second copy of every "
                "worker that trains for longer; remove it, or set spark.speculation=false"
            )

    @abc.abstractmethod
    def setting(self, name: str, default: str | None = None) -> str | None:
        """Return a setting of the session."""

    @property
    @abc.abstractmethod
    def application(self) -> str:
        """The id of the Spark application, which several sessions may share."""

    @property
    @abc.abstractmethod
    def id(self) -> str:
        """Identifies whom `send` and `ship_package` send to: the application, or the session of Spark Connect."""

    @property
    @abc.abstractmethod
    def master(self) -> str: ...

    @property
    def version(self) -> str:
        return str(self.context.version)

    @property
    @abc.abstractmethod
    def is_local(self) -> bool:
        """True if all tasks run on this machine, in one JVM."""

    @property
    @abc.abstractmethod
    def python(self) -> str:
        """The program that Spark starts as Python on the executors."""

    def java(self) -> tuple[str, str] | None:
        """Return version and home of Spark's JVM; None if it is a server's."""
        return None

    def leave_thread(self) -> None:  # noqa: B027
        """Close this thread's connection to Spark. To be called before a thread ends that has used the cluster."""

    # --- data -------------------------------------------------------------------------------------

    @property
    def functions(self) -> Any:
        """The module of SQL functions that make columns of this session."""
        return importlib.import_module("pyspark.sql.connect.functions" if self.remote else "pyspark.sql.functions")

    def has_arrow_udfs(self) -> bool:
        """Return whether Arrow UDFs can be used: since Spark 4.1, on the client and on the server.

        pyspark decides by the process, not by the DataFrame, whether it makes a UDF of Spark Connect.
        """
        import pyspark
        from pyspark.sql.utils import is_remote

        versions = [re.findall(r"\d+", version)[:2] for version in (pyspark.__version__, self.version)]
        return all([int(part) for part in each] >= [4, 1] for each in versions) and self.remote == is_remote()

    @abc.abstractmethod
    def send(self, data: bytes) -> Any:
        """Make bytes available to the tasks of this session: return what can be sent to them, and has a `value`."""

    def collect(self, df: Any, name: str, title: str, verbose: int) -> list[Any]:
        """Return the rows of a DataFrame. Ctrl-C ends the query, whose tasks would otherwise continue to write.

        `name` is that of the job in Spark's UI, `title` that of the progress bar, where there is one; verbose=0: none.
        """
        run = TaskRun(self, df.collect, name)
        try:
            with self.console(verbose, run, title):
                return run.result()
        except BaseException:
            if not run.over.is_set():
                run.cancel(CANCEL_S)
            raise

    def partitions(self, df: Any) -> tuple[int, int] | None:
        """Return the partitions of a query and the slots, if neighbouring ones may be joined; None if not known."""
        return None

    # --- tasks ------------------------------------------------------------------------------------

    def start_tasks(self, task: Callable[[Any], Any], width: int | None, name: str, barrier: bool = False) -> TaskRun:
        """Run a function in `width` tasks; None: in one for each slot. Returns at once.

        The function is called with an iterator and returns an iterable of rows; a closure is pickled by value. `name`
        is that of the job in Spark's UI. With `barrier` all tasks start together, or none does.
        """
        return TaskRun(self, lambda: self._rows_of_tasks(task, width, barrier), name)

    @abc.abstractmethod
    def _rows_of_tasks(self, task: Callable[[Any], Any], width: int | None, barrier: bool) -> list[Any]: ...

    @abc.abstractmethod
    def tagging(self, tag: str, name: str) -> Callable[[], None]:
        """Return a function that gives the jobs of the thread that calls it a tag, and a name in Spark's UI."""

    @abc.abstractmethod
    def cancel_tagged(self, tag: str) -> None:
        """End the jobs with a tag that run now."""

    def check_executors(self, needed: Sequence[str] | None = None) -> None:
        """Look at the executors' Python with a job of one task, once per application.

        In local mode the job is only run if the user chose another Python than this program's. `needed`: packages that
        it must have; None: those of tasks that read or return rows.

        Raises:
            ExecutorPythonError: It lacks packages, or has another minor version than this program's.
        """
        if not self.remote and self.is_local and executor_python.choose_python(self.context):
            return
        names = self.needed if needed is None else needed
        about = ("python", self.id, self.python, *names)
        if about not in self.done:
            # a local master whose slots are all in use says nothing: the workers then name what they lack
            answer = self.ask_python(names, executor_python.PATIENCE_S if self.is_local else None)
            if answer is not None:
                executor_python.refuse_python(answer, on_connect=self.remote)
                self.done.add(about)

    def ask_python(self, names: Sequence[str], timeout_s: float | None = None) -> tuple[str, str, list[str]] | None:
        """Return path and version of the executors' Python, and those of the modules that it lacks.

        None if that was not known within `timeout_s`. Raises as `check_executors`.
        """
        run = self.start_tasks(executor_python.report_python(names), 1, "spark_elastic: look at the executors' Python")
        if not run.wait(timeout_s):
            run.cancel(0.0)
            return None
        if run.error is not None:
            raise executor_python.python_error_of(run.error, self.python, on_connect=self.remote) or run.error
        answer: tuple[str, str, list[str]] = run.rows[0]
        return answer

    # --- slots ------------------------------------------------------------------------------------

    @abc.abstractmethod
    def count_slots(self) -> SlotCount:
        """Count the task slots, now and at most. Runs no job."""

    @abc.abstractmethod
    def fixed_slots(self) -> int | None:
        """Return the number of slots that can never be exceeded, by the master; None if it is not known."""

    def slots_free(self) -> int | None:
        """Return the number of slots in which no task runs now; None if it is not known."""
        return None

    def executors(self) -> frozenset[str] | None:
        """Return the executors; None if they are not known."""
        return None

    def allocates_dynamically(self) -> bool:
        return self.setting("spark.dynamicAllocation.enabled") == "true" and not is_local_master(self.master)

    def slots(self) -> int:
        """Return the number of workers to start if the user gives none."""
        now = self.count_slots().now
        if now is None:
            raise InvalidSettingsError("the session does not show the cluster's task slots; give num_proc")
        if now < 1:
            raise InvalidSettingsError("the cluster has no task slot at the moment; give num_proc to wait for some")
        return now

    def worker_bounds(self) -> tuple[int, int]:
        """Return the fewest workers and those to start with, if the user gives none: those of dynamic allocation.

        Without it, or if it has no upper bound, both are the slots that there are.
        """
        if self.allocates_dynamically() and (most := self.count_slots().most):
            low, high = (int(self.setting(f"spark.dynamicAllocation.{end}Executors") or 0) for end in ("min", "max"))
            return max(low * most // max(high, 1), 1), most
        now = self.slots()
        return now, now

    def load(self, pending: int) -> str:
        """Return how busy the cluster is, in words, to be shown with a wait; empty if no task of the job is pending."""
        if not pending:
            return ""
        try:
            free = self.slots_free()
        finally:
            self.leave_thread()
        of_cluster = "" if free is None else f", cluster has {counted(free, 'slot')} free"
        return f"{counted(pending, 'task')} pending{of_cluster}"

    # --- the network ------------------------------------------------------------------------------

    def apply(self, driver_host: str | None, ship_package: bool) -> None:
        """Apply the settings of `run` that are for Spark Connect. Raise InvalidSettingsError on a classic session."""
        if driver_host is not None or ship_package:
            given = "driver_host" if driver_host is not None else "ship_package"
            raise InvalidSettingsError(
                f"{given} is for Spark Connect; a classic session has spark.driver.host and spark.submit.pyFiles"
            )

    def take_resources(self, given: Mapping[str, float] | None, gpu_each: bool) -> None:
        """Have each worker's task get these resources; with `gpu_each` one GPU, of those that Spark gives to a task.

        Raises:
            InvalidSettingsError: Spark cannot give them to tasks here.
        """
        if given is not None:
            raise InvalidSettingsError(
                "resources= needs a classic session; on Spark Connect's server, set spark.task.*"
            )

    def check_platform(self, driver_host: str | None) -> None:  # noqa: B027
        """Raise NoSparkContextError if the session is on a platform, known by name, whose tasks reach no program."""

    def check_reach(self, driver_host: str | None, port: int | str | None) -> None:  # noqa: B027
        """Raise a `UsageError` if tasks cannot connect to this program, behind Spark Connect; `port` is `driver_port`.

        For a caller who does other work before the job, whose probe asks the same.
        """

    @abc.abstractmethod
    def listen_at(self) -> tuple[str, tuple[str, ...]]:
        """Return the address to bind the rendezvous server to, and those at which agents try to reach it."""

    def ports(self, setting: str, given: int | str | None) -> Ports:
        """Return the ports of "driver_port" or "agent_ports": those given to `run`, or else those of the session.

        Raises:
            InvalidSettingsError: The session's value is not a port or a range of ports.
        """
        if given is not None:
            return Ports.parse(given)
        name = SESSION_PORTS[setting]
        value = self.setting(name)
        return ANY if value is None else valid_ports(name, value)

    def host_of(self, name: str) -> str:
        """Return the host that agents report on a machine which a user calls `name`."""
        address = address_of(name)
        return on_this_machine(address) if self.is_local else address

    # --- a job ------------------------------------------------------------------------------------

    def make_launcher(
        self, spec: LaunchSpec, settings: ElasticSettings, on_ended: OnEnded, agent: AgentEntry
    ) -> Launcher:
        """Return the launcher of a job, whose tasks run `agent`; jobs of one application wait for one another."""
        queue, build = queue_of(self.application), self._launchers(spec, agent)
        return QueuedLauncher(queue, spec.job, settings.min_num_proc, build, on_ended)

    @abc.abstractmethod
    def _launchers(self, spec: LaunchSpec, agent: AgentEntry) -> Callable[[OnEnded], Launcher]: ...

    def take_reaches(self, spec: LaunchSpec, need: int, reaches: Sequence[Reach]) -> None:  # noqa: B027
        """Take note of the addresses at which tasks have reached this program, for a job of `need` workers.

        Raises:
            DriverUnreachableError: Too few have reached it.
        """

    def sources(self) -> list[ExecutorWatch]:
        """Return the sources of events about executors; none where losses are only seen on the job's connections."""
        return []

    def console(self, verbose: int, run: TaskRun | None = None, title: str = "") -> AbstractContextManager[None]:
        """Keep what Spark prints apart from our lines and our bar while the block runs; with verbose=0 there are none.

        The bar is that of a job, or shows the tasks of `run`.
        """
        return nullcontext()


class TaskRun:
    """A call whose Spark jobs have a tag, by which they can be ended. Starts at once.

    The jobs inherit the local properties of the thread that makes it, such as its scheduler pool.
    """

    def __init__(self, cluster: Cluster, call: Callable[[], list[Any]], name: str) -> None:
        self.tag = f"spark_elastic-{uuid.uuid4().hex}"
        self.rows: list[Any] = []
        """What the call has returned; empty until it is over."""
        self.error: BaseException | None = None
        """Why the call failed; None if it did not, or was ended by `cancel`."""
        self.over = threading.Event()
        self._cluster = cluster
        self._call = call
        self._tag_thread = cluster.tagging(self.tag, name)
        self._cancelled = False
        threading.Thread(target=self._run, name="spark_elastic job", daemon=True).start()

    def result(self) -> list[Any]:
        """Wait until the call is over, and return its rows. Raises the error that it failed with."""
        self.wait()
        if self.error is not None:
            raise self.error
        return self.rows

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until the call is over; return False after `timeout_s`. An exception here, such as Ctrl-C, ends it."""
        # on another thread than the call: an interrupted call to the JVM would leave the job behind
        try:
            return self.over.wait(timeout_s)
        except BaseException:
            self.cancel(CANCEL_S)
            raise

    def cancel(self, timeout_s: float) -> None:
        """End the call, also if Spark does not know its jobs yet, and wait up to `timeout_s` until it is over."""
        self._cancelled = True
        until = clock.monotonic() + timeout_s

        def ask() -> None:
            while not self.over.is_set():
                with suppress(Exception):  # Spark is gone, and the jobs with it
                    self._cluster.cancel_tagged(self.tag)
                if self.over.wait(_CANCEL_AGAIN_S) or clock.monotonic() >= until:
                    break
            self._cluster.leave_thread()

        # on a thread: it does not return while Spark does not answer
        asking = threading.Thread(target=ask, name="spark_elastic cancel", daemon=True)
        asking.start()
        self.over.wait(timeout_s)

    def _run(self) -> None:
        try:
            self._tag_thread()
            if not self._cancelled:
                self.rows = list(self._call())
        except BaseException as error:
            if not self._cancelled:
                self.error = error
        finally:
            self._cluster.leave_thread()
            self.over.set()
