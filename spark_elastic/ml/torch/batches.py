"""From a reader's arrays to what a model is called with."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from spark_elastic.data.reader import Batch
from spark_elastic.ml.preparation import WEIGHT, numbered
from spark_elastic.ml.torch.spec import TorchTraining
from spark_elastic.ml.training.columns import INPUT, LABEL, Columns, is_trained_on, ragged_column_error, split_evenly


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
        self._columns = Columns(training, needs_labels=training.train_fn is None)
        self._training = training
        self._first: TorchBatch | None = None
        self._device = device
        self._parts = training.accumulation

    def parts(self, batch: Batch, most: int | None = None) -> list[TorchBatch]:
        """The batch in up to `most` equal parts (default: the training's accumulation); [] if it has no rows here.

        Raises: DataError: `transformation_fn` returned what cannot be trained on.
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
        """Return the first row of the training set: for a worker that has to call the model and has no rows."""
        if self._first is None:
            training = self._training
            with training.dataset.reader(
                "train", batch_size=1, shuffle=False, prefetch=0, cache_dir=training.cache_dir
            ) as reader:
                (self._first,) = self.parts(next(iter(reader.epoch(0))), 1)
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
