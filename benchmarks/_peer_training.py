"""The training that every contender of `peers.py` does: one model, one batch, one line for each step that was done.

A line is `world size, rank, step, monotonic time` in a file for each process. The clock is one for all processes of a
machine, so what a fault costs is read from the lines alone, in the same way for all.
"""

from __future__ import annotations

import itertools
import os
import time
from pathlib import Path
from typing import Any

WIDTHS = (784, 512, 512, 10)
BATCH = 64
CHECKPOINT_EVERY = 50
"""Steps between two checkpoints of those that go on from files."""
COMMIT_EVERY = 10
"""Steps between two `state.commit()`, as in Horovod's own example."""


class StepFile:
    def __init__(self, folder: str) -> None:
        self._file = os.open(Path(folder, f"{os.getpid()}.steps"), os.O_WRONLY | os.O_APPEND | os.O_CREAT)

    def write(self, size: int, rank: int, step: int) -> None:
        os.write(self._file, f"{size} {rank} {step} {time.monotonic():.6f}\n".encode())


def parts() -> tuple[Any, Any, Any, Any]:
    """Model, optimizer, inputs, labels; one thread a process, as torchrun sets it."""
    import torch

    torch.set_num_threads(1)
    torch.manual_seed(1)
    layers = [part for a, b in itertools.pairwise(WIDTHS) for part in (torch.nn.Linear(a, b), torch.nn.ReLU())]
    model = torch.nn.Sequential(*layers[:-1])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    return model, optimizer, torch.randn(BATCH, WIDTHS[0]), torch.randint(0, WIDTHS[-1], (BATCH,))


def gradients(model: Any, optimizer: Any, inputs: Any, labels: Any) -> None:
    import torch

    optimizer.zero_grad()
    torch.nn.functional.cross_entropy(model(inputs), labels).backward()


def train_elastically(hvd: Any, folder: str) -> None:
    """The loop for Horovod and for spark_elastic: only the module that is handed in differs."""
    hvd.init()
    model, optimizer, inputs, labels = parts()
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    state = hvd.elastic.TorchState(model=model, optimizer=optimizer, step=0)
    steps = StepFile(folder)

    @hvd.elastic.run
    def loop(state: Any) -> None:
        while True:
            gradients(model, optimizer, inputs, labels)
            optimizer.step()
            state.step += 1
            steps.write(hvd.size(), hvd.rank(), state.step)
            if state.step % COMMIT_EVERY == 0:
                state.commit()

    loop(state)


def train_with_spark_elastic(folder: str) -> None:
    import spark_elastic.torch as hvd

    train_elastically(hvd, folder)


def train_with_files(folder: str) -> None:
    """The loop for torchrun and TorchDistributor: DistributedDataParallel, and a checkpoint every few steps."""
    Path(folder, f"{os.getpid()}.begun").write_text(str(time.monotonic()))
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    dist.init_process_group("gloo")
    model, optimizer, inputs, labels = parts()
    checkpoint = Path(folder, "checkpoint.pt")
    step = 0
    if checkpoint.exists():
        found = torch.load(checkpoint)
        model.load_state_dict(found["model"])
        optimizer.load_state_dict(found["optimizer"])
        step = found["step"]
    ddp = DistributedDataParallel(model)
    steps = StepFile(folder)
    while True:
        gradients(ddp, optimizer, inputs, labels)
        optimizer.step()
        step += 1
        steps.write(dist.get_world_size(), dist.get_rank(), step)
        if step % CHECKPOINT_EVERY == 0 and dist.get_rank() == 0:
            written = checkpoint.with_suffix(".new")
            torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}, written)
            written.replace(checkpoint)
