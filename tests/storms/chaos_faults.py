"""The faults of a storm: what is done to which process of a job or of its cluster, and when.

A schedule comes from a seed, and each fault from the seed and its number alone: `fault_of(7, 41)` is the forty-first
fault of every storm with seed 7. Which process it strikes depends on who runs then, by rank.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.integration.processes import children, command_line, is_running
from tests.integration.spark.diary import Diary, Entry
from tests.storms.wall_clock import CLOCK, shift_clock

BUSY_PROCESSES_PER_CORE = 4
REPLACED_S = 60.0
"""The longest wait for the process that a fault wants to strike as it starts."""


@dataclass(frozen=True)
class Fault:
    """One fault. kind: a name of `FAULTS`. gap_s: from the world that trains to the strike. draws: numbers in [0, 1)
    from which victims, delays and durations are taken."""

    number: int
    kind: str
    gap_s: float
    draws: tuple[float, ...]


def fault_of(seed: int, number: int, kinds: Sequence[str], mean_gap_s: float) -> Fault:
    """Return the fault with this number; `kinds`: from which it is drawn."""
    rng = random.Random(f"{seed} {number}")
    kind = rng.choice(list(kinds))
    gap_s = min(rng.expovariate(1 / mean_gap_s), 4 * mean_gap_s) if mean_gap_s else 0.0
    return Fault(number, kind, gap_s, tuple(rng.random() for _ in range(6)))


@dataclass
class Site:
    """Where a storm rages; several faults may be at work at once. `cluster` is None for processes of the local
    launcher, `struck` holds the processes that were struck and may still be in a world, with the time of it.
    """

    diary: Diary
    heartbeat_timeout_s: float
    cluster: Any = None
    struck: dict[int, float] = field(default_factory=dict)
    _timers: list[threading.Thread] = field(default_factory=list)
    _helpers: list[subprocess.Popen[bytes]] = field(default_factory=list)
    _claiming: threading.Lock = field(default_factory=threading.Lock)

    def later(self, seconds: float, action: Callable[[], object]) -> None:
        """Do something on a thread of its own that `close` waits for."""

        def work() -> None:
            time.sleep(seconds)
            action()

        thread = threading.Thread(target=work, name=f"chaos in {seconds:.3f} s")
        thread.start()
        self._timers.append(thread)

    def helper(self, *command: str) -> subprocess.Popen[bytes]:
        """Start a process that `close` ends."""
        process = subprocess.Popen(command, start_new_session=True)
        self._helpers.append(process)
        return process

    def close(self) -> None:
        for thread in self._timers:
            thread.join()
        for process in self._helpers:
            process.kill()
            process.wait()

    def settle(self) -> None:
        """Forget timers and helpers that have ended."""
        self._timers = [thread for thread in self._timers if thread.is_alive()]
        self._helpers = [process for process in self._helpers if process.poll() is None]

    def note_struck(self, *pids: int, for_good: bool = False) -> None:
        """Remember processes that will be lost; `for_good`: however long that may take."""
        self.struck.update(dict.fromkeys(pids, float("inf") if for_good else time.monotonic()))

    def is_struck(self, pid: int) -> bool:
        """Whether a process was struck and may not have been missed yet."""
        return time.monotonic() < self.struck.get(pid, float("-inf")) + 3 * self.heartbeat_timeout_s + 5

    def signal(self, pid: int, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)

    def executor_of(self, pid: int) -> int | None:
        """The JVM above a worker; None: it is gone, or there is none."""
        return next((jvm for jvm in self.cluster.executors().values() if pid in children(jvm)), None)

    def newcomers(self) -> set[int]:
        """Worker processes that have not yet applied a step."""
        trained = {entry["pid"] for entry in self.diary.read() if entry["what"] == "applied"}
        up = {entry["pid"] for entry in self.diary.entries if entry["what"] == "up"}
        return {pid for pid in up - trained if is_running(pid)}

    def claim_newcomer(self, before: set[int]) -> int | None:
        """Return a newcomer that was not there before; None: there is none. From now on it counts as struck."""
        with self._claiming:
            for pid in self.newcomers() - before:
                if pid in self.struck:
                    continue  # another fault's
                self.note_struck(pid)
                if pid in self.newcomers():
                    return pid
                # it has applied a step meanwhile: it may be the only worker that another fault spares
                del self.struck[pid]
        return None


@dataclass(frozen=True)
class Strike:
    """What one fault does to whom: `victims` die or are cut off, `spared` keeps the state."""

    site: Site
    fault: Fault
    spared: Entry
    victims: list[Entry]

    @property
    def victim(self) -> Entry:
        return self.victims[0]

    def draw(self, index: int, low: float, high: float) -> float:
        return low + (high - low) * self.fault.draws[index]


def _kill(s: Strike) -> None:
    _kill_one(s, s.victim)


def _kill_one(s: Strike, victim: Entry) -> None:
    s.site.note_struck(victim["pid"])
    s.site.signal(victim["pid"], signal.SIGKILL)


def _terminate(s: Strike) -> None:
    s.site.note_struck(s.victim["pid"])
    s.site.signal(s.victim["pid"], signal.SIGTERM)


def _kill_agent(s: Strike) -> None:
    s.site.note_struck(s.victim["pid"])
    s.site.signal(s.victim["agent"], signal.SIGKILL)


def _terminate_agent(s: Strike) -> None:
    s.site.note_struck(s.victim["pid"])
    s.site.signal(s.victim["agent"], signal.SIGTERM)


def _stop_agent(s: Strike) -> None:
    s.site.note_struck(s.victim["pid"])
    s.site.signal(s.victim["agent"], signal.SIGSTOP)
    s.site.later(2 * s.site.heartbeat_timeout_s, lambda: s.site.signal(s.victim["agent"], signal.SIGCONT))


def _stop_briefly(s: Strike) -> None:
    s.site.signal(s.victim["pid"], signal.SIGSTOP)
    seconds = s.draw(0, 0.05, 0.5) * s.site.heartbeat_timeout_s
    s.site.later(seconds, lambda: s.site.signal(s.victim["pid"], signal.SIGCONT))


def _stop_long(s: Strike) -> None:
    s.site.note_struck(s.victim["pid"])
    s.site.signal(s.victim["pid"], signal.SIGSTOP)
    seconds = s.draw(0, 1.2, 3.0) * s.site.heartbeat_timeout_s
    s.site.later(seconds, lambda: s.site.signal(s.victim["pid"], signal.SIGCONT))


def _kill_two(s: Strike) -> None:
    for victim in s.victims[:2]:
        _kill_one(s, victim)


def _kill_while_regrouping(s: Strike) -> None:
    """A second one, while the others agree on the next world, connect or synchronise."""
    for index, victim in enumerate(s.victims[:2]):
        if index:
            time.sleep(s.draw(0, 0.0, 0.06))
        _kill_one(s, victim)


def _kill_newcomer(s: Strike) -> None:
    """The one that replaces a victim: as it imports, introduces itself, is synchronised or joins."""
    before = s.site.newcomers()
    _kill(s)

    def strike() -> None:
        until = time.monotonic() + REPLACED_S
        while time.monotonic() < until:
            if (pid := s.site.claim_newcomer(before)) is not None:
                time.sleep(s.draw(0, 0.0, 1.5))
                s.site.signal(pid, signal.SIGKILL)
                return
            time.sleep(0.01)

    s.site.later(0.0, strike)


def _kill_all_newcomers(s: Strike) -> None:
    """Nothing that starts in the place of a victim lives for long: the others have to go on without it."""
    before = s.site.newcomers()
    _kill(s)
    until = time.monotonic() + s.draw(0, 1.0, 4.0)

    def strike() -> None:
        while time.monotonic() < until:
            while (pid := s.site.claim_newcomer(before)) is not None:
                s.site.signal(pid, signal.SIGKILL)
            time.sleep(0.02)

    s.site.later(0.0, strike)


def _stop_newcomer(s: Strike) -> None:
    """The one that replaces a victim stands still as it starts or joins, for longer than the heartbeat timeout."""
    before = s.site.newcomers()
    _kill(s)

    def strike() -> None:
        until = time.monotonic() + REPLACED_S
        while time.monotonic() < until:
            if (pid := s.site.claim_newcomer(before)) is not None:
                time.sleep(s.draw(0, 0.0, 1.0))
                s.site.note_struck(pid)
                s.site.signal(pid, signal.SIGSTOP)
                time.sleep(s.draw(1, 1.2, 3.0) * s.site.heartbeat_timeout_s)
                s.site.signal(pid, signal.SIGCONT)
                return
            time.sleep(0.01)

    s.site.later(0.0, strike)


def memory_folder() -> Path | None:
    """Return the control group of this process for memory, if others can be made in it; None: they cannot."""
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if "memory" in controllers.split(","):
            folder = Path("/sys/fs/cgroup/memory" + path)
            return folder if os.access(folder, os.W_OK) and (folder / "memory.limit_in_bytes").exists() else None
    return None


def _kill_for_memory(s: Strike) -> None:
    """The kernel kills the worker: it is in a control group in which hardly any memory may be added."""
    folder = memory_folder()
    assert folder is not None
    group = folder / f"chaos-{os.getpid()}-{s.fault.number}"
    group.mkdir()
    (group / "memory.limit_in_bytes").write_text("65536")
    s.site.note_struck(s.victim["pid"])
    with contextlib.suppress(ProcessLookupError):
        (group / "cgroup.procs").write_text(str(s.victim["pid"]))

    def remove() -> None:
        until = time.monotonic() + 10.0
        while is_running(s.victim["pid"]) and time.monotonic() < until:
            time.sleep(0.05)
        s.site.signal(s.victim["pid"], signal.SIGKILL)  # it needed nothing more
        while time.monotonic() < until + 10.0:
            with contextlib.suppress(OSError):
                group.rmdir()
                return
            time.sleep(0.05)

    s.site.later(0.0, remove)


def _jump_clock(s: Strike) -> None:
    """The wall clock of all processes jumps by up to a day, forward or back."""
    seconds = round(s.draw(0, -86400.0, 86400.0))
    shift_clock(seconds)


def _slow_down(s: Strike) -> None:
    """A worker that has a tenth of the time for some seconds."""
    until = time.monotonic() + s.draw(0, 1.0, 3.0)

    def limp() -> None:
        pid = s.victim["pid"]
        with contextlib.suppress(ProcessLookupError):
            while time.monotonic() < until:
                os.kill(pid, signal.SIGSTOP)
                time.sleep(0.09)
                os.kill(pid, signal.SIGCONT)
                time.sleep(0.01)

    s.site.later(0.0, limp)


def _keep_cores_busy(s: Strike) -> None:
    seconds = s.draw(0, 1.0, 4.0)
    for _ in range(BUSY_PROCESSES_PER_CORE * (os.cpu_count() or 1)):
        program = f"import time\nuntil = time.monotonic() + {seconds}\nwhile time.monotonic() < until: pass"
        s.site.helper(sys.executable, "-c", program)


def _pause_driver(s: Strike) -> None:
    """The program that called `run` stands still, now and then for longer than the timeout of heartbeats."""
    seconds = s.draw(0, 0.1, 1.5) * s.site.heartbeat_timeout_s
    me = os.getpid()
    s.site.helper("/bin/sh", "-c", f"kill -STOP {me}; sleep {seconds:.3f}; kill -CONT {me}").wait()


def _kill_executor(s: Strike) -> None:
    jvm = s.site.executor_of(s.victim["pid"])
    if jvm is not None and jvm != s.site.executor_of(s.spared["pid"]):
        s.site.note_struck(*children(jvm))
        s.site.signal(jvm, signal.SIGKILL)


def _stop_executor(s: Strike) -> None:
    jvm = s.site.executor_of(s.victim["pid"])
    if jvm is not None:
        s.site.signal(jvm, signal.SIGSTOP)
        s.site.later(s.draw(0, 0.5, 4.0), lambda: s.site.signal(jvm, signal.SIGCONT))


def _kill_python_daemon(s: Strike) -> None:
    """Spark's own process above the agents of an executor."""
    jvm = s.site.executor_of(s.victim["pid"])
    if jvm is None or jvm == s.site.executor_of(s.spared["pid"]):
        return
    s.site.note_struck(*children(jvm))
    for pid in children(jvm):
        if "pyspark.daemon" in command_line(pid) or "pyspark/daemon" in command_line(pid):
            s.site.signal(pid, signal.SIGKILL)
            return


