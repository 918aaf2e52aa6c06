"""Two settings are described alike if they mean the same training, in whatever process."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from spark_elastic.ml.callbacks import EarlyStopping
from spark_elastic.ml.fingerprint import described

ROOT = Path(__file__).resolve().parents[3]
RATE = 0.1


def sgd(params: Any, lr: float) -> Any:
    return torch.optim.SGD(params, lr=lr)


def schedule(milestones: list[int]) -> Any:
    return torch.optim.lr_scheduler.MultiStepLR(sgd(nn.Linear(2, 2).parameters(), 0.1), milestones)


def weighted(first: float) -> Any:
    return nn.CrossEntropyLoss(weight=torch.tensor([first, 1.0]))


@pytest.mark.parametrize(
    ("make", "one", "other"),
    [
        (lambda rate: lambda params: sgd(params, rate), 0.1, 0.2),
        (lambda rate: partial(sgd, lr=rate), 0.1, 0.2),
        (lambda rate: sgd(nn.Linear(2, 2).parameters(), rate), 0.1, 0.2),
        (weighted, 1.0, 2.0),
        (lambda first: [nn.ModuleList([weighted(first)])], 1.0, 2.0),
        (schedule, [1, 2], [1, 3]),
        (lambda rate: torch.optim.lr_scheduler.LambdaLR(sgd(nn.Linear(2, 2).parameters(), 1), lambda n: rate), 1, 2),
        (lambda patience: [EarlyStopping("loss", patience=patience)], 1, 2),
        (lambda count: torch.arange(count), 2000, 2001),
    ],
)
def test_equal_settings_have_equal_descriptions_and_others_differ(make: Callable[..., Any], one: Any, other: Any):
    assert described(make(one)) == described(make(one))
    assert described(make(one)) != described(make(other))


def test_model_is_described_by_layers_and_not_by_weights() -> None:
    class Net(nn.Module):
        def __init__(self, width: int) -> None:
            super().__init__()
            self.register_buffer("features", torch.randn(3))
            self.layer = nn.Linear(3, width)

    assert described(Net(4), buffers=False) == described(Net(4), buffers=False)
    assert described(Net(4), buffers=False) != described(Net(5), buffers=False)


def test_description_of_a_function_includes_plain_globals_that_it_uses(monkeypatch: pytest.MonkeyPatch) -> None:
    def by_global(params: Any) -> Any:
        return sgd(params, RATE)

    before = described(by_global)
    monkeypatch.setitem(by_global.__globals__, "RATE", 0.2)
    assert described(by_global) != before


SAYS = """
from spark_elastic.ml.fingerprint import described
print(described([lambda name: name in {"a", "b", "c", "d"}, {"x", "y", "z"}]))
"""


def test_order_of_a_set_does_not_matter() -> None:
    said = {
        subprocess.run(
            [sys.executable, "-c", SAYS],
            env={**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    }
    assert len(said) == 1
