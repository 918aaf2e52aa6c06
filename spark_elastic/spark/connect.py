"""ConnectCluster: the cluster behind a session of Spark Connect, whose scheduler is out of reach on a server."""

from __future__ import annotations

import dataclasses
import functools
import logging
import pickle
import re
import tempfile
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from spark_elastic.errors import DriverUnreachableError, NoSparkContextError, UsageError
from spark_elastic.membership.launcher import Launcher, OnEnded
from spark_elastic.membership.topology import Reach, SlotId
from spark_elastic.redaction import first_line
from spark_elastic.spark import package
from spark_elastic.spark.agent_task import AgentEntry
from spark_elastic.spark.cluster import Cluster, SlotCount
from spark_elastic.spark.connect_launcher import ConnectLauncher
from spark_elastic.spark.connect_session import Sent, databricks_of, rows_of_tasks, server_answers, server_of
from spark_elastic.spark.executor_process import look_at_slot
from spark_elastic.spark.executor_python import NEEDED_ON_CONNECT, ON_CONNECT
from spark_elastic.spark.jvm import is_local_master
from spark_elastic.spark.reachability import answering, candidate_addresses
from spark_elastic.wire.framing import new_key
from spark_elastic.wire.interfaces import THIS_MACHINE, address_of, every_address, on_this_machine
from spark_elastic.wire.messages import LaunchSpec
from spark_elastic.wire.ports import listen

log = logging.getLogger(__name__)

INLINE_BYTES = 128 * 1024
"""Larger data is sent once as a file instead of in each query: a message of Spark Connect has 128 MiB at most."""
REACH_PATIENCE_S = 10.0
"""Seconds that `check_reach` waits for a slot: the answer of a task that runs takes two."""
_RANGE = re.compile(r"Range \(0, \d+, step=1, splits=(\d+)\)")
_LOCAL = re.compile(r"local\[\s*(\d+)\s*(?:,\s*\d+\s*)?\]")


