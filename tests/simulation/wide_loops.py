"""Compare more kinds of users' loops with undisturbed runs, in one process whose collectives fail at random.

    python -m tests.simulation.wide_loops FIRST LAST

Prints the first of these seeds whose loop ended differently, if there is one. The loops have two optimizers, closures,
gradient scalers and clipping, gradients applied by hand, lists and dictionaries, metrics, samplers, schedules, averages
and target networks, buffers that a forward pass makes, and optimizers with values of their own. Checks for updated
hosts fail at random as well, or leave the loop as for a newcomer.

Only rank 0 contributes gradients, so the final tensors are those of one process, to the last bit, for any number of
ranks (with a sampler rank 0 sees other rows). `tests/unit/torch/test_random_loops.py` runs these loops on several.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from tests.simulation.user_loops import RATE, failing, search

EPOCHS, BATCHES, ROWS = 3, 12, 4
KINDS = [
    *("plain", "two optimizers", "closure", "closure twice", "by hand"),
    # the names with "synchronized" are Horovod's way, the others DistributedDataParallel's
    *("scaler", "scaler synchronized", "clip", "clip synchronized", "scaled"),
    *("freezing", "checkpoint", "reentrant checkpoint", "several backwards"),
]


@dataclass(frozen=True)
class Loop:
    kind: str
    commit_every: int
    checks: bool
    counts: str
    """ "before" or "after" the step, as for the next two fields."""
    dictionary: str
    metric: str
    schedule: str
    sampler: str
    drop_last: bool
    average: str
    skipped: int
    """Number of batches at the beginning of an epoch that make no step."""
    validates_every: int
    commits_epochs: bool
    passes: int
    optimizer: str
    """An optimizer of the user's own; "": one of torch."""
    buffers: bool
    """The last layer of each model is a `Remembering`."""


def loop_of(seed: int) -> Loop:
    rng = random.Random(seed)
    commit_every, checks = rng.choice([1, 1, 3, 7, 0]), rng.random() < 0.4
    loop = Loop(
        kind=rng.choice(KINDS),
        commit_every=commit_every,
        checks=checks,
        counts=rng.choice(["before", "after"]),
        dictionary=rng.choice(["before", "after"]),
        metric=rng.choice(["before", "after"]),
        schedule=rng.choice(["", "batch", "epoch", "plateau"]),
        sampler=rng.choice(["", "before", "after"]),
        drop_last=rng.random() < 0.5,
        average=rng.choice(["", "before", "after", "target"]),
        skipped=rng.choice([0, 2]),
        validates_every=rng.choice([0, 5]),
        commits_epochs=rng.random() < 0.6,
        passes=rng.choice([1, 2]),
        optimizer="",
        buffers=False,
    )
    optimizer, buffers = rng.choice(["", "", "lookahead", "sharpness", "signs"]), rng.random() < 0.4
    kind = "closure" if optimizer == "sharpness" else loop.kind
    return replace(loop, kind=kind, optimizer="" if kind == "closure twice" else optimizer, buffers=buffers)


class Metric:
    def __init__(self) -> None:
        self.count, self.sums, self.by_kind = 0, [0.0], {"odd": 0, "even": 0}

    def add(self) -> None:
        self.count += 1
        self.sums[0] += 0.5
        self.by_kind["odd"] += 1

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count, "sums": self.sums, "by_kind": self.by_kind}

    def load_state_dict(self, values: dict[str, Any]) -> None:
        self.count, self.sums, self.by_kind = values["count"], list(values["sums"]), dict(values["by_kind"])


def twice(kind: type) -> type:
    """Return a subclass of an optimizer that makes two steps in one, with an evaluation of the closure for each."""

    class Twice(kind):  # type: ignore[misc]
        def step(self, closure: Any = None) -> Any:
            super().step(closure)
            return super().step(closure)

    return Twice


