"""A real training that writes a diary of all it does, and that can be held at chosen points for tests to kill it there.

Each worker appends JSON lines to `folder/PID.diary`, each with one write, so that a SIGKILL tears none. `diary.py`
reads them. A test holds a worker at a point by creating `folder/hold-POINT-WHO`, where WHO is a rank or "any"; see
`Points`.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from pathlib import Path
from typing import Any

ROWS = 60
BATCH = 4
FEATURES = 8
STEP_S = 0.02
"""What a step takes besides: at full speed the trainers would keep those who are starting from the processor."""
_RELEASE_POLL_S = 0.005


class Points:
    """Where a worker can be held: before its init, in the set-up of a world's connections, in the sync, and so on."""

    def __init__(self, folder: str) -> None:
        self._folder = Path(folder)

    def __call__(self, point: str, rank: int | None = None) -> None:
        """Stop here while a test wants that: the first worker that comes claims the hold by renaming its file."""
        for who in ("any", str(rank)):
            held = self._folder / f"held-{point}-{who}-{os.getpid()}"
            try:
                os.rename(self._folder / f"hold-{point}-{who}", held)
            except FileNotFoundError:
                continue
            while held.exists():
                time.sleep(_RELEASE_POLL_S)


class Notes:
    """The writing end of the diary."""

    def __init__(self, folder: str) -> None:
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT
        self._file = os.open(Path(folder, f"{os.getpid()}.diary"), flags, 0o666)

    def __call__(self, what: str, **more: Any) -> None:
        entry = {"what": what, "pid": os.getpid(), "agent": os.getppid(), "at": time.monotonic(), **more}
        os.write(self._file, (json.dumps(entry) + "\n").encode())


def train(folder: str, ballast: int = 0, commit_every: int = 1, loader_workers: int = 0) -> dict[str, Any]:
    """Train a small network, epoch by epoch, until `folder/finish` is there at the beginning of an epoch.

    `ballast`: more floats in the state, so that a sync takes its time. `commit_every`: steps between commits, 0: an
    epoch.
    """
    import torch
    from torch.utils.data import DataLoader, TensorDataset

    import spark_elastic.elastic.handlers as elastic_handlers
    import spark_elastic.torch as hvd
    from spark_elastic.collective.gloo.process_group import GlooCollectives
    from spark_elastic.collective.process import process

    at, note = Points(folder), Notes(folder)
    note("up")
    _hold_at_calls(at, GlooCollectives, "connect", "rendezvous")
    _hold_at_calls(at, elastic_handlers, "take_over", "sync", lambda: hvd.rank())
    at("init")
    hvd.init()
    at("initialised", hvd.rank())
    note("initialised", rank=hvd.rank(), size=hvd.size(), local_rank=hvd.local_rank(), local_size=hvd.local_size())

    torch.manual_seed(os.getpid())  # each starts from other parameters: only a sync can make them equal
    model = torch.nn.Sequential(torch.nn.Linear(FEATURES, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))
    model.register_buffer("ballast", torch.zeros(ballast))
    fixed = torch.Generator().manual_seed(1)
    inputs = torch.randn(ROWS, FEATURES, generator=fixed)
    targets = inputs.sum(dim=1, keepdim=True).sin()
    dataset = TensorDataset(inputs, targets, torch.arange(ROWS))
    sampler = hvd.elastic.ElasticSampler(dataset)
    loader = DataLoader(dataset, batch_size=BATCH, sampler=sampler, num_workers=loader_workers)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    state = hvd.elastic.TorchState(model=model, optimizer=optimizer, sampler=sampler, epoch=0, step=0)
    state.register_reset_callbacks([lambda: note("reset", rank=hvd.rank(), size=hvd.size())])
    finish = Path(folder, "finish")

    def digest() -> str:
        sums = hashlib.sha1()
        for parameter in model.parameters():
            sums.update(parameter.detach().numpy().tobytes())
            momentum = optimizer.state.get(parameter, {}).get("momentum_buffer")
            sums.update(b"none" if momentum is None else momentum.numpy().tobytes())
        return sums.hexdigest()[:12]

    def place() -> dict[str, int]:
        round = process.assignment.world.round if process.assignment is not None else 0
        return {"round": round, "rank": hvd.rank(), "size": hvd.size()}

    @hvd.elastic.run
    def loop(state: Any) -> None:
        while True:
            if sampler.processed_num == 0:
                told = torch.tensor([float(finish.exists())])
                if float(hvd.allreduce(told, op=hvd.Max)) > 0:
                    return
            for number, (x, y, rows) in enumerate(loader):
                time.sleep(STEP_S)
                note("tries", step=state.step + 1, epoch=state.epoch, rows=rows.tolist(), before=digest(), **place())
                at("step", hvd.rank())
                optimizer.zero_grad()
                torch.nn.functional.mse_loss(model(x), y).backward()
                at("backward", hvd.rank())
                optimizer.step()
                sampler.record_batch(number, BATCH)
                state.step += 1
                note("applied", step=state.step, epoch=state.epoch, after=digest(), **place())
                at("applied", hvd.rank())
                if commit_every and state.step % commit_every == 0:
                    state.commit()
                else:
                    state.check_host_updates()
            state.epoch += 1
            sampler.set_epoch(state.epoch)
            state.commit()

    at("loop", hvd.rank())
    loop(state)
    at("end", hvd.rank())
    note("end", step=state.step, **place())
    return {**place(), "pid": os.getpid(), "step": state.step, "epoch": state.epoch, "digest": digest()}


def _hold_at_calls(at: Points, owner: Any, name: str, point: str, rank: Any = lambda: None) -> None:
    inner = getattr(owner, name)

    def held(*args: Any, **kwargs: Any) -> Any:
        at(point, rank())
        return inner(*args, **kwargs)

    setattr(owner, name, held)