class ConnectCluster(Cluster):
    """The cluster behind a Connect session. Settings of the session come before the server's."""

    remote = True
    needed = NEEDED_ON_CONNECT
    needed_by_workers = NEEDED_ON_CONNECT

    def __init__(self, context: Any) -> None:
        super().__init__(context)
        self._driver_host: str | None = None
        self._addresses: dict[str, tuple[tuple[str, int], ...]] = {}
        """By job, the driver's addresses, best first, once the probe has tried them."""

    # --- the session ------------------------------------------------------------------------------

    def check(self) -> None:
        if self.context.is_stopped:
            raise NoSparkContextError("the Spark Connect session was stopped; create a new one")
        if not server_answers(self.context, 3.0):
            host, port = server_of(self.context)
            raise NoSparkContextError(
                f"the Spark Connect server at {host}:{port} does not answer; start it (sbin/start-connect-server.sh), "
                "or create a session with its present address"
            )
        try:
            self.check_speculation()
        except UsageError:
            raise
        except Exception as error:  # pyspark's, with the version; for example because the session has expired
            raise NoSparkContextError(
                f"the Spark Connect session cannot be used: {first_line(error)}; create a new one"
            ) from None

    def setting(self, name: str, default: str | None = None) -> str | None:
        value: str | None = self.context.conf.get(name, default)
        return value

    @property
    def application(self) -> str:
        return self.setting("spark.app.id") or self.id

    @property
    def id(self) -> str:
        return str(self.context.session_id)

    @functools.cached_property
    def master(self) -> str:
        return self.setting("spark.master", "") or "the Spark Connect server"

    @property
    def is_local(self) -> bool:
        if not is_local_master(self.master):
            return False
        return on_this_machine(address_of(server_of(self.context)[0])) == THIS_MACHINE

    python = ON_CONNECT  # no task could say its path

    # --- data -------------------------------------------------------------------------------------

    def send(self, data: bytes) -> Any:
        if len(data) <= INLINE_BYTES:
            return Sent(data)
        name = f"spark_elastic-{uuid.uuid4().hex}"
        with tempfile.TemporaryDirectory(prefix="spark_elastic-send-") as folder:
            path = Path(folder) / name
            path.write_bytes(data)
            self.context.addArtifacts(str(path), file=True)
        return Sent(file=name)

    # --- tasks ------------------------------------------------------------------------------------

    def _rows_of_tasks(self, task: Callable[[Any], Any], width: int | None, barrier: bool) -> list[Any]:
        return rows_of_tasks(self.context, task, width, barrier)

    def tagging(self, tag: str, name: str) -> Callable[[], None]:
        return lambda: self.context.addTag(tag)  # tags belong to the thread; its scheduler's UI is on the server

    def cancel_tagged(self, tag: str) -> None:
        self.context.interruptTag(tag)

    # --- slots ------------------------------------------------------------------------------------

    def count_slots(self) -> SlotCount:
        """A query without a shuffle is planned with as many tasks as there are cores, and the plan says how many."""
        most, where = self.fixed_slots(), f"master {self.master}"
        high, cores = (self.setting(f"spark.{name}") for name in ("dynamicAllocation.maxExecutors", "executor.cores"))
        if high and cores and self.allocates_dynamically():
            most = int(high) * (int(cores) // self._task_cpus)
        for name in ("spark.default.parallelism", "spark.sql.leafNodeDefaultParallelism"):
            if self.setting(name) is not None:
                return SlotCount(most, most, where)
        try:
            plan = str(self.context.range(0, 1 << 20)._explain_string())
        except Exception as error:  # not a public interface
            log.debug("the plan of a query could not be read: %s", error)
            return SlotCount(None, most, where)
        found = _RANGE.search(plan)
        return SlotCount(None if found is None else int(found[1]) // self._task_cpus, most, where)

    @functools.cached_property
    def _task_cpus(self) -> int:
        return max(int(self.setting("spark.task.cpus", "1") or 1), 1)

    def fixed_slots(self) -> int | None:
        if self.master == "local":
            return 1
        fixed = _LOCAL.fullmatch(self.master)
        return None if fixed is None else int(fixed[1]) // self._task_cpus

    # --- a job ------------------------------------------------------------------------------------

    def apply(self, driver_host: str | None, ship_package: bool) -> None:
        self._driver_host = driver_host
        if ship_package:
            package.ship_package(self.context)

    def check_platform(self, driver_host: str | None) -> None:
        if driver_host is None and (name := databricks_of(self.context)) is not None:
            raise NoSparkContextError(
                f"workers cannot train on {name}, whose tasks do not reach this program: run it on a cluster with "
                "dedicated access mode, in a notebook or a job there, or if they do reach it, name its address "
                "(driver_host=)"
            )

    def check_reach(self, driver_host: str | None, port: int | str | None) -> None:
        self.check_platform(driver_host)
        self._driver_host = driver_host
        about = ("reach", self.id, str(driver_host), str(port))
        if about in self.done or (driver_host is None and self.is_local):
            return
        bind, hosts = self.listen_at()
        key = new_key()
        with listen(bind, self.ports("driver_port", port), "driver_port", backlog=8) as listening:
            here = listening.getsockname()[1]
            look = functools.partial(look_at_slot, tuple((host, here) for host in hosts), key)
            with answering(listening, key):
                run = self.start_tasks(_sending(look), 1, "spark_elastic: look whether tasks reach this program")
                if not run.wait(REACH_PATIENCE_S):  # all slots are in use; the job's probe waits for them
                    run.cancel(0.0)
                    return
        if run.error is None:  # otherwise something else is wrong, which the caller finds out
            self._refuse_unreached([reach for _, reach in run.rows], 1, hosts, here)
            self.done.add(about)

    def listen_at(self) -> tuple[str, tuple[str, ...]]:
        """Executors may be on other machines than the server, so without `driver_host` all addresses are tried."""
        if self._driver_host is not None:
            return every_address(), (self._driver_host,)
        if self.is_local:
            return THIS_MACHINE, (THIS_MACHINE,)
        try:
            server = server_of(self.context)[0]
        except ValueError:  # a socket of this machine, without a port
            server = THIS_MACHINE
        return every_address(), candidate_addresses(server)

    def _launchers(self, spec: LaunchSpec, agent: AgentEntry) -> Callable[[OnEnded], Launcher]:
        def payload(slot: SlotId) -> bytes:
            # The server limits a query to 128 MiB, and each slot's would hold the function again: agents fetch it.
            addresses = self._addresses.get(spec.job, spec.driver_addresses)
            return pickle.dumps(
                dataclasses.replace(spec, function=b"", fetched_bytes=len(spec.function), driver_addresses=addresses)
            )

        return lambda ended: ConnectLauncher(self.context, agent, payload, ended)

    def take_reaches(self, spec: LaunchSpec, need: int, reaches: Sequence[Reach]) -> None:
        hosts, port = tuple(host for host, _ in spec.driver_addresses), spec.driver_addresses[0][1]
        self._refuse_unreached(reaches, need, hosts, port)
        best = sorted(hosts, key=lambda host: -sum(host in reach.reached for reach in reaches))
        self._addresses[spec.job] = tuple((host, port) for host in best)

    @staticmethod
    def _refuse_unreached(reaches: Sequence[Reach], need: int, hosts: tuple[str, ...], port: int) -> None:
        """Raise DriverUnreachableError if too few tasks have reached this program."""
        without = [reach for reach in reaches if not reach.reached]
        if without and len(reaches) - len(without) < min(need, len(reaches)):
            tried = "; ".join(f"{address}: {why}" for address, why in without[0].failed.items())
            raise DriverUnreachableError(addresses=hosts, port=port, tried=f"from host {without[0].host}: {tried}")


def _sending(look: Callable[[], Any]) -> Callable[[Any], list[Any]]:
    """Return the function of a task that returns what `look` has seen; it is pickled by value."""

    def task(_rows: Any) -> list[Any]:
        return [look()]

    return task
