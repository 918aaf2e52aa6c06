"""From a reader's arrays to what a model is called with."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from spark_elastic.data.batch import Batch
from spark_elastic.errors import DataError
from spark_elastic.ml.torch.spec import TorchTraining

INPUT, LABEL, WEIGHT = "features_", "label_", "sample_weight"


@dataclass(frozen=True, slots=True)
class TorchBatch:
    """Rows of one worker. inputs, labels: a tensor each, `[rows, ...]`. weights: `[rows]`, or None. tensors: all of
    them by name, with those that `transformation_fn` has added."""

    inputs: tuple[torch.Tensor, ...]
    labels: tuple[torch.Tensor, ...]
    weights: torch.Tensor | None
    rows: int
    tensors: Mapping[str, Any]

    def __getitem__(self, name: str) -> Any:
        return self.tensors[name]


class BatchMaker:
    """Makes batches of tensors, each cut into at most `accumulation` parts."""

    def __init__(self, training: TorchTraining, device: torch.device) -> None:
        self._transformation = training.transformation_fn
        self._shapes = {
            **_by_name(INPUT, training.input_shapes),
            **_by_name(LABEL, training.label_shapes),
        }
        self._device = device
        self._needed = (
            []
            if training.train_fn is not None
            else [
                field.name
                for field in training.dataset.layout.fields
                if field.name.startswith(LABEL) or field.name == WEIGHT
            ]
        )
        self._parts = training.accumulation

    def parts(self, batch: Batch, most: int | None = None) -> list[TorchBatch]:
        """The batch in up to `most` equal parts (default: the training's accumulation); [] if it has no rows here.

        Raises: DataError: `transformation_fn` returned what cannot be trained on.
        """
        rows = batch.rows
        if not rows:
            return []
        columns: Mapping[str, Any] = {
            name: shaped(value, self._shapes.get(name), rows) for name, value in batch.tensors.items()
        }
        if self._transformation is not None:
            columns = self._transformation(dict(columns))
            _check(columns, rows)
            self._check_needed(columns)
        tensors = {name: self._tensor(name, value) for name, value in columns.items()}
        count = min(most or self._parts, rows)
        if count == 1:
            return [_batch(tensors, rows)]
        cuts = [rows * part // count for part in range(count + 1)]
        return [
            _batch({name: value[start:stop] for name, value in tensors.items()}, stop - start)
            for start, stop in itertools.pairwise(cuts)
        ]

    def _check_needed(self, columns: Mapping[str, Any]) -> None:
        """Without them the loss would be of something else, and as good a number as any."""
        missing = [name for name in self._needed if name not in columns]
        if missing:
            raise DataError(
                f"transformation_fn returned no {' and no '.join(missing)}, but {', '.join(columns) or 'nothing'}; "
                "begin with {**columns} to keep what it does not change"
            )

    def _tensor(self, name: str, value: Any) -> Any:
        if isinstance(value, np.ndarray) and value.dtype != object:
            value = torch.from_numpy(value)
        if not isinstance(value, torch.Tensor):
            if name.startswith((INPUT, LABEL)) or name == WEIGHT:
                raise DataError(
                    f"{name} holds {type(value).__name__} values of variable length, which no model can take; make "
                    "arrays of them in transformation_fn"
                )
            return value
        return value.to(self._device, non_blocking=True)


def shaped(value: Any, shape: Sequence[int] | None, rows: int) -> Any:
    """An array with rows of this shape; None: as it is. Lists are of variable length, and have none."""
    return value.reshape(rows, *shape) if shape is not None and isinstance(value, np.ndarray) else value


def _by_name(prefix: str, shapes: Sequence[Sequence[int] | None] | None) -> dict[str, tuple[int, ...]]:
    return {f"{prefix}{at}": tuple(shape) for at, shape in enumerate(shapes or ()) if shape is not None}


def _batch(tensors: Mapping[str, Any], rows: int) -> TorchBatch:
    return TorchBatch(_numbered(INPUT, tensors), _numbered(LABEL, tensors), tensors.get(WEIGHT), rows, tensors)


def _numbered(prefix: str, tensors: Mapping[str, Any]) -> tuple[Any, ...]:
    found: list[Any] = []
    while (value := tensors.get(f"{prefix}{len(found)}")) is not None:
        found.append(value)
    return tuple(found)


def _check(columns: Any, rows: int) -> None:
    if not isinstance(columns, Mapping):
        raise DataError(f"transformation_fn must return columns by name, not {type(columns).__name__}")
    for name, value in columns.items():
        have = len(value) if hasattr(value, "__len__") else None
        if have != rows:
            raise DataError(
                f"transformation_fn was given {rows} rows and returned {'no' if have is None else have} rows for "
                f"{name}; rows must stay as they are, because the weight of a batch follows from their number"
            )
