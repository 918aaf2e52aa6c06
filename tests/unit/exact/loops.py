"""A loop with virtual workers, to be run in any world, and the hash of all that it comes to."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import torch
from torch import nn

import spark_elastic.torch as hvd
from spark_elastic.data.order.permutation import Permutation

ROWS, BATCH, EPOCHS = 107, 24, 3
"""Batches of 24 rows and a last one of 11."""
WORDS = 30


def build(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return Net()


CHANCE = random.Random()


class Jitter:
    def __init__(self) -> None:
        self.generators = {"new": np.random.default_rng(), "old": np.random.RandomState()}

    def __call__(self) -> float:
        return sum(float(each.normal()) for each in self.generators.values()) + CHANCE.random()


class Net(nn.Module):
    """Embedding, dropout, batch normalisation, a counter, weights of three types, one that is not always used.

    The optimizer does not have `side`. Noise comes from generators of its own: torch's, numpy's two, and Python's.
    """

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, 6)
        self.first = nn.Linear(14, 16)
        self.norm = nn.BatchNorm1d(16)
        self.average_norm = nn.BatchNorm1d(16, momentum=None)
        self.drop = nn.Dropout(0.3)
        self.narrow = nn.Linear(16, 16).bfloat16()
        self.wide = nn.Linear(16, 16).double()
        self.last = nn.Linear(16, 4)
        self.rare = nn.Linear(16, 4)
        self.side = nn.Linear(8, 4)
        self.power = nn.utils.spectral_norm(nn.Linear(16, 16))
        self.register_buffer("calls", torch.zeros(2, dtype=torch.int64))
        self.generator = torch.Generator()
        self.jitter = Jitter()

    def forward(self, x: torch.Tensor, word: torch.Tensor) -> torch.Tensor:
        x = x + 0.01 * (torch.randn(x.shape, generator=self.generator) + self.jitter())
        self.calls += torch.tensor([1, len(x)])
        hidden = self.norm(self.first(torch.cat([x, self.words(word)], 1))).relu()
        hidden = self.drop(hidden) + self.narrow(hidden.bfloat16()).float()
        hidden = self.average_norm(self.wide(hidden.double()).float()) + 0.1 * self.power(hidden)
        out = self.last(hidden) + self.side(x)
        return out + self.rare(hidden) if int(word[0]) % 3 == 0 else out


def optimizers() -> dict[str, Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]]:
    return {
        "momentum": lambda params: torch.optim.SGD(params, lr=0.05, momentum=0.9, weight_decay=1e-3),
        "adam": lambda params: torch.optim.AdamW(params, lr=0.01),
    }


def digest(*values: Any) -> str:
    """Return a hash of tensors and plain values, however nested."""
    out = hashlib.sha256()

    def add(value: Any) -> None:
        if isinstance(value, torch.Tensor):
            out.update(f"{value.dtype} {list(value.shape)}".encode())
            out.update(
                value.detach().contiguous().view(torch.uint8).numpy().tobytes()
                if value.dim()
                else value.detach().reshape(1).view(torch.uint8).numpy().tobytes()
            )
        elif isinstance(value, dict):
            for key, each in value.items():
                out.update(str(key).encode())
                add(each)
        elif isinstance(value, (list, tuple)):
            for each in value:
                add(each)
        else:
            out.update(repr(value).encode())

    add(list(values))
    return out.hexdigest()


def rows() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(ROWS, 8, generator=generator)
    return x, torch.randint(0, WORDS, (ROWS,), generator=generator), torch.randint(0, 4, (ROWS,), generator=generator)


def train(
    virtual: int,
    optimizer: str = "momentum",
    after_step: Callable[[int], None] = lambda step: None,
    batch_size: int = BATCH,
    epochs: int = EPOCHS,
    saved: dict[str, Any] | None = None,
    stop_at: int | None = None,
) -> tuple[str, dict[str, Any]]:
    """Train, and return the hash of all values, and the values."""
    hvd.init()
    model = build()
    steps = optimizers()[optimizer]([param for name, param in model.named_parameters() if not name.startswith("side")])
    schedule = torch.optim.lr_scheduler.ExponentialLR(steps, 0.9)
    generators = [model.generator, *model.jitter.generators.values(), CHANCE]
    sums = ["loss", "right"]
    workers = hvd.elastic.virtual_workers(virtual, model, steps, seed=11, sums=sums, generators=generators)
    x, word, label = rows()
    if saved is not None:
        model.load_state_dict(saved["model"])
        steps.load_state_dict(saved["optimizer"])
        schedule.load_state_dict(saved["schedule"])
        workers.load_state_dict(saved["workers"])
    progress = dict(saved["progress"]) if saved is not None else {"step": 0, "epoch": 0, "position": 0, "log": []}
    state = hvd.elastic.TorchState(model, steps, schedule=schedule, workers=workers, **progress)

    def batch() -> None:
        order = torch.from_numpy(Permutation(ROWS, state.epoch)[np.arange(ROWS)])
        chosen = order[state.position : state.position + batch_size]
        chosen = chosen[torch.randperm(len(chosen))]  # drawn outside of shards
        scale = (random.random() + np.random.random()) * 0.01
        for shard in workers.shards(len(chosen), step=state.step):
            part = chosen[shard.rows]
            noise = torch.from_numpy(np.random.normal(size=(len(part), 8)).astype(np.float32))  # an augmentation
            out = model(x[part] + noise * random.random() * scale, word[part])
            loss = nn.functional.cross_entropy(out, label[part], reduction="sum") / len(chosen)
            loss.backward()
            shard.add("loss", loss)
            shard.add("right", (out.argmax(1) == label[part]).sum())
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        steps.step()
        drawn = random.random(), torch.rand(1).item(), model.jitter()
        state.log = [*state.log, workers.sums["loss"], workers.sums["right"], *drawn]
        state.step += 1
        state.position += len(chosen)

    def validate() -> float:
        model.eval()
        with torch.no_grad():
            for shard in workers.shards(ROWS, step=-1 - state.epoch):
                loss = nn.functional.cross_entropy(
                    model(x[shard.rows], word[shard.rows]), label[shard.rows], reduction="sum"
                )
                shard.add("loss", loss)
        model.train()
        return workers.sums["loss"]

    @hvd.elastic.run
    def loop(state: Any) -> None:
        while state.epoch < epochs:
            while state.position < ROWS:
                if state.step == stop_at:
                    return
                batch()
                after_step(state.step)
                state.check_host_updates()
            state.log = [*state.log, validate()]
            schedule.step()
            state.epoch, state.position = state.epoch + 1, 0
            state.commit()

    loop(state)
    values = {
        "model": model.state_dict(),
        "optimizer": steps.state_dict(),
        "schedule": schedule.state_dict(),
        "workers": workers.state_dict(),
        "progress": {name: getattr(state, name) for name in ("step", "epoch", "position", "log")},
    }
    parts = {name: digest(value) for name, value in {**values, **values["model"]}.items()}
    return digest(parts), parts if stop_at is None else values
