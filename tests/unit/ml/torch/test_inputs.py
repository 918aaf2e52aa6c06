"""Training, dry run and transform give a model the same inputs: ordered by number, in one shape."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from spark_elastic.data.dataset import Dataset, pack
from tests.unit.ml.torch.estimators import HereEstimator, settings


class Two(nn.Module):
    """Inputs [n, 6] and [n, 2]."""

    def __init__(self) -> None:
        super().__init__()
        self.wide, self.narrow = nn.Linear(6, 3), nn.Linear(2, 3)

    def forward(self, wide: torch.Tensor, narrow: torch.Tensor) -> torch.Tensor:
        # `view` across rows, as in models that were written for the tensors of a DataLoader: they are contiguous
        return self.wide(wide.view(-1).view(-1, 6)) - self.narrow(narrow.view(-1).view(-1, 2))


class Image(nn.Module):
    """Input [n, 1, height, 3]."""

    def __init__(self, height: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 3, (height, 3))

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        return self.conv(image).flatten(1)


def rows(**more: Any) -> dict[str, Any]:
    """Columns by names in another order than their numbers."""
    generator = np.random.default_rng(1)
    features = {"features_1": (24, 2), "features_x": (24, 1), "features_0": (24, 6)}
    made = {name: generator.normal(size=shape).astype(np.float32) for name, shape in features.items()}
    return {**{name: value for name, value in made.items() if name in more.get("only", made)}, "label_0": [0, 1, 2] * 8}


def fitted(dataset: Dataset, model: nn.Module, **changes: Any) -> Any:
    chosen = {"model": model, "optimizer": torch.optim.SGD(model.parameters(), lr=0.1), "epochs": 1, **changes}
    return HereEstimator(**settings(**chosen)).from_dataset_path(dataset)


def test_inputs_are_ordered_by_number_not_by_their_order_in_the_dataset(tmp_path: Path) -> None:
    model = fitted(pack(rows(), tmp_path), Two())
    inputs = model._facts_of_fit().inputs
    assert [field.name for field in inputs] == ["features_0", "features_1"]
    assert [column.shape.shape for column in model._added() if column.made == "raw"] == [(3,)]


def test_input_shapes_are_those_of_transform_too(tmp_path: Path) -> None:
    dataset = pack(rows(only=["features_0"]), tmp_path)
    changes = {"transformation_fn": cropped, "inference_fn": cropped}
    assert len(fitted(dataset, Image(1), input_shapes=[(1, 2, 3)], **changes)._added()) == 2
    model = fitted(dataset, Image(2), input_shapes=[(1, 2, 3)])
    assert model._facts_of_fit().inputs[0].shape == (1, 2, 3)
    assert [column.shape.shape for column in model._added() if column.made == "raw"] == [(3,)]


def cropped(columns: dict[str, Any]) -> dict[str, Any]:
    return {**columns, "features_0": columns["features_0"][:, :, :1]}
