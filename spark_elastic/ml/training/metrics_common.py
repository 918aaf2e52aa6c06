"""The part of measuring that does not depend on the framework: sums in one vector, added up over all rows."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

from spark_elastic.ml.training.progress import Piece, Sums


class MetricAccumulator(ABC):
    """The losses and metrics of one training as a float64 vector of sums.

    The vectors of batches, workers and worlds are added up, so each row counts once. A framework decides what the
    numbers are; `loss_positions` and `rows_position` say where to find those that every training has.

    Attributes:
        names: the names of the metrics; a checkpoint is resumed only by a training with the same names.
        loss_positions: the positions of the losses' sums.
        rows_position: the position of the number of rows.
    """

    loss_positions: Sequence[int] = ()
    rows_position: int = -1

    @property
    @abstractmethod
    def names(self) -> list[str]: ...

    @abstractmethod
    def logs(self, sums: Sums, pieces: Sequence[Piece], prefix: str = "") -> dict[str, float]:
        """Compute the losses and metrics, by name; a metric of several values becomes several columns."""

    @abstractmethod
    def live_logs(self, sums: Sums) -> dict[str, float]:
        """Compute those of `logs` that are plain means, without touching the metrics' own objects.

        Safe on any thread at any moment: the objects belong to the thread that trains.
        """

    def rows(self, sums: Sums) -> int:
        return int(sums[self.rows_position])

    def non_finite_loss(self, sums: Any) -> float | None:
        """Return a loss that is NaN or infinite; None if all are finite."""
        for position in self.loss_positions:
            if position < len(sums) and not math.isfinite(sums[position]):
                return float(sums[position])
        return None


def columns_of(name: str, value: Any) -> dict[str, float]:
    """Return the columns of the history for the value of a metric.

    Args:
        name: the name of the metric.
        value: a number, an array or tensor on the CPU, or a dict of numbers.
    """
    if isinstance(value, Mapping):
        return {f"{name}_{key}": float(one) for key, one in value.items()}
    values = value.reshape(-1).tolist() if hasattr(value, "reshape") else [float(value)]
    return {name: float(values[0])} if len(values) == 1 else {f"{name}_{at}": one for at, one in enumerate(values)}
