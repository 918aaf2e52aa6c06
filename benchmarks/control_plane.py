"""Measure what the driver pays for each worker: assembling, a lost worker, and standing by, for 10 to 3,000 workers.

    python benchmarks/control_plane.py                     # 10 30 100 300 1000 3000
    python benchmarks/control_plane.py 100 1000 --losses 9 --fleets 4
    python scripts/control_plane_picture.py                # docs/images/control_plane.png, from the JSON

The driver, its rendezvous server and the membership machine are the real ones, in a process for each size. The agents
and workers are simulated in further processes (`tests/storms/simulated_peers.py`): they authenticate, send heartbeats,
try connections, get ready, receive worlds and exchange addresses, on real connections. All agents connect at once. A
loss closes a worker's and its agent's connections; it is over when the last survivor holds the next world, with the
addresses of all its members. The driver's CPU time of a loss is that of its process from the kill until then.

The last table is of the machine alone, without connections: the time of `Membership.handle` for each kind of event.
The exponents are fitted by least squares to the logarithms, from 30 workers on.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import queue
import random
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from _harness import Series, parser, raise_descriptor_limit, report, table

from spark_elastic.driver.elastic_driver import ElasticDriver
from spark_elastic.driver.output import OutputPrinter
from spark_elastic.membership import commands as do
from spark_elastic.membership import events as seen
from spark_elastic.membership.launcher import OnEnded
from spark_elastic.membership.machine import Membership
from spark_elastic.membership.reasons import LossCause, LossKind
from spark_elastic.membership.topology import LaunchId, Place, SlotId, StateVersion
from spark_elastic.settings import ElasticSettings
from spark_elastic.wire.framing import new_key
from spark_elastic.wire.messages import LaunchSpec

SIZES = (10, 30, 100, 300, 1000, 3000)
WORKERS_A_HOST = 8
LIMIT_S = 120.0
FITTED_FROM = 30
"""With fewer workers, what a change costs whatever their number hides what each of them costs."""
MACHINE_SIZES = (300, 3000)

CPU_OF_A_LOSS = "CPU of the driver for a loss"
NEXT_WORLD = "loss until the last survivor holds the next world"
CPU_OF_A_LOSS_MS = {300: 80.0}
NEXT_WORLD_MS = {1000: 500.0}
ASSEMBLED_S = {1000: 5.0}
IDLE_PERCENT = {1000: 5.0}
"""Targets by the number of workers."""
EXPONENT = 1.1


class NoLauncher:
    """A launcher whose agents are started by the benchmark. A lost slot is not launched again."""

    def launch(self, slot: SlotId) -> None: ...
    def withdraw(self, slot: SlotId, cause: LossCause) -> None: ...
    def admit(self, slot: SlotId, launch: LaunchId) -> bool:
        return True

    def agent_present(self, slot: SlotId, present: bool) -> None: ...
    def gone(self) -> str | None:
        return None

    def close(self, deadline_s: float) -> None: ...


# --- the simulated peers ------------------------------------------------------------------------------


@dataclass
class Fleets:
    """The processes with the simulated peers; peer `slot` is in number `slot % len(processes)`."""

    processes: list[subprocess.Popen[str]]
    _events: queue.Queue[tuple[int, dict[str, Any]]] = field(default_factory=queue.Queue)
    _peers: dict[int, int] = field(default_factory=dict)
    """The number of living peers in each process."""

    def __post_init__(self) -> None:
        self._readers = [
            threading.Thread(target=self._read, args=(number,), daemon=True) for number in range(len(self.processes))
        ]
        for reader in self._readers:
            reader.start()

    def _read(self, number: int) -> None:
        stream = self.processes[number].stdout
        assert stream is not None
        for line in stream:
            self._events.put((number, json.loads(line)))

    def tell(self, number: int, **command: Any) -> None:
        stream = self.processes[number].stdin
        assert stream is not None
        stream.write(json.dumps(command) + "\n")
        stream.flush()

    def start(self, size: int) -> None:
        for number in range(len(self.processes)):
            slots = range(number, size, len(self.processes))
            self._peers[number] = len(slots)
            self.tell(number, start=list(slots))

    def kill(self, slot: int) -> float:
        """Kill an agent and its worker. Returns when, on the monotonic clock."""
        number = slot % len(self.processes)
        self._peers[number] -= 1
        self.tell(number, kill=slot)
        return float(self._wait({number}, killed=slot)[number]["at"])

    def all_in_world(self, size: int) -> float:
        """Wait until all peers hold a world of that size. Returns when the last one got it."""
        found = self._wait({number for number, count in self._peers.items() if count}, size=size)
        assert sum(event["entered"] for event in found.values()) == size
        return max(float(event["at"]) for event in found.values())

    def report(self) -> dict[str, float]:
        """Return the sums of the processes' counters."""
        for number in range(len(self.processes)):
            self.tell(number, report=True)
        found = self._wait(set(range(len(self.processes))), received=None).values()
        return {name: sum(event[name] for event in found) for name in ("received", "sent", "refused", "cpu_s")}

    def _wait(self, of: set[int], **wanted: Any) -> dict[int, dict[str, Any]]:
        """Wait for an event of each of these processes that has these values, or these keys where the value is None."""
        deadline = time.monotonic() + LIMIT_S
        found: dict[int, dict[str, Any]] = {}
        while found.keys() != of:
            number, event = self._events.get(timeout=max(deadline - time.monotonic(), 0.01))
            if number in of and all(key in event and value in (None, event[key]) for key, value in wanted.items()):
                found[number] = event
        return found

    def close(self) -> None:
        for process in self.processes:
            assert process.stdin is not None
            process.stdin.close()
        for process in self.processes:
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        for reader in self._readers:
            reader.join()