def _host_of(s: Strike, pid: int) -> str | None:
    jvm = s.site.executor_of(pid)
    if jvm is None:
        return None
    words = command_line(jvm).split()
    return words[words.index("--hostname") + 1] if "--hostname" in words else None


def _kill_spark_worker(s: Strike) -> None:
    host = _host_of(s, s.victim["pid"])
    if host is None or host == _host_of(s, s.spared["pid"]):
        return
    s.site.note_struck(s.victim["pid"])
    s.site.cluster.kill_worker(host)
    s.site.later(s.draw(0, 0.0, 5.0), s.site.cluster.add_worker)


def _decommission(s: Strike) -> None:
    host = _host_of(s, s.victim["pid"])
    if host is None or host == _host_of(s, s.spared["pid"]):
        return
    # its worker leaves as soon as another one holds the state, so none may rely on it
    s.site.note_struck(s.victim["pid"], for_good=True)
    s.site.cluster.decommission(host)
    s.site.later(s.draw(0, 0.0, 5.0), s.site.cluster.add_worker)


def _cancel_another_job(s: Strike) -> None:
    """Another job of the same application, which is cancelled in the middle."""
    sc = s.site.cluster.sc
    group = f"chaos {s.fault.number}"

    def work() -> None:
        sc.setJobGroup(group, "another job", interruptOnCancel=True)
        with contextlib.suppress(Exception):  # its end is to be an error
            sc.parallelize(range(4), 4).map(lambda _: time.sleep(20)).count()

    s.site.later(0.0, work)
    s.site.later(s.draw(0, 0.2, 3.0), lambda: sc.cancelJobGroup(group))


