"""Steps and recoveries on one GPU, with plain PyTorch and DistributedDataParallel beside them. Needs no Spark.

One worker, and two on the same card, as `tests/gpu/one_card.py` has them: they share it in slices of time, so compare
the columns of a row, not milliseconds with those of real worlds.

    python benchmarks/gpu_steps.py [--device cpu] [--quick]

Prints a table and writes benchmarks/results/gpu_steps.json.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

RESULTS = Path(__file__).parent / "results" / "gpu_steps.json"
MODELS = {"0.7M": (784, 512, 512, 10), "8M": (784, 2048, 2048, 1024, 10), "100M": (2048, 8192, 8192, 2048, 10)}
KINDS = ("plain", "ddp", "ours")
ROWS, STEPS_A_BLOCK = 256, 10


def steps(kind: str, sizes: tuple[int, ...], device: torch.device) -> Callable[[], None]:
    """Return a function that makes a step of a model: alone, with DistributedDataParallel, or with this package."""
    import spark_elastic.torch as hvd

    torch.manual_seed(0)
    layers = [layer for a, b in pairwise(sizes) for layer in (nn.Linear(a, b), nn.ReLU())]
    model = nn.Sequential(*layers[:-1]).to(device)
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    called: nn.Module = model
    if kind == "ddp":
        called = nn.parallel.DistributedDataParallel(model, [device.index] if device.type == "cuda" else None)
    if kind == "ours":
        optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    x, y = torch.randn(ROWS, sizes[0], device=device), torch.randint(0, sizes[-1], (ROWS,), device=device)

    def step() -> None:
        optimizer.zero_grad()
        nn.functional.cross_entropy(called(x), y).backward()
        optimizer.step()

    return step


def measure(folder: str, models: dict[str, tuple[int, ...]], rounds: int, claims: bool) -> dict[str, Any]:
    """In a worker: return the median milliseconds of a step, by model and kind; the kinds take turns."""
    import spark_elastic.torch as hvd
    from tests.gpu import one_card

    if claims and one_card.ON_GPU:
        one_card.claim_a_gpu()
    hvd.init()
    device = hvd.device()
    if one_card.ON_GPU:  # for DistributedDataParallel, whatever is claimed to this package
        os.environ["NCCL_HOSTID"] = f"process {os.getpid()}"
    store = dist.FileStore(f"{folder}/store", hvd.size())
    dist.init_process_group("nccl" if one_card.ON_GPU else "gloo", store=store, rank=hvd.rank(), world_size=hvd.size())
    table = {}
    for name, sizes in models.items():
        kinds = {kind: steps(kind, sizes, device) for kind in KINDS}
        times: dict[str, list[float]] = {kind: [] for kind in KINDS}
        for number in range(rounds + 1):
            for kind, step in kinds.items():
                one_card.synchronize()
                hvd.barrier()
                began = time.perf_counter()
                for _ in range(STEPS_A_BLOCK):
                    step()
                one_card.synchronize()
                if number:  # the first round warms up
                    times[kind].append((time.perf_counter() - began) / STEPS_A_BLOCK * 1e3)
        table[name] = {kind: round(statistics.median(each), 3) for kind, each in times.items()}
    return {"ms": table, "nccl": one_card.used_nccl()}


def recovery(folder: Path) -> dict[str, Any]:
    """Kill one of three workers; return the milliseconds to the next step, and of the pause when a newcomer joins."""
    from tests.gpu import one_card
    from tests.gpu.test_worlds import die

    kill = partial(die, victim=1, at=10, folder=str(folder))
    one_card.run(3, folder, 30, at_step=kill, waits_for=3)
    lines = [line for each in one_card.steps_in(folder).values() for line in each]
    before = max(line[4] for line in lines if line[0] == 1)
    after = min(line[4] for line in lines if line[0] == 2)
    joins = [
        b[4] - a[4]
        for each in one_card.steps_in(folder).values()
        for a, b in pairwise(each)
        if b[0] > a[0] and b[2] == 3
    ]
    return {"step to step over a kill": round((after - before) * 1e3, 1), "and over a join": round(max(joins) * 1e3, 1)}


def facts(device: str) -> dict[str, Any]:
    found: dict[str, Any] = {"python": platform.python_version(), "torch": torch.__version__, "cpus": os.cpu_count()}
    if device == "cuda":
        found |= {"gpu": torch.cuda.get_device_name(0), "cuda": torch.version.cuda, "nccl": torch.cuda.nccl.version()}
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda", help="cpu: see whether it runs")
    parser.add_argument("--quick", action="store_true", help="the smallest model, and few rounds")
    parser.add_argument("--results", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    if arguments.device == "cuda" and not torch.cuda.is_available():
        print("gpu_steps.py: torch sees no GPU here")
        return
    os.environ["SPARK_ELASTIC_GPU_CHECK"] = arguments.device

    import spark_elastic
    from tests.gpu import one_card

    models = {"0.7M": MODELS["0.7M"]} if arguments.quick else MODELS
    rounds = 2 if arguments.quick else 8
    found: dict[str, Any] = {"machine": facts(arguments.device), "step": {}}
    for title, workers, claims in (("one worker", 1, True), ("two, NCCL", 2, True), ("two, host memory", 2, False)):
        own = {name: sizes for name, sizes in models.items() if workers == 1 or name != "100M"}
        with tempfile.TemporaryDirectory() as folder:
            options = one_card.options(workers)
            result = spark_elastic.run(measure, (folder, own, rounds, claims), **options)[0]
        found["step"][title] = result
        for name, row in result["ms"].items():
            columns = ", ".join(f"{kind} {value:.2f} ms" for kind, value in row.items())
            print(
                f"{title:18} {name:>5}: {columns}{'' if workers == 1 or result['nccl'] else ' (no NCCL)'}", flush=True
            )
    with tempfile.TemporaryDirectory() as folder:
        found["ms"] = recovery(Path(folder))
    print(found["ms"])
    arguments.results.parent.mkdir(parents=True, exist_ok=True)
    arguments.results.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
