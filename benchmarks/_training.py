"""The training that the recovery benchmarks disturb, and a reader for what its workers wrote down.

Each worker appends a line for every optimizer step: round, step, monotonic time (one clock for all processes of a
machine). What the survivors did, and when, is read from there and not from the driver's own account.
"""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any


def train(folder: str, hidden: int) -> None:
    """Train a 784-hidden-10 MLP until the job is cancelled."""
    import torch

    import spark_elastic.torch as hvd
    from spark_elastic.collective.process import process

    hvd.init()
    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(784, hidden), torch.nn.ReLU(), torch.nn.Linear(hidden, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    state = hvd.elastic.TorchState(model=model, optimizer=optimizer, step=0)
    data, target = torch.randn(64, 784), torch.randint(0, 10, (64,))
    log = os.open(Path(folder, f"{os.getpid()}.steps"), os.O_WRONLY | os.O_APPEND | os.O_CREAT)

    @hvd.elastic.run
    def loop(state: Any) -> None:
        while True:
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(model(data), target).backward()
            optimizer.step()
            state.step += 1
            line = f"{process.assignment.world.round} {hvd.rank()} {state.step} {time.monotonic():.6f}\n"
            os.write(log, line.encode())
            state.check_host_updates()

    loop(state)


def train_keras(folder: str, hidden: int) -> None:
    """The same in one call of `model.fit`, with TensorFlow."""
    import keras
    import numpy as np

    import spark_elastic.keras as hvd
    from spark_elastic.collective.process import process

    hvd.init()
    keras.utils.set_random_seed(1)
    layers = [keras.layers.Input((784,)), keras.layers.Dense(hidden, "relu"), keras.layers.Dense(10)]
    model = keras.Sequential(layers)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.01, momentum=0.9)), loss, metrics=["accuracy"])
    state = hvd.elastic.KerasState(model, batch=0, epoch=0)
    generator = np.random.default_rng(1)
    data, target = generator.normal(size=(6400, 784)).astype("float32"), generator.integers(0, 10, 6400)
    dataset = hvd.elastic.ElasticDataset(data, target, state=state, batch_size=64)
    log = os.open(Path(folder, f"{os.getpid()}.steps"), os.O_WRONLY | os.O_APPEND | os.O_CREAT)

    class Writes(keras.callbacks.Callback):  # type: ignore[misc]
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            assert process.assignment is not None
            step = int(model.optimizer.iterations)
            line = f"{process.assignment.world.round} {hvd.rank()} {step} {time.monotonic():.6f}\n"
            os.write(log, line.encode())

    @hvd.elastic.run
    def loop(state: Any) -> None:
        callbacks = [Writes(), hvd.elastic.ElasticCallback(state)]
        model.fit(dataset, initial_epoch=state.epoch, epochs=1_000_000, verbose=0, callbacks=callbacks)

    loop(state)


@dataclass(frozen=True)
class Step:
    pid: int
    round: int
    rank: int
    step: int
    at: float


class StepLog:
    """Reads the workers' lines as they come."""

    def __init__(self, folder: Path, job: Any) -> None:
        self._folder = folder
        self._job = job
        self._offsets: dict[Path, int] = {}
        self.steps: dict[int, list[Step]] = {}
        """By pid, in order."""

    def read(self) -> None:
        for path in self._folder.glob("*.steps"):
            with path.open("rb") as file:
                file.seek(self._offsets.get(path, 0))
                data = file.read()
            whole = data[: data.rfind(b"\n") + 1]
            self._offsets[path] = self._offsets.get(path, 0) + len(whole)
            pid = int(path.stem)
            for line in whole.decode().splitlines():
                round, rank, step, at = line.split()
                self.steps.setdefault(pid, []).append(Step(pid, int(round), int(rank), int(step), float(at)))

    def newest(self, alive: Iterable[int] | None = None) -> dict[int, Step]:
        """The last step of each worker (of those with a pid in `alive`)."""
        return {pid: steps[-1] for pid, steps in self.steps.items() if alive is None or pid in alive}

    def wait(self, condition: Callable[[StepLog], Any], timeout_s: float, what: str) -> Any:
        """Read until the condition gives something true, and return that."""
        until = time.monotonic() + timeout_s
        while True:
            self.read()
            if found := condition(self):
                return found
            if self._job.done():
                raise RuntimeError(f"the job ended: {self._job.result()}")
            if time.monotonic() > until:
                raise TimeoutError(f"{what}: not within {timeout_s} s; newest: {self.newest()}")
            time.sleep(0.002)

    def wait_for_world(self, size: int, after_round: int, timeout_s: float = 60.0) -> dict[int, Step]:
        """Wait until `size` living workers step in one round newer than `after_round`; their newest steps by pid."""

        def together(log: StepLog) -> dict[int, Step] | None:
            newest = log.newest(alive=[pid for pid in log.steps if is_alive(pid)])
            if not newest:
                return None
            round = max(step.round for step in newest.values())
            members = {pid: step for pid, step in newest.items() if step.round == round}
            return members if round > after_round and len(members) == size else None

        found: dict[int, Step] = self.wait(together, timeout_s, f"{size} workers in a round after {after_round}")
        return found

    def first_step(self, pid: int, round: int) -> Step | None:
        """The first step that the worker did in this round or a later one."""
        return next((step for step in self.steps.get(pid, ()) if step.round >= round), None)

    def last_step_before(self, pid: int, round: int) -> Step | None:
        """The last step that the worker did before this round."""
        return next((step for step in reversed(self.steps.get(pid, ())) if step.round < round), None)

    def lost_steps(self) -> int:
        """Steps that a worker had applied and then did again."""
        lost = 0
        for steps in self.steps.values():
            lost += sum(max(0, a.step + 1 - b.step) for a, b in itertools.pairwise(steps))
        return lost


def is_alive(pid: int) -> bool:
    """Whether the process runs (a zombie does not)."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False
