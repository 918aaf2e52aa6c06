"""Worlds of several workers on one GPU, which NCCL takes for one each; on CPUs with SPARK_ELASTIC_GPU_CHECK=cpu.

NCCL refuses two ranks on one GPU of a host, and this package asks for a GPU each. So each process claims a host
(`NCCL_HOSTID`) and a GPU of its own, and NCCL connects them over loopback. They share the card in slices of time:
compare times with one another, not with those of real worlds.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

import spark_elastic
import spark_elastic.torch as hvd
from spark_elastic.collective.gpu import nccl
from spark_elastic.collective.process import process

DEVICE = os.environ.get("SPARK_ELASTIC_GPU_CHECK", "cuda")
ON_GPU = DEVICE == "cuda"
ENV = {"CUDA_VISIBLE_DEVICES": "0" if ON_GPU else "", "NCCL_SOCKET_IFNAME": "lo", "NCCL_IB_DISABLE": "1"}
FEATURES, WIDTH, BATCH = 64, 256, 24


def claim_a_gpu() -> None:
    """Let NCCL, and the choice of NCCL, take this process for one with a host and a GPU of its own."""
    os.environ["NCCL_HOSTID"] = f"process {os.getpid()}"
    member_device = nccl.member_device
    nccl.member_device = lambda device: member_device(device)._replace(uuid=str(os.getpid()))


def time_connecting(folder: str) -> None:
    """Append a line "round seconds" to a file of this process whenever it connects to others by NCCL."""
    connect = nccl.NcclReductions.connect

    def timed(way: Any, device: torch.device) -> None:
        began = time.monotonic()
        connect(way, device)
        with (Path(folder) / f"{os.getpid()}.connects").open("a") as file:
            file.write(f"{way._owner.round} {time.monotonic() - began:.6f}\n")

    nccl.NcclReductions.connect = timed  # type: ignore[method-assign]


def synchronize() -> None:
    if ON_GPU:
        torch.cuda.synchronize()


def used_nccl() -> bool:
    group = process.group()
    return group is not None and group.nccl is not None and group.nccl.used


class StepLog:
    """The steps of one worker, as lines "round rank size step time" of a file that is named by its process."""

    def __init__(self, folder: str) -> None:
        self._file = os.open(Path(folder) / f"{os.getpid()}.steps", os.O_WRONLY | os.O_APPEND | os.O_CREAT)

    def add(self, step: int) -> None:
        assert process.assignment is not None
        line = f"{process.assignment.world.round} {hvd.rank()} {hvd.size()} {step} {time.monotonic():.6f}\n"
        os.write(self._file, line.encode())


def steps_in(folder: Path) -> dict[int, list[tuple[float, ...]]]:
    """Return the lines of each `StepLog`, by process."""
    logs = folder.glob("*.steps")
    return {int(log.stem): [tuple(map(float, each.split())) for each in log.read_text().splitlines()] for log in logs}


def train(
    folder: str,
    steps: int,
    at_step: Callable[[int, int], None] = lambda rank, step: None,
    in_backward: Callable[[int, int], None] = lambda rank, step: None,
    waits_for: int = 0,
    half: bool = False,
    until: str = "",
    width: int = WIDTH,
) -> dict[str, Any]:
    """Train in a worker; the rank of the functions is that in this worker's first world.

    The last step is repeated until there are as many workers as `waits_for`. `half`: with a GradScaler. `until`: the
    path of a file that ends the training.
    """
    if ON_GPU:
        claim_a_gpu()
        time_connecting(folder)
    hvd.init()
    device, first_rank = hvd.device(), hvd.rank()
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(FEATURES, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 1))
    net.to(device)
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-3)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=net.named_parameters())
    scaler = torch.amp.GradScaler(device.type, enabled=half)
    state = hvd.elastic.TorchState(net, optimizer, step=0, scaler=scaler)
    net[2].register_full_backward_hook(lambda *_: in_backward(first_rank, state.step))
    log, patience = StepLog(folder), time.monotonic() + 90

    def enough() -> bool:
        return bool(until) and hvd.allreduce(torch.tensor([float(Path(until).exists())]), op=hvd.Sum).item() > 0

    @hvd.elastic.run
    def loop(state: Any) -> None:
        while state.step < steps and not enough():
            at_step(first_rank, state.step)
            generator = torch.Generator().manual_seed(state.step)
            x = torch.randn(BATCH, FEATURES, generator=generator)[hvd.rank() :: hvd.size()].to(device)
            optimizer.zero_grad()
            with torch.autocast(device.type, torch.float16 if ON_GPU else torch.bfloat16, enabled=half):
                loss = (net(x).float() - x.sum(1, keepdim=True)).square().mean()
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(net.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            synchronize()
            log.add(state.step)
            if state.step < steps - 1 or hvd.size() >= waits_for or time.monotonic() > patience:
                state.step += 1
            state.check_host_updates()

    loop(state)
    weights = [float(param.detach().double().sum()) for param in net.parameters()]
    return {
        "size": hvd.size(),
        "nccl": used_nccl(),
        "weights": weights,
        "device": str(device),
        "scale": scaler.get_scale(),
    }


def options(workers: int) -> dict[str, Any]:
    """Return the keyword arguments of `run` for so many workers on the card, which may be killed at any time."""
    return {
        "num_proc": workers,
        "min_num_proc": 1,
        "launcher": spark_elastic.LocalLauncher(),
        "device": DEVICE,
        "env": ENV,
        "verbose": 0,
        "cooldown_range": None,
        "crash_limit": None,
    }


def run(workers: int, folder: Path, steps: int, **more: Any) -> list[dict[str, Any]]:
    return spark_elastic.run(train, (str(folder), steps), more, **options(workers))


def kill_at_random(
    folder: Path, kills: int, job: Any, choose: Callable[[list[int]], int], within_s: float
) -> list[tuple[int, float]]:
    """Kill workers, each once there are two or more that train together; return the round and time of each kill."""
    killed: dict[int, tuple[int, float]] = {}
    until = time.monotonic() + within_s
    while len(killed) < kills and not job.done() and time.monotonic() < until:
        newest = {pid: lines[-1] for pid, lines in steps_in(folder).items() if lines and pid not in killed}
        rounds = max((line[0] for line in newest.values()), default=0.0)
        together = [pid for pid, line in newest.items() if line[0] == rounds and line[2] > 1]
        if len(together) > 1 and rounds > max((number for number, _ in killed.values()), default=0):
            victim = choose(together)
            killed[victim] = int(rounds), time.monotonic()
            os.kill(victim, signal.SIGKILL)
        threading.Event().wait(0.05)
    return list(killed.values())


def recoveries_ms(folder: Path, kills: list[tuple[int, float]]) -> list[float]:
    """Return the milliseconds from each kill to the first step in the next world."""
    lines = [line for each in steps_in(folder).values() for line in each]
    return [1e3 * (min(line[4] for line in lines if line[0] > number) - then) for number, then in kills]