@contextlib.contextmanager
def fleets(count: int, key: bytes, address: tuple[str, int]) -> Iterator[Fleets]:
    command = [sys.executable, str(Path(__file__).parents[1] / "tests" / "storms" / "simulated_peers.py")]
    made = Fleets(
        [subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) for _ in range(count)]
    )
    try:
        for number in range(count):
            made.tell(number, key=key.hex(), address=address, workers_a_host=WORKERS_A_HOST)
        yield made
    finally:
        made.close()


# --- one size -----------------------------------------------------------------------------------------


def measure(size: int, losses: int, idle_s: float, processes: int) -> dict[str, Any]:
    """Assemble that many workers, let some of them die one after the other, and stand by."""
    listening = socket.create_server(("127.0.0.1", 0), backlog=1024)
    key = new_key()
    address = listening.getsockname()
    spec = LaunchSpec("bench", (address,), key, b"", 60.0, "bench")
    settings = ElasticSettings(num_proc=size, min_num_proc=1, max_num_proc=size, start_grace_s=LIMIT_S)
    driver = ElasticDriver(spec, settings, _no_launcher, listening, printer=OutputPrinter(), verbose=0)
    job = threading.Thread(target=_run, args=(driver,), name="driver")
    rss = _rss_mb()
    with fleets(processes, key, address) as peers:
        job.start()
        try:
            peers.report()  # they are up
            cpu, began = time.process_time(), time.monotonic()
            peers.start(size)
            assembled_s = peers.all_in_world(size) - began
            assembled_cpu_s = time.process_time() - cpu
            memory_mb = _rss_mb() - rss
            lost = random.Random(size).sample(range(size), min(losses, size // 2))
            changes = [_lose(peers, slot, size - number - 1) for number, slot in enumerate(lost)]
            time.sleep(1.0)
            cpu = time.process_time()
            time.sleep(idle_s)
            idle = (time.process_time() - cpu) / idle_s
            refused = peers.report()["refused"]
        finally:
            driver.cancel("measured")
            job.join()
    return {
        "size": size,
        "assemble_s": assembled_s,
        "assemble_cpu_s": assembled_cpu_s,
        "refused": refused,
        "memory_mb": memory_mb,
        "losses": changes,
        "idle_cpu_share": idle,
    }


def _no_launcher(on_ended: OnEnded) -> NoLauncher:
    return NoLauncher()


def _run(driver: ElasticDriver) -> None:
    with contextlib.suppress(Exception):
        driver.run()


def _lose(peers: Fleets, slot: int, left: int) -> dict[str, float]:
    time.sleep(0.3)
    before = peers.report()
    cpu = time.process_time()
    killed = peers.kill(slot)
    done = peers.all_in_world(left)
    spent = time.process_time() - cpu
    after = peers.report()
    return {
        "s": done - killed,
        "driver_cpu_s": spent,
        "bytes": after["received"] - before["received"],
        "peers_cpu_s": after["cpu_s"] - before["cpu_s"],
    }


def _rss_mb() -> float:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


def in_a_process(size: int, args: argparse.Namespace) -> dict[str, Any]:
    """Call `measure` in a process of its own, so that the sizes do not share memory."""
    options = [f"--losses={args.losses}", f"--idle={args.idle}", f"--fleets={args.fleets}", "--one"]
    done = subprocess.run([sys.executable, __file__, str(size), *options], stdout=subprocess.PIPE, text=True)
    if done.returncode:
        raise RuntimeError(f"the measurement of {size} workers has ended with {done.returncode}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


# --- the machine alone --------------------------------------------------------------------------------


def machine_costs(size: int) -> dict[str, float]:
    """Return the mean microseconds of `Membership.handle`, by the kind of event, in a job of that many workers."""
    machine = Membership(ElasticSettings(num_proc=size, min_num_proc=size // 2, max_num_proc=size))
    version = StateVersion(1, 5, 0)
    costs: dict[str, float] = {}
    now = 0.0

    def feed(what: str, events: Sequence[seen.Event]) -> list[do.Command]:
        nonlocal now
        commands: list[do.Command] = []
        began = time.perf_counter()
        for event in events:
            now += 1e-4
            commands += machine.handle(event, now)
        costs[what] = (time.perf_counter() - began) / len(events) * 1e6
        return commands

    def ready(workers: Sequence[int], round: int) -> list[seen.Event]:
        first = round == 0
        return [seen.WorkerReady(each, round, None if first else version, first, 1) for each in workers]

    feed("the start of the job", [seen.JobStarted()])
    places = [Place(f"host{slot // WORKERS_A_HOST}", str(slot // WORKERS_A_HOST), slot) for slot in range(size)]
    started = feed("an agent joins", [seen.AgentJoined(slot + 1, place) for slot, place in enumerate(places)])
    agent_of = {each.worker: each.agent for each in started if isinstance(each, do.StartWorker)}
    workers = list(agent_of)
    feed("a worker is ready for the first world", ready(workers[:-1], 0))
    feed("the last worker is ready: the first world", ready(workers[-1:], 0))
    beats: list[seen.Event] = [seen.WorkerAlive(each, version, None, False, 1) for each in workers]
    feed("the first heartbeat of a worker", beats)
    feed("a heartbeat of a worker", beats)
    feed("a heartbeat of an agent", [seen.AgentAlive(agent_of[each], each) for each in workers])
    feed("a tick with nothing due", [seen.Tick()] * 100)
    lost = workers[size // 2]
    gone = LossCause(LossKind.CONNECTION_CLOSED)
    feed("a member is lost: the world breaks", [seen.WorkerLost(lost, gone)])
    feed("its agent is lost", [seen.AgentLost(agent_of[lost], gone)])
    survivors = [each for each in workers if each != lost]
    feed("a survivor is ready", ready(survivors[:-1], 1))
    feed("the last survivor is ready: the next world", ready(survivors[-1:], 1))
    half = survivors[: size // 2]
    feed("half of the workers are lost", [seen.WorkerLost(each, gone) for each in half])
    feed("their agents are lost", [seen.AgentLost(agent_of[each], gone) for each in half])
    rest = survivors[size // 2 :]
    feed("a survivor is ready, and too few are left", ready(rest, 2))
    home = [agent_of[each] for each in half]
    ended = LossCause(LossKind.CONNECTION_CLOSED)
    feed("a slot has ended", [seen.SlotEnded(agent - 1, ended) for agent in home])
    back = [seen.AgentJoined(size + agent, places[agent - 1]) for agent in home]
    feed("an agent is back, while workers wait", back)
    return costs


# --- the report ---------------------------------------------------------------------------------------


def exponent(points: Sequence[tuple[float, float]]) -> float | None:
    """Fit y = c * x**e; returns e. None with fewer than two points."""
    logs = [(math.log(x), math.log(y)) for x, y in points if y > 0 and x >= FITTED_FROM]
    if len(logs) < 2:
        return None
    mean_x, mean_y = (statistics.fmean(axis) for axis in zip(*logs, strict=True))
    return sum((x - mean_x) * (y - mean_y) for x, y in logs) / sum((x - mean_x) ** 2 for x, _ in logs)


def series_of(runs: Sequence[dict[str, Any]]) -> list[Series]:
    made: list[Series] = []
    for run in runs:
        size, losses = run["size"], run["losses"]

        def add(what: str, values: Sequence[float], unit: str, targets: dict[int, float] | None = None) -> None:
            made.append(Series(f"{what}, {size} workers", values, unit, target_p50=(targets or {}).get(size)))  # noqa: B023

        add("assembled", [run["assemble_s"]], "s", ASSEMBLED_S)
        add(CPU_OF_A_LOSS, [loss["driver_cpu_s"] * 1e3 for loss in losses], "ms", CPU_OF_A_LOSS_MS)
        add(
            NEXT_WORLD,
            [loss["s"] * 1e3 for loss in losses],
            "ms",
            NEXT_WORLD_MS,
        )
        add("bytes sent for a loss", [loss["bytes"] / 2**20 for loss in losses], "MB")
        add("memory of the driver", [run["memory_mb"]], "MB")
        add("CPU of the driver while nothing happens", [run["idle_cpu_share"] * 100], "% of a core", IDLE_PERCENT)
    return made


def exponents_of(runs: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Return how each quantity grows with the number of workers, as the exponent."""

    def fit(value: Callable[[dict[str, Any]], float]) -> float | None:
        return exponent([(run["size"], value(run)) for run in runs])

    def of_loss(key: str) -> Callable[[dict[str, Any]], float]:
        return lambda run: statistics.median(loss[key] for loss in run["losses"])

    found = {
        CPU_OF_A_LOSS: fit(of_loss("driver_cpu_s")),
        NEXT_WORLD: fit(of_loss("s")),
        "bytes sent for a loss": fit(of_loss("bytes")),
        "assembled": fit(lambda run: run["assemble_s"]),
        "CPU of the driver while nothing happens": fit(lambda run: run["idle_cpu_share"]),
    }
    return {name: value for name, value in found.items() if value is not None}


def summary(runs: Sequence[dict[str, Any]]) -> str:
    rows = []
    for run in runs:
        median = {key: statistics.median(loss[key] for loss in run["losses"]) for key in run["losses"][0]}
        rows.append(
            [
                run["size"],
                f"{run['assemble_s']:.2f}",
                f"{run['assemble_cpu_s']:.2f}",
                f"{median['driver_cpu_s'] * 1e3:.1f}",
                f"{median['s'] * 1e3:.0f}",
                f"{median['bytes'] / 2**20:.2f}",
                f"{run['memory_mb']:.0f}",
                f"{run['idle_cpu_share']:.1%}",
            ]
        )
    head = ["workers", "assemble s", "CPU s", "loss: CPU ms", "loss: ms", "loss: MB sent", "memory MB", "idle CPU"]
    return table(head, rows)


def main() -> None:
    arguments = parser(__doc__, repeat=1)
    arguments.add_argument("sizes", nargs="*", type=int, default=SIZES, metavar="N")
    arguments.add_argument("--losses", type=int, default=5, help="workers that are killed, one after the other")
    arguments.add_argument("--idle", type=float, default=10.0, metavar="SECONDS")
    arguments.add_argument("--fleets", type=int, default=3, help="processes with simulated peers (%(default)s)")
    arguments.add_argument("--one", action="store_true", help=argparse.SUPPRESS)
    args = arguments.parse_args()
    raise_descriptor_limit()
    if args.one:
        print(json.dumps(measure(args.sizes[0], args.losses, args.idle, args.fleets)))
        return
    if args.quick:
        args.sizes, args.idle = (10, 30), 2.0
    runs = []
    for size in args.sizes:
        runs.append(in_a_process(size, args))
        print(summary(runs[-1:]), file=sys.stderr)
    machine = {} if args.quick else {size: machine_costs(size) for size in MACHINE_SIZES}
    print(summary(runs))
    if machine:
        rows = [[what, *(f"{machine[size][what]:.1f}" for size in machine)] for what in machine[MACHINE_SIZES[0]]]
        print(table(["one event of the machine, in us", *(f"{size} workers" for size in machine)], rows))
    fitted = exponents_of(runs)
    grows = [
        Series(f"exponent: {name}", [value], "", target_p50=EXPONENT if name == CPU_OF_A_LOSS else None)
        for name, value in fitted.items()
    ]
    raw = {"runs": runs, "exponents": fitted, "machine": machine}
    report("control-plane", args, *series_of(runs), *grows, raw=raw)


if __name__ == "__main__":
    main()