def _link_down_briefly(s: Strike) -> None:
    _link_down(s, s.draw(0, 0.1, 0.6) * s.site.heartbeat_timeout_s)


def _link_down_long(s: Strike) -> None:
    host = _host_of(s, s.victim["pid"])
    if host is not None and host != _host_of(s, s.spared["pid"]):
        s.site.note_struck(s.victim["pid"])
        _link_down(s, s.draw(0, 1.5, 3.0) * s.site.heartbeat_timeout_s)


def _link_down_while_regrouping(s: Strike) -> None:
    """A worker dies, and the link of another one goes down while the others agree on the next world."""
    first, second = s.victims[:2]
    _kill_one(s, first)
    time.sleep(s.draw(0, 0.0, 0.1))
    host = _host_of(s, second["pid"])
    if host is not None and host != _host_of(s, s.spared["pid"]):
        s.site.note_struck(second["pid"])
        s.site.cluster.link_down(host)
        s.site.later(s.draw(1, 0.2, 3.0) * s.site.heartbeat_timeout_s, lambda: s.site.cluster.link_up(host))


def _link_down(s: Strike, seconds: float) -> None:
    host = _host_of(s, s.victim["pid"])
    if host is not None:
        s.site.cluster.link_down(host)
        s.site.later(seconds, lambda: s.site.cluster.link_up(host))


