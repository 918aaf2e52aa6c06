"""Turn the arrays of a reader into the tensors that a module is called with."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from spark_elastic.data.reader import Batch
from spark_elastic.ml.preparation import (
    INPUT,
    LABEL,
    WEIGHT,
    Columns,
    is_trained_on,
    numbered,
    ragged_column_error,
    split_evenly,
)
from spark_elastic.ml.torch.spec import TorchTraining
from spark_elastic.ml.training.engine import first_rows


@dataclass(frozen=True, slots=True)
class TorchBatch:
    """Rows of one worker, on the device of the training. `batch["features_0"]` is a tensor by its name.

    Attributes:
        inputs: the inputs of the model, tensors of shape [rows, ...].
        labels: the labels, tensors of shape [rows, ...].
        weights: the sample weights, shape [rows]; None: the dataset has none.
        rows: the number of rows.
        tensors: all tensors by name, including those that `transformation_fn` has added.
    """

    inputs: tuple[torch.Tensor, ...]
    labels: tuple[torch.Tensor, ...]
    weights: torch.Tensor | None
    rows: int
    tensors: Mapping[str, Any]

    def __getitem__(self, name: str) -> Any:
        return self.tensors[name]


class BatchMaker:
    """A factory of `TorchBatch`; it divides a reader's batch into the parts of gradient accumulation."""

    def __init__(self, training: TorchTraining, device: torch.device) -> None:
        self._columns = Columns(training, needs_labels=training.train_fn is None)
        self._training = training
        self._first: TorchBatch | None = None
        self._device = device
        self._parts = training.accumulation

    def parts(self, batch: Batch, most: int | None = None) -> list[TorchBatch]:
        """Divide a batch into at most `most` parts of about equal size (default: the training's accumulation).

        Returns:
            The parts; [] if this worker has no rows of the batch.

        Raises:
            DataError: `transformation_fn` returned something that cannot be trained on.
        """
        if not batch.rows:
            return []
        tensors = {name: self._tensor(name, value) for name, value in self._columns.of(batch).items()}
        edges = split_evenly(batch.rows, most or self._parts)
        if len(edges) == 1:
            return [_batch(tensors, batch.rows)]
        return [
            _batch({name: value[start:stop] for name, value in tensors.items()}, stop - start) for start, stop in edges
        ]

    def stand_in(self) -> TorchBatch:
        """Return the first row of the training dataset, for a worker that must call the model without rows."""
        if self._first is None:
            (self._first,) = self.parts(first_rows(self._training, 1), 1)
        return self._first

    def _tensor(self, name: str, value: Any) -> Any:
        if isinstance(value, np.ndarray) and value.dtype != object:
            value = torch.from_numpy(value)
        if not isinstance(value, torch.Tensor):
            if is_trained_on(name):
                raise ragged_column_error(name, value)
            return value
        return value.to(self._device, non_blocking=True)


def _batch(tensors: Mapping[str, Any], rows: int) -> TorchBatch:
    inputs, labels = (tuple(numbered(prefix, tensors)) for prefix in (INPUT, LABEL))
    return TorchBatch(inputs, labels, tensors.get(WEIGHT), rows, tensors)
