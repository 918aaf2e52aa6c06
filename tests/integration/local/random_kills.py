"""One seeded training whose workers may be killed at any moment, and what it has to come to.

Weights are whole numbers that do not depend on how many workers there are, so the end is equal to the last bit.
"""

from __future__ import annotations

import hashlib
import random
import time
from dataclasses import dataclass
from pathlib import Path

EPOCHS, BATCHES, WIDTH = 6, 40, 5


@dataclass(frozen=True)
class Loop:
    """How a user might have written it."""

    commit_every: int
    checks: bool
    """Checks for updated hosts after each step that does not commit."""
    counts: str
    """ "before" or "after" the step."""
    passes: int
    average: str
    """How a running average of the weights is kept by hand: "after" or "before" the step, or "data": after it, past
    autograd's knowledge."""
    commits_epochs: bool
    skips: bool
    """Every few batches all skip the step and change their loss scale."""


def loop_of(seed: int) -> Loop:
    rng = random.Random(seed)
    return Loop(
        commit_every=rng.choice([1, 3, 7, 20]),
        checks=rng.random() < 0.5,
        counts=rng.choice(["before", "after"]),
        passes=rng.choice([1, 2]),
        average=rng.choice(["after", "before", "data"]),
        commits_epochs=rng.random() < 0.7,
        skips=rng.random() < 0.5,
    )


class Scale:
    def __init__(self) -> None:
        self.scale = 1.0

    def state_dict(self):
        return {"scale": self.scale}

    def load_state_dict(self, values):
        self.scale = values["scale"]


def train(seed: int, folder: str | None, pause_s: float, *, epochs: int | None = EPOCHS):
    """Run the loop of this seed; return what it has come to, with the number of epochs after the digest. Each step
    takes `pause_s` more, and is noted in the diary in `folder`. No `epochs`: until the file `finish` is in the folder.
    """
    import torch

    import spark_elastic.torch as hvd
    from spark_elastic.collective.process import process
    from tests.integration.spark.training import Notes

    hvd.init()
    how = loop_of(seed)
    note = Notes(folder) if folder is not None else None
    if note is not None:
        note("up")

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(WIDTH, 1, bias=False, dtype=torch.float64)
            torch.nn.init.zeros_(self.layer.weight)
            self.register_buffer("seen", torch.zeros(1))

        def forward(self, rows: torch.Tensor) -> torch.Tensor:
            self.seen += hvd.rank() + 1  # like running means: every worker's own
            return self.layer(rows).sum()

    model, average, scale = Model(), Model(), Scale()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.5)
    optimizer = hvd.DistributedOptimizer(
        optimizer, named_parameters=model.named_parameters(), op=hvd.Sum, backward_passes_per_step=how.passes
    )
    schedule: torch.optim.lr_scheduler.LRScheduler
    if epochs == EPOCHS:
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5)
    else:  # the rate of a long training must not vanish
        schedule = torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(optimizer, 4)
    state = hvd.elastic.TorchState(
        model, optimizer, average=average, schedule=schedule, scale=scale, batch=0, epoch=0, total=0.0, log=[], note=-1
    )

    def tensors():
        momentum = [s["momentum_buffer"] for s in optimizer.state.values() if s.get("momentum_buffer") is not None]
        return [model.layer.weight, average.layer.weight, *momentum]

    def outcome(everything: bool):
        digest = hashlib.sha256()
        for tensor in [*tensors(), *([model.seen] if everything else [])]:
            digest.update(tensor.detach().numpy().tobytes())
        lr = optimizer.param_groups[0]["lr"]
        plain = state.batch, state.epoch, state.total, state.log, state.note, scale.scale, lr, schedule.last_epoch
        return digest.hexdigest(), *plain, (str(state.version) if everything else "")

    def follow_average() -> None:
        weight, own = model.layer.weight, average.layer.weight
        if how.average == "data":
            own.data.mul_(0.5).add_(weight.data, alpha=0.5)
        else:
            with torch.no_grad():
                own.mul_(0.5).add_(weight, alpha=0.5)

    def one_batch() -> None:
        if how.counts == "before":
            state.batch += 1
            state.total += 0.1 * state.batch
            state.log.append(state.batch)
        number = state.batch if how.counts == "before" else state.batch + 1
        skipped = how.skips and number % 13 == 7
        if skipped:
            overflow = hvd.allreduce(torch.ones(1), op=hvd.Sum)
            assert overflow.item() == hvd.size()
            scale.scale = 1.5 - scale.scale
        else:
            if how.average == "before":
                follow_average()
            for part in range(how.passes):
                mine = float(number + part) * scale.scale if hvd.rank() == 0 else 0.0
                model(torch.full((1, WIDTH), mine, dtype=torch.float64)).backward()
                if how.checks and part + 1 < how.passes:
                    state.check_host_updates()  # nothing can be resumed here
            optimizer.step()
            if note is not None:
                round = process.assignment.world.round
                step = state.epoch * BATCHES + number
                note("applied", step=step, epoch=state.epoch, round=round, rank=hvd.rank(), size=hvd.size())
            optimizer.zero_grad()
            if how.average != "before":
                follow_average()
        if number % 11 == 3:
            hvd.allreduce(torch.ones(1), name="between the step and its count")
        if how.counts == "after":
            state.batch += 1
            state.total += 0.1 * state.batch
            state.log.append(number)
        if number % how.commit_every == 0:
            state.commit()
        elif how.checks:
            state.check_host_updates()

    def over() -> bool:
        if epochs is not None:
            return state.epoch >= epochs
        told = float(state.batch == 0 and Path(folder, "finish").exists())
        return hvd.allreduce(torch.tensor([told]), op=hvd.Max).item() > 0

    @hvd.elastic.run
    def loop(state) -> None:
        if folder is not None:
            states = hvd.allgather_object(outcome(everything=True))
            if len(set(map(str, states))) > 1:
                Path(folder, f"diverged-{process.assignment.world.round}").write_text("\n".join(map(str, states)))
                raise AssertionError(f"seed {seed}, {how}: the states differ: {states}")
        while not over():
            while state.batch < BATCHES:
                one_batch()
                time.sleep(pause_s)
                if state.batch == BATCHES // 2:
                    state.note = hvd.broadcast_object(1000 * state.epoch + 1, root_rank=0)
            state.note = hvd.broadcast_object(1000 * state.epoch + 2, root_rank=0)
            schedule.step()
            state.epoch += 1
            state.batch = 0
            state.total += sum(state.log)
            state.log.clear()
            if how.commits_epochs:
                state.commit()

    loop(state)
    return outcome(everything=False)