@dataclass(frozen=True)
class Kind:
    """How a fault is done. needs: the worlds' least size. on: the sites that have it. often: its weight."""

    about: str
    do: Callable[[Strike], None]
    needs: int = 2
    on: tuple[str, ...] = ("processes", "standalone", "namespaces")
    often: int = 1
    possible: Callable[[], object] = lambda: True
    """Whether this machine can do it."""


_SPARK = ("standalone", "namespaces")
FAULTS: dict[str, Kind] = {
    "kill worker": Kind("SIGKILL of a worker", _kill, often=4),
    "terminate worker": Kind("SIGTERM of a worker", _terminate),
    "kill agent": Kind("SIGKILL of an agent", _kill_agent, often=2),
    "terminate agent": Kind("SIGTERM of an agent", _terminate_agent),
    "stop agent": Kind("SIGSTOP of an agent for two heartbeat timeouts", _stop_agent),
    "stop worker briefly": Kind("SIGSTOP of a worker, shorter than the heartbeat timeout", _stop_briefly, needs=1),
    "stop worker long": Kind("SIGSTOP of a worker, longer than the heartbeat timeout, then SIGCONT", _stop_long),
    "kill two": Kind("SIGKILL of two workers at once", _kill_two, needs=3, often=2),
    "kill while regrouping": Kind("a second SIGKILL within 60 ms", _kill_while_regrouping, needs=3, often=2),
    "kill newcomer": Kind("SIGKILL of the replacement as it starts or joins", _kill_newcomer, often=2),
    "kill all newcomers": Kind("SIGKILL of all that start, for 1 to 4 s", _kill_all_newcomers),
    "stop newcomer": Kind(
        "SIGSTOP of the replacement as it starts or joins, longer than the heartbeat timeout", _stop_newcomer
    ),
    "kill for memory": Kind(
        "the kernel kills a worker for memory, in a control group", _kill_for_memory, possible=memory_folder
    ),
    "clock jump": Kind(
        "the wall clock jumps, up to a day forward or back",
        _jump_clock,
        on=("processes",),
        needs=1,
        possible=lambda: CLOCK in os.environ,
    ),
    "slow worker": Kind("a worker with a tenth of its time, 1 to 3 s", _slow_down, needs=1),
    "busy cores": Kind("four busy processes a core, 1 to 4 s", _keep_cores_busy, needs=1),
    "pause driver": Kind("SIGSTOP of the driver, up to 1.5 heartbeat timeouts", _pause_driver, needs=1),
    "kill executor": Kind("SIGKILL of an executor's JVM", _kill_executor, on=_SPARK, often=4),
    "stop executor": Kind("SIGSTOP of an executor's JVM, 0.5 to 4 s", _stop_executor, on=_SPARK, needs=1),
    "kill Python daemon": Kind("SIGKILL of Spark's Python daemon", _kill_python_daemon, on=_SPARK),
    "kill Spark Worker": Kind("SIGKILL of a Spark Worker; another one comes", _kill_spark_worker, on=_SPARK),
    "decommission": Kind("decommissioning of a Spark Worker; another one comes", _decommission, on=_SPARK),
    "cancel another job": Kind("another job on the cluster, cancelled", _cancel_another_job, on=_SPARK, needs=1),
    "link down briefly": Kind(
        "a host's link is down, shorter than the heartbeat timeout", _link_down_briefly, on=("namespaces",), needs=1
    ),
    "link down while regrouping": Kind(
        "a host's link is down within 0.1 s of a SIGKILL elsewhere",
        _link_down_while_regrouping,
        on=("namespaces",),
        needs=3,
        often=2,
    ),
    "link down long": Kind(
        "a host's link is down, longer than the heartbeat timeout", _link_down_long, on=("namespaces",), often=3
    ),
}


def kinds_on(site: str) -> list[str]:
    """The kinds of faults that this machine can do on a site, each as often as its weight."""
    possible = {name: kind for name, kind in FAULTS.items() if site in kind.on and kind.possible()}
    return [name for name, kind in possible.items() for _ in range(kind.often)]