def train(seed: int, observe: Callable[[Callable[[], str]], Callable[[], None]] | None = None) -> dict[str, Any]:
    """Run the loop of this seed, and return its final values by kind. `observe` gets a function that returns a digest
    of the whole state, and returns one to call whenever the loop's function begins.
    """
    import torch
    from torch.utils._pytree import tree_leaves
    from torch.utils.checkpoint import checkpoint

    import spark_elastic.torch as hvd
    from tests.simulation.hidden_values import Average, Lookahead, Remembering, Sharpness, Signs

    hvd.init()
    how = loop_of(seed)
    entered = None
    torch.manual_seed(seed)
    x = torch.randn(BATCHES * ROWS + 2, 6)
    y = x.sum(1, keepdim=True)
    middle = random.Random(seed + 1).choice([torch.nn.Tanh, lambda: torch.nn.BatchNorm1d(4)])
    if how.sampler:  # a batch may have a single row
        middle = torch.nn.Tanh

    def build() -> torch.nn.Module:
        last = Remembering(4, 2 * ROWS + 1) if how.buffers else torch.nn.Linear(4, 1)
        return torch.nn.Sequential(torch.nn.Linear(6, 4), middle(), last)

    model, second, average = build(), build(), build()
    average.load_state_dict(model.state_dict())
    passes = how.passes if how.kind in ("plain", "clip", "clip synchronized", "freezing", "scaled") else 1
    adam = random.Random(seed + 2).random() < 0.5

    def optimizer_of(module: torch.nn.Module) -> Any:
        kind = torch.optim.Adam if adam else torch.optim.SGD
        kind = twice(kind) if how.kind == "closure twice" else kind
        plain = kind(module.parameters(), lr=0.02, **({} if adam else {"momentum": 0.9}))
        if how.optimizer == "signs":
            plain = Signs(module.parameters(), lr=0.02)
        elif how.optimizer:
            plain = (Lookahead if how.optimizer == "lookahead" else Sharpness)(plain)
        return hvd.DistributedOptimizer(plain, backward_passes_per_step=passes, op=hvd.Sum)

    optimizer, other = optimizer_of(model), optimizer_of(second)
    plateau = how.schedule == "plateau"
    schedule: Any = torch.optim.lr_scheduler.StepLR(optimizer, 5, gamma=0.9)
    if plateau:
        schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
    metric, mean, scaler = Metric(), Average(), torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=3)
    rows = torch.utils.data.TensorDataset(x, y)
    sampler = hvd.elastic.ElasticSampler(rows)
    loader = torch.utils.data.DataLoader(rows, batch_size=ROWS, sampler=sampler, drop_last=how.drop_last)
    more = {"schedule": schedule, "scaler": scaler, "metric": metric, "mean": mean}
    more.update(sampler=sampler, average=average)
    if how.kind == "two optimizers":
        more.update(second=second, other=other)
    counts = {"batches": 0, "by_kind": {"odd": 0}, "list": []}
    state = hvd.elastic.TorchState(model, optimizer, batch=0, epoch=0, seen=0, log=[], best=1e9, counts=counts, **more)

    def loss_of(module: torch.nn.Module, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        if how.kind.endswith("checkpoint") and module is model:
            hidden = module[0](inputs)
            reentrant = how.kind.startswith("reentrant")
            output = checkpoint(lambda rows: module[2](module[1](rows)), hidden, use_reentrant=reentrant)
        else:
            output = module(inputs)
        return torch.nn.functional.mse_loss(output, targets) * float(hvd.rank() == 0)

    def follow(share: float) -> None:
        with torch.no_grad():
            for own, new in zip(average.parameters(), model.parameters(), strict=True):
                own.lerp_(new, share)

    def count(when: str, number: int) -> None:
        if how.counts == when:
            state.seen += 1
            state.log.append(state.seen)
        if how.dictionary == when:
            state.counts["batches"] += 1
            state.counts["by_kind"]["odd"] += 2
            state.counts["list"].append(1)
        if how.metric == when:
            metric.add()
            mean.update(torch.tensor(float(state.seen)))
            state.log.append(mean.compute().item())
        if how.sampler == when:
            sampler.record_batch(number, ROWS)

    def step(inputs: torch.Tensor, targets: torch.Tensor, number: int) -> None:
        optimizer.zero_grad()
        if how.average == "before":
            follow(0.1)
        if how.kind == "by hand":
            for param in model.parameters():
                (grad,) = torch.autograd.grad(loss_of(model, inputs, targets), param)
                reduced = hvd.allreduce(grad, op=hvd.Sum)
                with torch.no_grad():
                    param.sub_(0.02 * reduced)
        elif how.kind in ("closure", "closure twice"):

            def closure() -> torch.Tensor:
                optimizer.zero_grad()
                loss = loss_of(model, inputs, targets)
                loss.backward()
                return loss

            optimizer.step(closure)
        elif how.kind.startswith("scaler"):
            loss = loss_of(model, inputs, targets)
            if state.epoch == 1 and number in (4, 5) and hvd.rank() == 0:
                loss = loss * float("inf")
            scaler.scale(loss).backward()
            if how.kind == "scaler":
                scaler.unscale_(optimizer)
                scaler.step(optimizer)
            else:
                optimizer.synchronize()
                scaler.unscale_(optimizer)
                with optimizer.skip_synchronize():
                    scaler.step(optimizer)
            scaler.update()
        else:
            if how.kind == "freezing":
                model[0].requires_grad_(state.epoch != 1)
            for part in range(3 if how.kind == "several backwards" else passes):
                loss_of(model, inputs + part, targets).backward()
            if how.kind in ("clip", "several backwards", "reentrant checkpoint"):
                torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            if how.kind == "scaled":
                for param in model.parameters():
                    param.grad.mul_(1 + param.grad.norm())
            if how.kind == "clip synchronized":
                optimizer.synchronize()
                torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
                with optimizer.skip_synchronize():
                    optimizer.step()
            else:
                optimizer.step()
        if how.kind == "two optimizers":
            other.zero_grad()
            loss_of(second, inputs, model(inputs).detach()).backward()
            other.step()
        if how.schedule == "batch":
            schedule.step()
        if how.average == "after":
            follow(0.1)
        elif how.average == "target" and number % 4 == 3:
            average.load_state_dict(model.state_dict(), strict=not how.buffers)  # it has made no buffers yet

    def one_batch(inputs: torch.Tensor, targets: torch.Tensor, number: int) -> None:
        index = state.batch
        if how.counts == "before":
            state.batch += 1
        count("before", number)
        if index >= how.skipped:
            step(inputs, targets, index)
        count("after", number)
        if how.counts == "after":
            state.batch += 1
        if how.validates_every and state.batch % how.validates_every == 0:
            state.best = min(state.best, hvd.allreduce(torch.tensor(1.0 / state.seen), op=hvd.Max).item())
        if how.commit_every and state.batch % how.commit_every == 0:
            state.commit()
        elif how.checks:
            state.check_host_updates()

    @hvd.elastic.run
    def loop(state: Any) -> None:
        if entered is not None:
            entered()
        while state.epoch < EPOCHS:
            if how.sampler:
                for number, (inputs, targets) in enumerate(loader):
                    one_batch(inputs, targets, number)
            else:
                while state.batch < BATCHES:
                    part = slice(state.batch * ROWS, state.batch * ROWS + ROWS)
                    one_batch(x[part], y[part], state.batch)
            state.best = hvd.broadcast_object(state.best, root_rank=0)
            if plateau:
                schedule.step(state.best)
            elif how.schedule == "epoch":
                schedule.step()
            state.epoch += 1
            state.batch = 0
            mean.reset()
            sampler.set_epoch(state.epoch)
            if how.commits_epochs:
                state.commit()
        hvd.barrier()  # no rank is past the loop while another one may still be called again

    def outcome() -> dict[str, Any]:
        tensors = [t for module in (model, second, average) for t in (*module.parameters(), *module.buffers())]
        parts = [*tensors, *tree_leaves([optimizer.state_dict(), other.state_dict()])]
        in_bytes = [part.detach().numpy().tobytes() if torch.is_tensor(part) else repr(part).encode() for part in parts]
        digest = hashlib.sha256(b"".join(in_bytes)).hexdigest()
        schedule_at = {key: value for key, value in schedule.state_dict().items() if key != "_step_count"}
        plain = state.batch, state.epoch, state.seen, state.log, state.best, state.counts
        return {
            "tensors": digest,
            "values": str(plain),
            "others": str((metric.state_dict(), mean.total, mean.all, scaler.state_dict(), schedule_at)),
            "rows": str((sampler.epoch, sampler.processed_num)),
        }

    entered = observe(lambda: str(outcome())) if observe is not None else None
    loop(state)
    return outcome()


@contextmanager
def checks_failing(seed: object, rate: float = RATE) -> Iterator[None]:
    """Make checks for updated hosts fail at random, or report that a newcomer is ready."""
    import spark_elastic.torch as hvd
    from spark_elastic.elastic.frontend import CollectiveFrontend
    from spark_elastic.errors import HorovodInternalError

    rng = random.Random(f"checks {seed}")

    def agree_on_update(self: Any) -> bool:
        drawn = rng.random()
        if drawn < rate / 2:
            raise HorovodInternalError("a simulated peer is gone")
        return plain(self) if hvd.size() > 1 else drawn < rate

    plain = CollectiveFrontend.agree_on_update
    CollectiveFrontend.agree_on_update = agree_on_update  # type: ignore[method-assign]
    try:
        yield
    finally:
        CollectiveFrontend.agree_on_update = plain  # type: ignore[method-assign]


@contextmanager
def disturbed(seed: int) -> Iterator[None]:
    with failing(seed), checks_failing(seed):
        yield


if __name__ == "__main__":
    search(loop_of, train, disturbed)
