"""Step time and mapped pages of a process that keeps the memory it frees, as workers do, and of one that does not.

    python benchmarks/freed_memory.py [--repeat 5] [--steps 40]

Each measurement is a new process that trains one model alone. Processes with and without the setting take turns.
Prints a table and writes benchmarks/results/freed_memory.json.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
from pathlib import Path

from _harness import Series, parser, report

ROOT = Path(__file__).resolve().parents[1]
CASES = [
    ("SGD", (784, 512, 512, 10)),
    ("Adam", (784, 512, 512, 10)),
    ("SGD", (784, 3072, 2048, 512, 10)),
    ("Adam", (784, 3072, 2048, 512, 10)),
]
BATCH = 64
WARM_UP = 10


def train(keep: bool, optimizer_name: str, sizes: tuple[int, ...], steps: int) -> dict[str, float]:
    """Return the median step time in milliseconds and the mean number of pages that a step maps."""
    if keep:
        from spark_elastic.task.freed_memory import keep_freed_memory

        keep_freed_memory()
    import resource
    import time
    from itertools import pairwise

    import torch
    from torch import nn

    torch.set_num_threads(1)
    torch.manual_seed(0)
    layers = [layer for a, b in pairwise(sizes) for layer in (nn.Linear(a, b), nn.ReLU())]
    model = nn.Sequential(*layers[:-1])
    optimizer = {
        "SGD": lambda: torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9),
        "Adam": lambda: torch.optim.Adam(model.parameters(), lr=1e-3),
    }[optimizer_name]()
    x, y = torch.randn(BATCH, sizes[0]), torch.randint(0, sizes[-1], (BATCH,))
    times, mapped = [], 0
    for step in range(WARM_UP + steps):
        if step == WARM_UP:
            mapped = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        start = time.perf_counter()
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
        times.append((time.perf_counter() - start) * 1e3)
    mapped = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - mapped
    return {"step_ms": statistics.median(times[WARM_UP:]), "pages": mapped / steps}


def in_a_process(*given: object) -> dict[str, float]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, __file__, "--train", json.dumps(given)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, env=environment)
    figures: dict[str, float] = json.loads(done.stdout)
    return figures


def main() -> None:
    if sys.argv[1:2] == ["--train"]:
        print(json.dumps(train(*json.loads(sys.argv[2]))))
        return
    arguments = parser(__doc__, repeat=5)
    arguments.add_argument("--steps", type=int, default=40, help="steps of each measurement (%(default)s)")
    args = arguments.parse_args()
    repeat = 1 if args.quick else args.repeat
    series = []
    for optimizer, sizes in CASES:
        measured: dict[bool, list[dict[str, float]]] = {False: [], True: []}
        for number in range(repeat):
            for keep in (False, True) if number % 2 else (True, False):
                measured[keep].append(in_a_process(keep, optimizer, sizes, args.steps))
        name = f"{'-'.join(map(str, sizes))}, {optimizer}"
        for keep, what in ((False, "returned when freed"), (True, "kept")):
            series += [
                Series(f"{name}: step, memory {what}", [one["step_ms"] for one in measured[keep]], "ms"),
                Series(
                    f"{name}: pages mapped in a step, memory {what}", [one["pages"] for one in measured[keep]], "pages"
                ),
            ]
        ratios = [a["step_ms"] / b["step_ms"] for a, b in zip(measured[True], measured[False], strict=True)]
        series.append(Series(f"{name}: step, kept / returned", ratios, "ratio"))
    report("freed_memory", args, *series)


if __name__ == "__main__":
    main()
