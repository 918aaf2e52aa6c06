"""The processor time that each worker needs for a change of the world, where many of them share few cores.

    python benchmarks/regrouping.py                      # 4, 8 and 12 workers on this machine
    python benchmarks/regrouping.py --sizes 16 --repeat 40

Rank 0 fails a step on purpose again and again, so that the world is cut, left and formed anew with the same processes.
A worker counts from the end of its last step in the old world to the end of its first step in the new one: with the
step that fails, except on rank 0, and that first one. Unlike the time that passes, processor time and context switches
hardly depend on what else the machine does. With many workers on c cores, a change cannot take less than workers x
processor time / c.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from _harness import Series, parser, report

import spark_elastic

WARM_UP = 5
"""The first changes of the world, which are not counted: imports and memory are new to them."""
BETWEEN = 3
"""Steps in each world before the one that fails."""


def change_worlds(changes: int) -> tuple[list[list[float]], list[float]]:
    """Go through that many worlds.

    Returns:
        For each change: its begin and end on the clock, processor time in seconds, context switches. And the processor
        time of ordinary steps.
    """
    import resource

    import torch

    import spark_elastic.torch as hvd
    from spark_elastic.errors import HorovodInternalError

    torch.set_num_threads(1)
    hvd.init()
    model = torch.nn.Sequential(torch.nn.Linear(784, 128), torch.nn.ReLU(), torch.nn.Linear(128, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    state = hvd.elastic.TorchState(model=model, optimizer=optimizer, worlds=0)
    data, target = torch.randn(64, 784), torch.randint(0, 10, (64,))
    found: list[list[float]] = []
    steps: list[float] = []
    begun: list[tuple[float, float, int]] = []

    def now() -> tuple[float, float, int]:
        used = resource.getrusage(resource.RUSAGE_SELF)
        return time.monotonic(), used.ru_utime + used.ru_stime, used.ru_nvcsw + used.ru_nivcsw

    def step() -> None:
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(data), target).backward()
        optimizer.step()

    @hvd.elastic.run
    def loop(state: Any) -> None:
        while state.worlds < changes:
            step()
            if begun:
                (began, used, switches), (ended, used_then, switches_then) = begun.pop(), now()
                found.append([began, ended, used_then - used, float(switches_then - switches)])
            for _ in range(BETWEEN):
                before = now()
                step()
                steps.append(now()[1] - before[1])
            state.worlds += 1
            state.commit()
            if state.worlds < changes:
                begun.append(now())
                if hvd.rank() == 0:
                    raise HorovodInternalError("on purpose")

    loop(state)
    return found, steps


def main() -> None:
    arguments = parser(__doc__, repeat=30)
    arguments.add_argument("--sizes", type=int, nargs="+", default=[4, 8, 12])
    args = arguments.parse_args()
    changes = WARM_UP + (3 if args.quick else args.repeat)
    series = []
    raw = {}
    for size in args.sizes:
        job = spark_elastic.run_async(
            change_worlds,
            (changes,),
            num_proc=size,
            launcher=spark_elastic.LocalLauncher(),
            verbose=0,
            cooldown_range=None,
        )
        while job.status().round < WARM_UP and not job.done():
            time.sleep(0.05)
        driver, started = time.process_time(), job.status().round
        found = job.result()
        driver = (time.process_time() - driver) / max(1, changes - started)
        members = [member[WARM_UP:] for member, _ in found]
        longest = [
            (max(change[1] for change in each) - min(change[0] for change in each)) * 1000
            for each in zip(*members, strict=False)
        ]
        label = f"{size} workers"
        raw[label] = {"members": members, "driver_s": driver}
        used = [change[2] * 1000 for member in members for change in member]
        series += [
            Series(f"{label}: processor time of a worker", used, "ms"),
            Series(f"{label}: of an ordinary step", [each * 1000 for _, steps in found for each in steps], "ms"),
            Series(f"{label}: context switches of a worker", [c[3] for member in members for c in member], "switches"),
            Series(f"{label}: processor time of the driver", [driver * 1000], "ms"),
            Series(f"{label}: failure -> next step of the last", longest, "ms"),
            Series(f"{label}: least possible", [size * sum(used) / len(used) / (os.cpu_count() or 1)], "ms"),
        ]
    report("regrouping", args, *series, raw=raw)


if __name__ == "__main__":
    main()
