"""LocalLauncher: agents as plain processes on this machine, without Spark.

For development, tests and benchmarks: the driver, the agents and the workers are the very same as in Spark.
"""

from __future__ import annotations

import dataclasses
import logging
import os
import pickle
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence

from spark_elastic import clock
from spark_elastic.driver.launcher import OnEnded
from spark_elastic.membership.reasons import LossCause, LossKind, reported
from spark_elastic.membership.states import AgentOutcome
from spark_elastic.membership.topology import LaunchId, SlotId
from spark_elastic.wire.interfaces import address_of
from spark_elastic.wire.launch_spec import AgentOrder

logger = logging.getLogger(__name__)


class LocalLauncher:
    """What agents on this machine are like. Serves any number of jobs, also at the same time.

    Args:
        hosts: names that the agents report as their hosts, slot by slot in turn. Any address of this machine
            (such as 127.0.0.2) makes a second host out of it.
        cores: cores for each worker; its default number of threads.
        preimport: modules that a worker imports while it waits for its order; None: torch or TensorFlow, whichever
            the function speaks of.
    """

    def __init__(
        self,
        hosts: Sequence[str] = ("127.0.0.1",),
        cores: int = 1,
        preimport: Sequence[str] | None = None,
    ) -> None:
        self.hosts = tuple(address_of(host) for host in hosts)
        """What the agents report."""
        self.cores = cores
        self.preimport = None if preimport is None else tuple(preimport)

    def bind(self, order: AgentOrder, on_ended: OnEnded) -> LocalAgents:
        """The launcher of one job: what to launch, and whom to tell."""
        if self.preimport is not None:
            order = dataclasses.replace(order, preimport=self.preimport)
        return LocalAgents(self.hosts, self.cores, order, on_ended)


class LocalAgents:
    """Implements `launcher.Launcher`. Made by `LocalLauncher.bind`, one for each job."""

    def __init__(self, hosts: Sequence[str], cores: int, order: AgentOrder, on_ended: OnEnded) -> None:
        self._hosts = tuple(hosts)
        self._cores = cores
        self._order = order
        self._on_ended = on_ended
        self._lock = threading.Lock()
        self._processes: dict[SlotId, subprocess.Popen[bytes]] = {}
        self._threads: set[threading.Thread] = set()
        self._closed = False
        self._not_begun: set[SlotId] = set()
        """Whose last process could not be started."""

    def launch(self, slot: SlotId) -> None:
        thread = threading.Thread(target=self._run, args=(slot,), name=f"spark_elastic-slot-{slot}", daemon=True)
        with self._lock:
            self._threads.add(thread)
        thread.start()

    def withdraw(self, slot: SlotId, cause: LossCause) -> None:
        with self._lock:
            process = self._processes.get(slot)
        if process is not None:
            _kill(process)

    def admit(self, slot: SlotId, launch: LaunchId) -> bool:
        return True  # the process is gone before its launch is over

    def agents_joined(self, slots: frozenset[SlotId]) -> None:
        pass  # the slots of this machine are nobody else's

    def agent_pids(self) -> dict[SlotId, int]:
        """The process id of each slot's agent."""
        with self._lock:
            return {slot: process.pid for slot, process in self._processes.items()}

    def gone(self) -> str | None:
        return None

    def could_not_submit(self, slot: SlotId) -> bool:
        with self._lock:
            return slot in self._not_begun

    def close(self, deadline_s: float) -> None:
        deadline = clock.monotonic() + deadline_s
        with self._lock:
            self._closed = True
            threads = list(self._threads)
            processes = list(self._processes.values())
        for process in processes:
            _kill(process)
        for thread in threads:
            thread.join(max(deadline - clock.monotonic(), 0.0))
            if thread.is_alive():
                logger.warning("%s did not end within %.0f s", thread.name, deadline_s)

    def _run(self, slot: SlotId) -> None:
        begun = True
        try:
            cause, outcome = self._run_agent(slot)
        except Exception as error:
            cause, outcome, begun = reported(f"the local agent could not be run: {error}"), None, False
        with self._lock:
            (self._not_begun.discard if begun else self._not_begun.add)(slot)
            self._processes.pop(slot, None)
        self._on_ended(slot, cause, outcome)
        with self._lock:
            self._threads.discard(threading.current_thread())

    def _run_agent(self, slot: SlotId) -> tuple[LossCause, AgentOutcome | None]:
        host = self._hosts[slot % len(self._hosts)]
        env = dict(os.environ, PYTHONPATH=os.pathsep.join(path for path in sys.path if path))
        with self._lock:
            if self._closed:
                return reported("the launcher was closed"), None
            process = subprocess.Popen(
                [sys.executable, "-m", "spark_elastic.task.local_agent", str(os.getpid())],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                env=env,
            )
            self._processes[slot] = process
        out, _ = process.communicate(pickle.dumps((self._order, slot, host, self._cores)))
        if process.returncode != 0:
            return LossCause(LossKind.AGENT_EXITED, code=process.returncode), None
        outcome: AgentOutcome = pickle.loads(out)
        return outcome.cause, outcome


def _kill(process: subprocess.Popen[bytes]) -> None:
    try:
        process.send_signal(signal.SIGKILL)
    except ProcessLookupError:
        pass  # it has just ended
