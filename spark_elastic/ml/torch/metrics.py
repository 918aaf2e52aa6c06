"""Metrics as sums over rows that are added up over batches, workers and worlds: each row counts once.

What a step adds travels in one vector of float64 with the losses. torchmetrics' metrics are used the same way: each
step begins with an empty metric, and what `update` has left in its states is added to the sum. States that cannot be
added up (lists of predictions, maxima) are gathered from all workers instead, which costs more.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from spark_elastic.errors import DataError, InvalidSettingsError
from spark_elastic.ml.torch.objective import Measured, Objective
from spark_elastic.ml.training.progress import Piece, Sums


class _Function:
    """A plain function of (output, label)."""

    width = 1
    gathered = False

    def __init__(self, name: str, function: Any, which: int | None) -> None:
        self.name = name
        self._function = function
        self._which = which
        self.averaged = False
        """It returns one number for all rows that it is given, so its value is a mean of such."""

    def update(self, output: Any, label: Any, rows: int) -> list[float]:
        value = self._function(output, label)
        self.averaged = not isinstance(value, torch.Tensor) or not value.dim() or value.shape[0] != rows
        if not isinstance(value, torch.Tensor):
            return [float(value) * rows]
        if value.dim() and value.shape[0] == rows:
            return [float(value.double().sum()) / max(1, value[0].numel())]
        if value.numel() == 1:
            return [float(value) * rows]
        raise DataError(
            f"the metric {self.name} returned a tensor of shape {tuple(value.shape)} for {rows} rows; it must be the "
            "mean over them, or a value for each"
        )

    def piece(self) -> dict[str, Any]:
        return {}

    def value(self, sums: Sums, rows: float, pieces: Sequence[dict[str, Any]]) -> float:
        return float(sums[0]) / rows


class _Torchmetric:
    """A metric with `update`, `compute`, `reset`, and states that it says how to reduce."""

    def __init__(self, name: str, metric: Any) -> None:
        self.name = name
        self._metric = copy.deepcopy(metric)
        self._metric.reset()
        self._reductions: dict[str, Any] = dict(metric._reductions)
        self._defaults: dict[str, Any] = {
            state: default.cpu() if isinstance(default, torch.Tensor) else default
            for state, default in metric._defaults.items()
        }
        adds = all(
            isinstance(self._defaults[state], torch.Tensor) and getattr(reduction, "__name__", "") == "dim_zero_sum"
            for state, reduction in self._reductions.items()
        )
        self.gathered = not adds
        self.width = sum(self._defaults[state].numel() for state in self._reductions) if adds else 0

    def update(self, output: Any, label: Any, rows: int) -> list[float]:
        metric = self._metric
        _move(metric, output)
        metric.reset()
        metric.update(output, label)
        if self.gathered:
            return []
        return [
            number
            for state, default in self._defaults.items()
            if state in self._reductions
            for number in (getattr(metric, state).cpu().double() - default.double()).reshape(-1).tolist()
        ]

    def piece(self) -> dict[str, Any]:
        out = {}
        for state in self._reductions:
            value = getattr(self._metric, state)
            out[state] = [part.detach().cpu() for part in value] if isinstance(value, list) else value.detach().cpu()
        return out

    def value(self, sums: Sums, rows: float, pieces: Sequence[dict[str, Any]]) -> float | dict[str, float]:
        metric = self._metric
        _move(metric, None)
        metric.reset()
        at = 0
        for state, reduction in self._reductions.items():
            default = self._defaults[state]
            if self.gathered:
                merged = _merged(reduction, [piece[state] for piece in pieces if state in piece], default)
            else:
                flat = torch.from_numpy(sums[at : at + default.numel()].copy()).reshape(default.shape)
                total = flat + default.double()
                merged = (total if default.is_floating_point() else total.round()).to(default.dtype)
                at += default.numel()
            setattr(metric, state, merged)
        metric._update_count = 1
        metric._computed = None
        return metric.compute()  # type: ignore[no-any-return]


def _move(metric: Any, output: Any) -> None:
    """To where the outputs are; to the CPU without any."""
    device = output.device if isinstance(output, torch.Tensor) else torch.device("cpu")
    if hasattr(metric, "to") and getattr(metric, "device", device) != device:
        metric.to(device)


def _merged(reduction: Any, values: list[Any], default: Any) -> Any:
    if not values:
        return copy.deepcopy(default)
    if isinstance(default, list):
        return [part for value in values for part in value]
    stacked = torch.stack(values)
    return reduction(stacked) if reduction is not None else stacked


class Tally:
    """Losses and metrics of one training: how they lie in the vector, and what they come to.

    The vector: for each loss its sum over rows and what that is a mean over; rows; then the metrics.

    Raises: InvalidSettingsError: something in `metrics` is neither a function nor a metric.
    """

    def __init__(self, objective: Objective, metrics: Mapping[str, Any]) -> None:
        self.objective = objective
        self._metrics: list[tuple[_Function | _Torchmetric, int | None]] = []
        for name, metric in metrics.items():
            self._add(name, metric, None)
        self._head = 2 * len(objective) + 1
        self.width = self._head + sum(metric.width for metric, _ in self._metrics)
        self.gathers = any(metric.gathered for metric, _ in self._metrics)
        """Whether what `measure` returns has to be gathered from all workers."""
        self.names = [metric.name for metric, _ in self._metrics]

    def _add(self, name: str, metric: Any, which: int | None) -> None:
        if isinstance(metric, tuple) and len(metric) == 2 and isinstance(metric[0], int):
            which, metric = metric
        if hasattr(metric, "update") and hasattr(metric, "_reductions"):
            self._metrics.append((_Torchmetric(name, metric), which))
        elif hasattr(metric, "items") and hasattr(metric, "update") and hasattr(metric, "compute"):  # a collection
            for part, one in metric.items():
                self._add(f"{name}_{part}", one, which)
        elif callable(metric):
            self._metrics.append((_Function(name, metric, which), which))
        else:
            raise InvalidSettingsError(
                f"the metric {name} is neither a function of (output, label) nor a torchmetrics metric, but "
                f"{type(metric).__name__}"
            )

    def measure(self, measured: Measured, rows: int, into: torch.Tensor) -> Piece:
        """Add a batch's sums to the float64 vector `into`; returns what else there is, {} if nothing."""
        numbers: list[float] = []
        for value, count in zip(measured.sums, measured.counts, strict=True):
            numbers += (float(value.detach()), count)
        numbers.append(float(rows))
        piece: Piece = {}
        if self._metrics:
            with torch.no_grad():
                outputs = tuple(output.detach() for output in measured.outputs)
                for metric, which in self._metrics:
                    output, label = _chosen(metric.name, outputs, measured.labels, which)
                    numbers += metric.update(output, label, rows)
                    if metric.gathered:
                        piece[metric.name] = metric.piece()
        into[: self.width] += torch.tensor(numbers, dtype=torch.float64)
        return piece

    def logs(self, sums: Sums, pieces: Sequence[Piece], prefix: str = "") -> dict[str, float]:
        """What the sums come to, by name; a metric of several values becomes several columns."""
        losses = len(self.objective)
        out = self.objective.means(sums[0 : 2 * losses : 2].tolist(), sums[1 : 2 * losses : 2].tolist())
        rows = float(sums[2 * losses])
        at = self._head
        for metric, _ in self._metrics:
            own = [piece[metric.name] for piece in pieces if metric.name in piece]
            value: Any = metric.value(sums[at : at + metric.width], rows, own)
            at += metric.width
            out.update(_columns(metric.name, value))
        return {f"{prefix}{name}": value for name, value in out.items()}

    def told(self, sums: Sums) -> dict[str, float]:
        """The losses and the metrics that are plain functions: others have objects that the training thread uses."""
        losses = len(self.objective)
        out = self.objective.means(sums[0 : 2 * losses : 2].tolist(), sums[1 : 2 * losses : 2].tolist())
        at = self._head
        for metric, _ in self._metrics:
            if isinstance(metric, _Function):
                out[metric.name] = metric.value(sums[at : at + 1], float(sums[2 * losses]), ())
            at += metric.width
        return out

    @property
    def averaged(self) -> list[str]:
        """The metrics of which the last `measure` was given one number for all rows."""
        return [metric.name for metric, _ in self._metrics if isinstance(metric, _Function) and metric.averaged]

    def rows(self, sums: Sums) -> int:
        return int(sums[2 * len(self.objective)])

    def lost(self, sums: Any) -> float | None:
        """A loss that is NaN or infinite; None: there is none."""
        for loss in sums[0 : 2 * len(self.objective) : 2].tolist():
            if not math.isfinite(loss):
                return float(loss)
        return None


def _chosen(name: str, outputs: tuple[Any, ...], labels: tuple[Any, ...], which: int | None) -> tuple[Any, Any]:
    if not outputs:
        raise DataError(f"train_fn must return (loss, outputs), because the metric {name} needs the outputs")
    if which is not None:
        return outputs[which], labels[which]
    return (outputs[0] if len(outputs) == 1 else outputs), (labels[0] if len(labels) == 1 else labels)


def _columns(name: str, value: Any) -> dict[str, float]:
    if isinstance(value, Mapping):
        return {f"{name}_{key}": float(one) for key, one in value.items()}
    if isinstance(value, torch.Tensor) and value.numel() > 1:
        return {f"{name}_{at}": number for at, number in enumerate(value.reshape(-1).tolist())}
    return {name: float(value)}
