"""Measure how long a training pauses when a newcomer joins it, for states of several sizes.

    python benchmarks/large_join.py                      # 4 MB, 100 MB and 1 GB of parameters and Adam's state
    python benchmarks/large_join.py --size 3             # two survivors, which compare their states
    python benchmarks/large_join.py --megabytes 1000 --repeat 3

A worker is killed, and its replacement joins the survivors. Every number comes from what the survivors wrote down. The
pause is the time between their last step before the newcomer and the first one with it, less the duration of a usual
step in the same world (the median). Its parts are: to leave the old world and connect the new one; to make all states
equal; and what the first step takes longer than a usual one.
"""

from __future__ import annotations

import itertools
import json
import os
import random
import signal
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import _training
import cloudpickle
from _harness import Series, parser, report
from _training import StepLog

import spark_elastic

cloudpickle.register_pickle_by_value(_training)

WIDTH = 1024
STEPS_TO_COMPARE = 5
"""The number of steps in the new world that tell how long a usual step takes."""
TARGETS_MS = {4: 50.0, 100: None, 1000: 1600.0}


def train_large(folder: str, megabytes: int) -> None:
    """Train layers with Adam until the job is cancelled; parameters and Adam's state have that size."""
    import torch

    import spark_elastic.torch as hvd
    from spark_elastic.collective.process import process

    torch.set_num_threads(1)
    hvd.init()
    layer_bytes = 3 * 4 * WIDTH * WIDTH
    layers = max(1, round(megabytes * 1e6 / layer_bytes))
    width = WIDTH if megabytes * 1e6 >= layer_bytes else int((megabytes * 1e6 / 12) ** 0.5)
    # side by side: in a deep stack gradients would be denormal numbers, with which Adam is twenty times slower
    model = torch.nn.ModuleList(torch.nn.Linear(width, width, bias=False) for _ in range(layers))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-5)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    state = hvd.elastic.TorchState(model=model, optimizer=optimizer, step=0)
    data = torch.randn(4, width)
    log = os.open(Path(folder, f"{os.getpid()}.steps"), os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    parts = os.open(Path(folder, f"{os.getpid()}.parts"), os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    called = {"connected": 0.0}
    reset, begins = state._reset_alone, state._function_begins

    def connected() -> None:  # the world is connected, and the states are made equal next
        called["connected"] = time.monotonic()
        reset()

    def function_begins() -> None:
        begins()
        note = {"round": process.assignment.world.round, "equal": time.monotonic(), **called}
        os.write(parts, (json.dumps(note) + "\n").encode())

    state._reset_alone, state._function_begins = connected, function_begins

    @hvd.elastic.run
    def loop(state: Any) -> None:
        while True:
            optimizer.zero_grad()
            sum(layer(data).square().mean() for layer in model).backward()
            optimizer.step()
            state.step += 1
            line = f"{process.assignment.world.round} {hvd.rank()} {state.step} {time.monotonic():.6f}\n"
            os.write(log, line.encode())
            state.check_host_updates()

    loop(state)


@dataclass
class Figures:
    """In milliseconds."""

    pause: list[float] = field(default_factory=list)
    connect: list[float] = field(default_factory=list)
    equal: list[float] = field(default_factory=list)
    first_step: list[float] = field(default_factory=list)
    usual_step: list[float] = field(default_factory=list)


def one_join(log: StepLog, folder: Path, size: int, figures: Figures, rng: random.Random) -> None:
    """Kill one worker, wait for its replacement, and measure the survivors' pause when that joins."""
    members = log.wait_for_world(size, _newest_round(log) - 1, 120.0)
    round = _newest_round(log)
    victim = rng.choice(sorted(members))
    survivors = [pid for pid in members if pid != victim]
    os.kill(victim, signal.SIGKILL)
    log.wait_for_world(size, round + 1, 120.0)
    joined = _newest_round(log)
    log.wait(
        lambda read: min(sum(step.round == joined for step in read.steps[pid]) for pid in survivors) > STEPS_TO_COMPARE,
        120.0,
        "steps in the new world",
    )
    worst: dict[str, float] = {}
    for pid in survivors:
        before, steps = log.last_step_before(pid, joined), [step for step in log.steps[pid] if step.round == joined]
        assert before is not None
        usual = statistics.median(b.at - a.at for a, b in itertools.pairwise(steps))
        notes = map(json.loads, (folder / f"{pid}.parts").read_text().splitlines())
        note = next(note for note in notes if note["round"] == joined)
        parts = {
            "pause": steps[0].at - before.at - usual,
            "connect": note["connected"] - before.at,
            "equal": note["equal"] - note["connected"],
            "first_step": steps[0].at - note["equal"] - usual,
            "usual_step": usual,
        }
        if parts["pause"] > worst.get("pause", float("-inf")):
            worst = parts
    for name, seconds in worst.items():
        getattr(figures, name).append(seconds * 1000)


def _newest_round(log: StepLog) -> int:
    log.read()
    return max((step.round for step in log.newest().values()), default=0)


def main() -> None:
    arguments = parser(__doc__, repeat=10)
    arguments.add_argument("--megabytes", type=int, nargs="+", default=list(TARGETS_MS))
    arguments.add_argument("--size", type=int, default=2, help="workers, one of which is replaced (%(default)s)")
    args = arguments.parse_args()
    repeat = 2 if args.quick else args.repeat
    rng = random.Random(7)
    series: list[Series] = []
    raw: dict[str, Any] = {}
    lost = 0
    for megabytes in args.megabytes:
        figures = Figures()
        with tempfile.TemporaryDirectory() as folder:
            job = spark_elastic.run_async(
                train_large,
                (folder, megabytes),
                launcher=spark_elastic.LocalLauncher(),
                num_proc=args.size,
                min_num_proc=1,
                cooldown_range=(0.01, 0.02),
                verbose=0,
            )
            try:
                log = StepLog(Path(folder), job)
                log.wait_for_world(args.size, 0, 180.0)
                for number in range(repeat):
                    one_join(log, Path(folder), args.size, figures, rng)
                    print(f"\r{megabytes} MB: {number + 1}/{repeat}", end="", file=sys.stderr, flush=True)
                log.read()
                lost += log.lost_steps()
            finally:
                job.cancel()
        target = TARGETS_MS.get(megabytes)
        series += [
            Series(f"{megabytes} MB: pause beyond a usual step", figures.pause, "ms", target_p50=target),
            Series(f"{megabytes} MB: of it, connect the new world", figures.connect, "ms"),
            Series(f"{megabytes} MB: of it, make all states equal", figures.equal, "ms"),
            Series(f"{megabytes} MB: of it, in the first step", figures.first_step, "ms"),
            Series(f"{megabytes} MB: a usual step", figures.usual_step, "ms"),
        ]
        raw[str(megabytes)] = vars(figures)
    series.append(Series("applied steps lost", [float(lost)], "steps", target_max=0.0))
    report("large-join" if args.size == 2 else f"large-join-{args.size}", args, *series, raw=raw)


if __name__ == "__main__":
    main()
