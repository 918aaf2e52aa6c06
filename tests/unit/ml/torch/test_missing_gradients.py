"""Trainings of modules with layers that few rows use, or none: all weights are as plain torch's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from spark_elastic.data.dataset import Dataset, pack
from spark_elastic.data.store import Store
from spark_elastic.ml.torch.engine import clip_gradients
from spark_elastic.ml.torch.spec import MODEL_FILE, TorchTraining
from spark_elastic.ml.torch.train import train
from tests.unit.worlds import together

pytestmark = pytest.mark.nightly

ROWS, BATCH, EPOCHS = 40, 8, 2


class Sometimes(torch.nn.Module):
    """A model with layers for rows of a kind, and one that nothing calls."""

    def __init__(self, norm: bool = False, table: bool = False) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.enter = torch.nn.Sequential(torch.nn.Linear(6, 6), *([torch.nn.BatchNorm1d(6)] if norm else []))
        self.base, self.rare, self.never = (torch.nn.Linear(6, 3) for _ in range(3))
        self.table = torch.nn.Embedding(4, 3, sparse=True) if table else None
        self.double()

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        entered = self.enter(features)
        out = self.base(entered)
        rare = features[:, 0] > 1.4
        if rare.any():
            out = out.index_add(0, rare.nonzero()[:, 0], self.rare(entered[rare]))
        if self.table is not None and (many := features[:, 1] > 0.8).any():
            out = out.index_add(0, many.nonzero()[:, 0], self.table((features[many][:, 2] > 0).long()))
        return out


def sgd(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.1, momentum=0.9, weight_decay=0.1)


def adamw(params: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=0.05, weight_decay=0.1)


def plain_sgd(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.1)  # its momentum of sparse gradients is sparse, which is refused


VARIANTS: dict[str, tuple[dict[str, Any], Any, dict[str, Any]]] = {
    "AdamW": ({}, adamw, {}),
    "accumulation": ({}, sgd, {"accumulation": 2}),
    "fewer rows than workers": ({}, sgd, {"batch_size": 2}),
    "batch normalisation of fewer rows than workers": ({"norm": True}, sgd, {"batch_size": 2}),
    "exact": ({}, adamw, {"virtual_workers": 4}),
    "clipped": ({}, adamw, {"clip_norm": 0.3, "clip_value": 0.1}),
    "sparse, clipped": ({"table": True}, plain_sgd, {"clip_norm": 0.3, "clip_value": 0.1}),
}


def write_set(folder: Path) -> dict[str, np.ndarray]:
    features = np.random.default_rng(4).normal(size=(ROWS, 6))
    rows = {"features_0": features, "label_0": features.argmax(1) % 3}
    pack(rows, folder, shards=1)
    return rows


def by_plain_torch(variant: str, rows: dict[str, np.ndarray]) -> dict[str, torch.Tensor]:
    net, optimizer, settings = VARIANTS[variant]
    model = Sometimes(**net)
    made = optimizer(model.parameters())
    features, labels = (torch.from_numpy(each) for each in rows.values())
    size = settings.get("batch_size", BATCH)
    for _ in range(EPOCHS):
        for begin in range(0, ROWS, size):
            part = slice(begin, begin + size)
            made.zero_grad()
            torch.nn.functional.cross_entropy(model(features[part]), labels[part]).backward()
            clip_gradients(model.parameters(), settings.get("clip_norm"), settings.get("clip_value"))
            made.step()
    return model.state_dict()


def train_all(data: Path, folder: Path) -> list[str]:
    for variant, (net, optimizer, settings) in VARIANTS.items():
        model = Sometimes(**net)
        chosen = {"batch_size": BATCH, "epochs": EPOCHS, "shuffle": False, "verbose": 0, **settings}
        train(
            TorchTraining(
                dataset=Dataset.open(data),
                store=Store.create(folder / variant),
                model=model,
                optimizer=optimizer,
                loss=torch.nn.CrossEntropyLoss(),
                **chosen,
            )
        )
    return list(VARIANTS)


def differences(rows: dict[str, np.ndarray], folder: Path) -> list[str]:
    out = []
    for variant, (net, *_) in VARIANTS.items():
        wanted, start = by_plain_torch(variant, rows), Sometimes(**net).state_dict()
        assert torch.equal(wanted["never.weight"], start["never.weight"])
        assert not torch.equal(wanted["rare.weight"], start["rare.weight"])
        found = torch.load(folder / variant / MODEL_FILE, weights_only=True)
        for name, want in wanted.items():
            # two rows that are normalised make a rounding error a million times larger
            if not torch.allclose(found[name], want, rtol=1e-6, atol=1e-7):
                out.append(f"{variant}: {name} differs by {(found[name] - want).abs().max().item():.3g}")
    return out


@pytest.mark.parametrize("count", [1, 3])
def test_workers_train_layers_that_few_rows_use_as_plain_torch(count, tmp_path):
    rows = write_set(tmp_path / "set")
    together(train_all, tmp_path / "set", tmp_path / "store", count=count)
    assert differences(rows, tmp_path / "store") == []
