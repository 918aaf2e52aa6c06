"""Steps, recoveries and epochs on one GPU, with plain PyTorch and DistributedDataParallel beside. Needs no Spark.

One worker, and two on the same card, as `tests/gpu/one_card.py` has them: they share it in slices of time, so compare
the columns of a row, not milliseconds with those of real worlds.

    python benchmarks/gpu_steps.py [--device cpu] [--quick]

Prints a table and writes benchmarks/results/gpu_steps.json.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import platform
import signal
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
MODELS = {
    "0.7M": (784, 512, 512, 10),
    "8M": (784, 2048, 2048, 1024, 10),
    "25M": (1024, 3072, 4096, 2048, 10),
    "100M": (2048, 8192, 8192, 2048, 10),
}
KINDS = ("plain", "ddp", "ours")
ROWS, STEPS_A_BLOCK = 256, 10
LIMIT_S = 90
"""The longest time of an experiment."""


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


def recovery(workers: int, width: int, folder: Path) -> dict[str, Any]:
    """Kill a worker; return milliseconds from step to step over that and over a join, and the lines that were printed.

    The join is also given without the time in which NCCL connects.
    """
    import spark_elastic
    from tests.gpu import one_card
    from tests.gpu.test_worlds import die

    kill, printed = partial(die, victim=1, at=10, folder=str(folder)), io.StringIO()
    settings = {"at_step": kill, "waits_for": workers, "width": width}
    options = {**one_card.options(workers), "stdout": printed, "stderr": printed}
    spark_elastic.run(one_card.train, (str(folder), 30), settings, **options)
    steps = one_card.steps_in(folder)
    lines = [line for each in steps.values() for line in each]
    before = max(line[4] for line in lines if line[0] == 1)
    after = min(line[4] for line in lines if line[0] == 2)
    joins = [(b[4] - a[4], b[0]) for each in steps.values() for a, b in pairwise(each) if b[2] > a[2]]
    pause, joined = max(joins)
    connects = [line.split() for file in folder.glob("*.connects") for line in file.read_text().splitlines()]
    connecting = max((float(seconds) for number, seconds in connects if float(number) == joined), default=0.0)
    return {
        "over a kill": round((after - before) * 1e3, 1),
        "over a join": round(pause * 1e3, 1),
        "without connecting": round((pause - connecting) * 1e3, 1),
        "lines printed": len(printed.getvalue().splitlines()),
    }


def undisturbed(steps: int, folder: Path) -> dict[str, Any]:
    """Let three workers make steps; return the number of worlds that this took, and the milliseconds of a step."""
    from tests.gpu import one_card

    one_card.run(3, folder, steps)
    logs = one_card.steps_in(folder).values()
    gaps = [b[4] - a[4] for each in logs for a, b in pairwise(each)]
    return {
        "steps": steps,
        "worlds": len({line[0] for each in logs for line in each}),
        "ms": round(statistics.median(gaps) * 1e3, 1),
    }


def picture_net() -> nn.Module:
    def block(a: int, b: int, stride: int) -> list[nn.Module]:
        first = [nn.Conv2d(a, b, 3, stride, 1, bias=False), nn.BatchNorm2d(b), nn.ReLU()]
        return [*first, nn.Conv2d(b, b, 3, 1, 1, bias=False), nn.BatchNorm2d(b), nn.ReLU()]

    torch.manual_seed(0)
    layers = [*block(3, 64, 1), *block(64, 128, 2), *block(128, 256, 2), nn.AdaptiveAvgPool2d(1), nn.Flatten()]
    return nn.Sequential(Scaled(), *layers, nn.Linear(256, 10))


class Scaled(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.view(-1, 3, 32, 32).float() / 127.5 - 1


def table_net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(20, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 2))


def epochs(kind: str, rows: int, device: str, folder: Path) -> dict[str, Any]:
    """Return the seconds of an epoch in the estimator's engine, alone, and in a loop over tensors on the device."""
    from spark_elastic.data.dataset import pack
    from spark_elastic.data.store import Store
    from spark_elastic.ml.torch.spec import TorchTraining
    from spark_elastic.ml.torch.train import train

    torch.manual_seed(0)
    table = kind == "table"
    x = torch.randn(rows, 20) if table else torch.randint(0, 256, (rows, 3, 32, 32), dtype=torch.uint8)
    y, make, size = torch.randint(0, 2, (rows,)), table_net if table else picture_net, 1024 if table else 512
    adam = partial(torch.optim.Adam, lr=1e-3)
    dataset = pack({"features_0": x.numpy(), "label_0": y.numpy()}, folder / "data", shards=4)
    store = Store.create(folder / "run")
    loss, metrics = nn.CrossEntropyLoss(), {"accuracy": lambda output, label: (output.argmax(1) == label).float()}
    training = TorchTraining(
        dataset=dataset, store=store, model=make(), optimizer=adam, loss=loss, metrics=metrics if table else {},
        batch_size=size, epochs=4, device=device, verbose=0,
    )  # fmt: skip
    ours = min(row["seconds"] for row in train(training).history)
    net, x, y = make().to(device), x.to(device), y.to(device)
    optimizer, times = adam(net.parameters()), []
    for _ in range(4):
        began = time.perf_counter()
        order = torch.randperm(rows, device=device)
        for chosen in order.split(size):
            optimizer.zero_grad()
            loss(net(x[chosen]), y[chosen]).backward()
            optimizer.step()
        if device == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - began)
    return {"ours": round(ours, 3), "tensors there": round(min(times), 3), "speed": round(min(times) / ours, 3)}


def step_times(workers: int, claims: bool, quick: bool, folder: Path) -> dict[str, Any]:
    import spark_elastic
    from tests.gpu import one_card

    names = ["0.7M"] if quick else [name for name in MODELS if workers == 1 or name != "100M"]
    models = {name: MODELS[name] for name in names}
    options = one_card.options(workers)
    return spark_elastic.run(measure, (str(folder), models, 2 if quick else 8, claims), **options)[0]


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
    quick, device = arguments.quick, arguments.device
    experiments: dict[str, Callable[[Path], dict[str, Any]]] = {
        "step, one worker": partial(step_times, 1, True, quick),
        "step, two, NCCL": partial(step_times, 2, True, quick),
        "step, two, host memory": partial(step_times, 2, False, quick),
        "a kill and a join": partial(recovery, 3, 256),
        "undisturbed": partial(undisturbed, 30 if quick else 1000),
        "epoch of a table": partial(epochs, "table", 4096 if quick else 400_000, device),
        "epoch of images": partial(epochs, "images", 32 if quick else 40_000, device),
        "the same with 1 GB": partial(recovery, 2, 512 if quick else 9000),
    }
    found: dict[str, Any] = {"machine": facts(device)}
    signal.signal(signal.SIGALRM, _too_long)
    arguments.results.parent.mkdir(parents=True, exist_ok=True)
    for name, experiment in experiments.items():
        signal.alarm(LIMIT_S)  # one that hangs must not cost the others their time on the GPU
        began = time.monotonic()
        with tempfile.TemporaryDirectory() as folder:
            try:
                found[name] = experiment(Path(folder))
            except Exception as error:
                found[name] = {"error": f"{type(error).__name__}: {error}"[:1000]}
            signal.alarm(0)
        print(f"{name} ({time.monotonic() - began:.0f} s): {json.dumps(found[name])}", flush=True)
        arguments.results.write_text(json.dumps(found, indent=1) + "\n")


def _too_long(*_: Any) -> None:
    raise TimeoutError(f"not done after {LIMIT_S} s")


if __name__ == "__main__":
    main()
