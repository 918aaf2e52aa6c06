"""Classes and functions of a user's own for PyTorch. The saved estimators and models beside name them by this module:
neither it nor what is in it may be renamed."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

import spark_elastic.torch as hvd
from spark_elastic.ml.callbacks import Callback, EarlyStopping


class OwnNorm(nn.BatchNorm1d):
    """Made synchronised below, which gives it a class that exists in the process alone."""


class TwoInputs(nn.Module):
    """Of numbers [rows, 2] and a word's number [rows]: logits of three kinds, and a size."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.words = nn.Embedding(5, 2)
        self.hidden = nn.Linear(4, 6)
        self.norm = hvd.SyncBatchNorm(6)
        self.converted = hvd.SyncBatchNorm.convert_sync_batchnorm(nn.BatchNorm1d(6))
        self.own = hvd.SyncBatchNorm.convert_sync_batchnorm(OwnNorm(6))
        self.kind = nn.Linear(6, 3)
        self.size = nn.Linear(6, 1)

    def forward(self, x: torch.Tensor, word: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        hidden = self.own(self.converted(self.norm(self.hidden(torch.cat([x, self.words(word)], dim=1)))))
        return self.kind(torch.tanh(hidden)), self.size(hidden).squeeze(1)


class Median:
    """A metric with the interface of torchmetrics that keeps all it has seen: its states travel and are saved."""

    def __init__(self) -> None:
        self._reductions = {"seen": dim_zero_cat}
        self._defaults: dict[str, Any] = {"seen": []}
        self.reset()

    def reset(self) -> None:
        self.seen: list[torch.Tensor] = []

    def update(self, output: torch.Tensor, label: torch.Tensor) -> None:
        self.seen.append(output.max(1).values)

    def compute(self) -> torch.Tensor:
        return torch.cat(self.seen).median() if isinstance(self.seen, list) else self.seen.median()


def dim_zero_cat(states: list[torch.Tensor]) -> torch.Tensor:
    return torch.cat(states)


class Steps(Callback):
    """Writes down the number of each step, and raises at one. What it has counted is its state.

    pause_s: after each step, for checkpoints to be written.
    """

    def __init__(self, log: str, raises_at: int | None = None, pause_s: float = 0.0) -> None:
        self.log, self.raises_at, self.pause_s = log, raises_at, pause_s
        self.count = 0

    def on_batch_end(self, run: Any) -> None:
        self.count += 1
        with Path(self.log).open("a") as file:
            file.write(f"{run.step} {self.count}\n")
        if run.step == self.raises_at:
            raise RuntimeError(f"the end at step {run.step}")
        time.sleep(self.pause_s)

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.count = state["count"]


class Impatient(EarlyStopping):
    """A class of the user's own on top of one of the package."""

    def __init__(self) -> None:
        super().__init__("loss", patience=1)


def adam(params: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(params, lr=0.02)


def halved(optimizer: torch.optim.Optimizer) -> Any:
    return torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5)


def squared(model: nn.Module, batch: Any) -> Any:
    output = model(*batch.inputs)
    return (output[1] - batch.labels[0]).square().mean(), output[1]


def error(output: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
    return (output - label).abs().mean()


def doubled(columns: Mapping[str, Any]) -> dict[str, Any]:
    return {**columns, "features_0": columns["features_0"] * 2}


def say(run: Any, logs: Mapping[str, float]) -> None:
    print(logs["loss"])
