"""The columns of a batch as numpy arrays, before a framework makes tensors of them."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from spark_elastic.data.reader import Batch
from spark_elastic.errors import DataError
from spark_elastic.ml.preparation import WEIGHT
from spark_elastic.ml.training.spec import Training

INPUT, LABEL = "features_", "label_"


class Columns:
    """Makes the columns to train on of a batch: the shapes that were set, then `transformation_fn`.

    Args:
        needs_labels: Require that `transformation_fn` returns the labels and weights of the dataset.
    """

    def __init__(self, training: Training, needs_labels: bool = True) -> None:
        self._transformation = training.transformation_fn
        self._shapes = {
            **_by_name(INPUT, training.input_shapes),
            **_by_name(LABEL, training.label_shapes),
        }
        names = [field.name for field in training.dataset.layout.fields] if needs_labels else []
        self._needed = [name for name in names if name.startswith(LABEL) or name == WEIGHT]

    def of(self, batch: Batch) -> Mapping[str, Any]:
        """Return the columns by name. Raises `DataError` if `transformation_fn` returned unusable ones."""
        rows = batch.rows
        columns: Mapping[str, Any] = {
            name: reshaped(value, self._shapes.get(name), rows) for name, value in batch.tensors.items()
        }
        if self._transformation is not None:
            columns = self._transformation(dict(columns))
            _check_rows(columns, rows)
            self._check_needed(columns)
        return columns

    def _check_needed(self, columns: Mapping[str, Any]) -> None:
        """Refuse missing labels and weights: the loss would be of something else, and look as good."""
        missing = [name for name in self._needed if name not in columns]
        if missing:
            raise DataError(
                f"transformation_fn returned no {' and no '.join(missing)}, but {', '.join(columns) or 'nothing'}; "
                "begin with {**columns} to keep what it does not change"
            )


def reshaped(value: Any, shape: Sequence[int] | None, rows: int) -> Any:
    """Return an array with rows of this shape. Lists (values of variable length) and shape None change nothing."""
    return value.reshape(rows, *shape) if shape is not None and isinstance(value, np.ndarray) else value


def is_trained_on(name: str) -> bool:
    """Return whether a column of that name is given to the model or its loss."""
    return name.startswith((INPUT, LABEL)) or name == WEIGHT


def ragged_column_error(name: str, value: Any) -> DataError:
    """Return the error for a column of which no tensor can be made."""
    return DataError(
        f"{name} holds {type(value).__name__} values of variable length, which no model can take; make arrays of them "
        "in transformation_fn"
    )


def split_evenly(rows: int, parts: int) -> list[tuple[int, int]]:
    """Return (start, stop) of at most `parts` non-empty parts of about equal size."""
    count = min(parts, rows)
    edges = [rows * part // count for part in range(count + 1)]
    return list(itertools.pairwise(edges))


def _by_name(prefix: str, shapes: Sequence[Sequence[int] | None] | None) -> dict[str, tuple[int, ...]]:
    return {f"{prefix}{at}": tuple(shape) for at, shape in enumerate(shapes or ()) if shape is not None}


def _check_rows(columns: Any, rows: int) -> None:
    if not isinstance(columns, Mapping):
        raise DataError(f"transformation_fn must return columns by name, not {type(columns).__name__}")
    for name, value in columns.items():
        have = len(value) if hasattr(value, "__len__") else None
        if have != rows:
            raise DataError(
                f"transformation_fn was given {rows} rows and returned {'no' if have is None else have} rows for "
                f"{name}; rows must stay as they are, because the weight of a batch follows from their number"
            )
