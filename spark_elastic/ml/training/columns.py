"""A batch's columns as numpy arrays, before a framework makes tensors of them."""

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
    """What is trained on, by name: the reader's columns in the shapes that were set, then as `transformation_fn` makes
    them.

    needs_labels: whether what it returns must have the labels and weights that the set has.
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
        """Raises: DataError: `transformation_fn` returned what cannot be trained on."""
        rows = batch.rows
        columns: Mapping[str, Any] = {
            name: shaped(value, self._shapes.get(name), rows) for name, value in batch.tensors.items()
        }
        if self._transformation is not None:
            columns = self._transformation(dict(columns))
            _check(columns, rows)
            self._check_needed(columns)
        return columns

    def _check_needed(self, columns: Mapping[str, Any]) -> None:
        """Without them the loss would be of something else, and as good a number as any."""
        missing = [name for name in self._needed if name not in columns]
        if missing:
            raise DataError(
                f"transformation_fn returned no {' and no '.join(missing)}, but {', '.join(columns) or 'nothing'}; "
                "begin with {**columns} to keep what it does not change"
            )


def shaped(value: Any, shape: Sequence[int] | None, rows: int) -> Any:
    """An array with rows of this shape; None: as it is. Lists are of variable length, and have none."""
    return value.reshape(rows, *shape) if shape is not None and isinstance(value, np.ndarray) else value


def is_trained_on(name: str) -> bool:
    """Whether a column of that name is given to the model or its loss."""
    return name.startswith((INPUT, LABEL)) or name == WEIGHT


def refused(name: str, value: Any) -> DataError:
    """A column is no array, and no tensor can be made of it."""
    return DataError(
        f"{name} holds {type(value).__name__} values of variable length, which no model can take; make arrays of them "
        "in transformation_fn"
    )


def cuts(rows: int, parts: int) -> list[tuple[int, int]]:
    """(first, end) of up to so many parts of about equal size."""
    count = min(parts, rows)
    edges = [rows * part // count for part in range(count + 1)]
    return list(itertools.pairwise(edges))


def _by_name(prefix: str, shapes: Sequence[Sequence[int] | None] | None) -> dict[str, tuple[int, ...]]:
    return {f"{prefix}{at}": tuple(shape) for at, shape in enumerate(shapes or ()) if shape is not None}


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
