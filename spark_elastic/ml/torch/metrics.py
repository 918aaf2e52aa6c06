"""Losses and metrics of a module as sums over rows, which are added up over batches, workers and worlds.

The sums of a step are reduced together with the gradients, in one float64 vector. A torchmetrics metric is reset at the
start of each step, and the states that its `update` leaves are added to the sums. States that cannot be added up (lists
of predictions, maxima) are gathered from all workers instead, which costs more.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from spark_elastic.errors import DataError, InvalidSettingsError
from spark_elastic.ml.torch.objective import ForwardResult, Objective
from spark_elastic.ml.training.engine import MetricAccumulator, columns_of
from spark_elastic.ml.training.spec import Piece, Sums


class _FunctionMetric:
    """A metric that is a function of (output, label)."""

    width = 1
    gathered = False

    def __init__(self, name: str, function: Any) -> None:
        self.name = name
        self._function = function
        self.averaged = False
        """The function returned one number for all rows, so the metric is an average of such numbers."""

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

    def value(self, sums: Sums, rows: float, pieces: Sequence[dict[str, Any]]) -> float:
        return float(sums[0]) / rows


class _Torchmetric:
    """A metric with `update`, `compute`, `reset`, and states with reductions, as torchmetrics has them."""

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

    def states(self) -> dict[str, Any]:
        """Return copies of the states on the CPU, by name."""
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
    """Move a metric to the device of the outputs; to the CPU without outputs."""
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


class TorchMetricAccumulator(MetricAccumulator):
    """The sums of a module's training: for each loss its sum and its denominator; the rows; then the metrics.

    Attributes:
        width: the length of the vector.
        gathers: whether `measure` returns states that must be gathered from all workers.

    Raises:
        InvalidSettingsError: a value of `metrics` is neither a function nor a metric.
    """

    def __init__(self, objective: Objective, metrics: Mapping[str, Any]) -> None:
        self._objective = objective
        self._metrics: list[tuple[_FunctionMetric | _Torchmetric, int | None]] = []
        for name, metric in metrics.items():
            self._add(name, metric, None)
        self.rows_position = 2 * len(objective)
        self.loss_positions = range(0, self.rows_position, 2)
        self.width = self.rows_position + 1 + sum(metric.width for metric, _ in self._metrics)
        self.gathers = any(metric.gathered for metric, _ in self._metrics)

    @property
    def names(self) -> list[str]:
        return [metric.name for metric, _ in self._metrics]

    @property
    def averaged(self) -> list[str]:
        """The metrics that returned one number for all rows in the last `measure`."""
        return [metric.name for metric, _ in self._metrics if isinstance(metric, _FunctionMetric) and metric.averaged]

    def _add(self, name: str, metric: Any, which: int | None) -> None:
        if isinstance(metric, tuple) and len(metric) == 2 and isinstance(metric[0], int):
            which, metric = metric
        if hasattr(metric, "update") and hasattr(metric, "_reductions"):
            self._metrics.append((_Torchmetric(name, metric), which))
        elif hasattr(metric, "items") and hasattr(metric, "update") and hasattr(metric, "compute"):  # a collection
            for part, one in metric.items():
                self._add(f"{name}_{part}", one, which)
        elif callable(metric):
            self._metrics.append((_FunctionMetric(name, metric), which))
        else:
            raise InvalidSettingsError(
                f"the metric {name} is neither a function of (output, label) nor a torchmetrics metric, but "
                f"{type(metric).__name__}"
            )

    def measure(self, result: ForwardResult, rows: int, into: torch.Tensor) -> Piece:
        """Add the sums of a forward pass to the float64 vector `into`; return the metric states that are gathered."""
        numbers: list[float] = []
        for value, count in zip(result.sums, result.counts, strict=True):
            numbers += (float(value.detach()), count)
        numbers.append(float(rows))
        piece: Piece = {}
        if self._metrics:
            with torch.no_grad():
                outputs = tuple(output.detach() for output in result.outputs)
                for metric, which in self._metrics:
                    output, label = _chosen(metric.name, outputs, result.labels, which)
                    numbers += metric.update(output, label, rows)
                    if isinstance(metric, _Torchmetric) and metric.gathered:
                        piece[metric.name] = metric.states()
        into[: self.width] += torch.tensor(numbers, dtype=torch.float64)
        return piece

    def logs(self, sums: Sums, pieces: Sequence[Piece], prefix: str = "") -> dict[str, float]:
        out = self._losses(sums)
        at = self.rows_position + 1
        for metric, _ in self._metrics:
            own = [piece[metric.name] for piece in pieces if metric.name in piece]
            value: Any = metric.value(sums[at : at + metric.width], self.rows(sums), own)
            at += metric.width
            out.update(columns_of(metric.name, value))
        return {f"{prefix}{name}": value for name, value in out.items()}

    def live_logs(self, sums: Sums) -> dict[str, float]:
        out = self._losses(sums)
        at = self.rows_position + 1
        for metric, _ in self._metrics:
            if isinstance(metric, _FunctionMetric):
                out[metric.name] = metric.value(sums[at : at + 1], self.rows(sums), ())
            at += metric.width
        return out

    def _losses(self, sums: Sums) -> dict[str, float]:
        end = self.rows_position
        return self._objective.means(sums[0:end:2].tolist(), sums[1:end:2].tolist())


def _chosen(name: str, outputs: tuple[Any, ...], labels: tuple[Any, ...], which: int | None) -> tuple[Any, Any]:
    if not outputs:
        raise DataError(f"train_fn must return (loss, outputs), because the metric {name} needs the outputs")
    if which is not None:
        return outputs[which], labels[which]
    return (outputs[0] if len(outputs) == 1 else outputs), (labels[0] if len(labels) == 1 else labels)
