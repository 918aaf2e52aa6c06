"""LocalLauncher: agents as plain processes of this machine, for development, tests and benchmarks.

They and their workers run the same code as in Spark, where `spark.launcher` starts them.
"""

from __future__ import annotations

import dataclasses
import logging
import os
import pickle
import subprocess
import sys
import threading
from collections.abc import Sequence
from dataclasses import dataclass

from spark_elastic import clock
from spark_elastic.membership.launcher import LaunchEnd, OnEnded
from spark_elastic.membership.reasons import LossCause, LossKind, reported
from spark_elastic.membership.states import AgentOutcome
from spark_elastic.membership.topology import LaunchId, SlotId
from spark_elastic.wire.interfaces import address_of
from spark_elastic.wire.messages import LaunchSpec

logger = logging.getLogger(__name__)


class LocalLauncher:
    """Settings of the agents on this machine. One object serves any number of jobs, also at the same time.

    Args:
        hosts: Names that the agents report as their hosts; slots take them in turn. Another address of this machine
            (such as 127.0.0.2) simulates a second host. With "::1", all connections are IPv6.
        cores: Cores of each worker, which is its default number of threads.
        preimport: Modules that a worker imports while it waits for its function. Default: torch or TensorFlow,
            depending on the names in the function.
    """

    def __init__(
        self, hosts: Sequence[str] = ("127.0.0.1",), cores: int = 1, preimport: Sequence[str] | None = None
    ) -> None:
        self.hosts = tuple(address_of(host) for host in hosts)  # the addresses that the agents report
        self.cores = cores
        self.preimport = None if preimport is None else tuple(preimport)

    def bind(self, spec: LaunchSpec, on_ended: OnEnded) -> LocalAgents:
        """Return the launcher of one job."""
        if self.preimport is not None:
            spec = dataclasses.replace(spec, preimport=self.preimport)
        return LocalAgents(self.hosts, self.cores, spec, on_ended)


@dataclass(eq=False)
class LocalAgents:
    """A `Launcher` of processes, for one job. Made by `LocalLauncher.bind`."""

    hosts: Sequence[str]
    cores: int
    spec: LaunchSpec
    on_ended: OnEnded

    def __post_init__(self) -> None:
        self._lock = threading.Lock()
        self._processes: dict[SlotId, subprocess.Popen[bytes]] = {}
        self._threads: set[threading.Thread] = set()
        self._closed = False

    def launch(self, slot: SlotId) -> None:
        thread = threading.Thread(target=self._run, args=(slot,), name=f"spark_elastic-slot-{slot}", daemon=True)
        with self._lock:
            self._threads.add(thread)
        thread.start()

    def withdraw(self, slot: SlotId, cause: LossCause) -> None:
        with self._lock:
            process = self._processes.get(slot)
        if process is not None:
            process.kill()

    def admit(self, slot: SlotId, launch: LaunchId) -> bool:
        return True  # a launch ends after its process: no agent can outlive its launch

    def agent_present(self, slot: SlotId, present: bool) -> None:
        pass  # jobs do not share the slots of this machine

    def gone(self) -> str | None:
        return None

    def close(self, deadline_s: float) -> None:
        deadline = clock.monotonic() + deadline_s
        with self._lock:
            self._closed = True
            threads = list(self._threads)
            processes = list(self._processes.values())
        for process in processes:
            process.kill()
        for thread in threads:
            thread.join(max(deadline - clock.monotonic(), 0.0))
            if thread.is_alive():
                logger.warning("%s did not end within %.0f s", thread.name, deadline_s)

    def _run(self, slot: SlotId) -> None:
        try:
            end = self._run_agent(slot)
        except Exception as error:
            end = LaunchEnd(slot, reported(f"the local agent could not be run: {error}"), submitted=False)
        with self._lock:
            self._processes.pop(slot, None)
        self.on_ended(end)
        with self._lock:
            self._threads.discard(threading.current_thread())

    def _run_agent(self, slot: SlotId) -> LaunchEnd:
        host = self.hosts[slot % len(self.hosts)]
        env = dict(os.environ, PYTHONPATH=os.pathsep.join(path for path in sys.path if path))
        with self._lock:
            if self._closed:
                return LaunchEnd(slot, reported("the launcher was closed"))
            process = subprocess.Popen(
                [sys.executable, "-m", "spark_elastic.task.agent", str(os.getpid())],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                env=env,
            )
            self._processes[slot] = process
        out, _ = process.communicate(pickle.dumps((self.spec, slot, host, self.cores)))
        if process.returncode != 0 or not out:  # where SIGCHLD is ignored, the exit code is unknown and given as 0
            return LaunchEnd(slot, LossCause(LossKind.AGENT_EXITED, code=process.returncode))
        outcome: AgentOutcome = pickle.loads(out)
        return LaunchEnd(slot, outcome.cause, outcome)
