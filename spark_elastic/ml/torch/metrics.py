"""Losses and metrics of a module as sums over rows, which are added up over batches, workers and worlds.

The sums of a step are reduced together with the gradients, in one float64 vector. A torchmetrics metric is reset at the
start of each step, and the states that its `update` leaves are added to the sums. States that cannot be added up (lists
of predictions, maxima) are gathered from all workers instead, which costs more.

Metrics of `torchmetrics.classification` take outputs for logits if one of them is outside of [0, 1], which may differ
between the workers' shares of a batch. Where the loss says that they are logits, metrics are given probabilities.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from spark_elastic.errors import DataError, InvalidSettingsError
from spark_elastic.ml.torch.model_step import (
    READ_AT_ONCE,
    ForwardResult,
    LoggedName,
    LoggedValue,
    Number,
    number_of,
)
from spark_elastic.ml.torch.objective import Objective, like
from spark_elastic.ml.training.engine import MetricAccumulator, columns_of
from spark_elastic.ml.training.spec import Piece, Sums
from spark_elastic.reporting.history import FACTS

log = logging.getLogger("spark_elastic.ml")


class _Mean:
    """A mean of numbers, as a sum."""

    width = 1
    gathered = False

    def __init__(self, name: str) -> None:
        self.name = name

    def numbers(self, value: float) -> list[Number]:
        return [value]

    def value(self, sums: Sums, rows: float, pieces: Sequence[dict[str, Any]]) -> float:
        return float(sums[0]) / rows


class _FunctionMetric(_Mean):
    """A metric that is a function of (output, label)."""

    def __init__(self, name: str, function: Any) -> None:
        super().__init__(name)
        self._function = function
        self.averaged = False  # the function returned one number for all rows

    def update(self, output: Any, label: Any, rows: int) -> list[Number]:
        value = self._function(output, label)
        self.averaged = not isinstance(value, torch.Tensor) or not value.dim() or value.shape[0] != rows
        if not self.averaged:
            return [number_of(value.double().sum()) / max(1, value[0].numel())]
        if not isinstance(value, torch.Tensor) or value.numel() == 1:
            return [(number_of(value) if isinstance(value, torch.Tensor) else float(value)) * rows]
        raise DataError(
            f"the metric {self.name} returned a tensor of shape {tuple(value.shape)} for {rows} rows; it must be the "
            "mean over them, or a value for each"
        )


class _Torchmetric:
    """A metric with `update`, `compute`, `reset`, and states with reductions, as torchmetrics has them."""

    def __init__(self, name: str, metric: Any, rule: str | None) -> None:
        _check_states(name, metric)
        self.name = name
        self._metric = copy.deepcopy(metric)
        self._metric.reset()
        self._classifies = any(
            each.__module__.startswith("torchmetrics.classification") for each in type(metric).__mro__
        )
        self._rule = rule  # the rule for predictions from the output's loss; see `objective.rule`
        self._reductions: dict[str, Any] = dict(metric._reductions)
        self._defaults: dict[str, Any] = {
            state: default.cpu() if isinstance(default, torch.Tensor) else default
            for state, default in metric._defaults.items()
        }
        self.gathered = not all(
            isinstance(self._defaults[state], torch.Tensor) and getattr(reduction, "__name__", "") == "dim_zero_sum"
            for state, reduction in self._reductions.items()
        )
        self.width = 0 if self.gathered else sum(self._defaults[state].numel() for state in self._reductions)

    def update(self, output: Any, label: Any, rows: int) -> list[Number]:
        metric = self._metric
        _move(metric, output)
        metric.reset()
        if type(metric).__module__.startswith("torchmetrics.") and isinstance(output, torch.Tensor):
            label = like(label, output.shape)  # they need equal shapes
        if self._classifies and isinstance(output, torch.Tensor) and output.is_floating_point():
            if self._rule == "binary_logit":
                output = output.sigmoid()
            elif self._rule == "argmax" and output.dim() > 1:
                output = output.softmax(1)
        if self._classifies and isinstance(label, torch.Tensor) and label.is_floating_point():
            # losses of logits take floats, metrics of classes do not
            label = label.long() if bool((label == label.round()).all()) else label
        metric.update(output, label)
        return self.numbers(metric)

    def numbers(self, metric: Any) -> list[Number]:
        """Return the states of a metric of this kind, if they can be added up; [] if they are gathered.

        On a GPU, a state is a vector.
        """
        if self.gathered:
            return []
        numbers: list[Number] = []
        for state, default in self._defaults.items():
            if state in self._reductions:
                value = getattr(metric, state)
                on_host = value.device.type in READ_AT_ONCE
                value = value.cpu() if on_host else value
                values = (value.double() - default.to(value.device, torch.float64, non_blocking=True)).reshape(-1)
                numbers += values.tolist() if on_host else [values]
        return numbers

    def states(self, metric: Any = None) -> dict[str, Any]:
        """Return copies of the states of a metric of this kind on the CPU, by name; without one, of the last update."""
        out = {}
        for state in self._reductions:
            value = getattr(self._metric if metric is None else metric, state)
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


def _check_states(name: str, metric: Any) -> None:
    """Raise `InvalidSettingsError` for a metric whose value does not follow from its own states."""
    nested = [each for each in metric.modules() if each is not metric] if hasattr(metric, "modules") else []
    inner = next((each for each in nested if hasattr(each, "_reductions")), None)
    if inner is not None:
        raise InvalidSettingsError(
            f"the metric {name} is a {type(metric).__name__} around a {type(inner).__name__}, whose states cannot be "
            f"added up over workers; give the {type(inner).__name__} itself"
        )
    if not metric._reductions:
        raise InvalidSettingsError(
            f"the metric {name} ({type(metric).__name__}) has no states to add up over workers; declare them with "
            "add_state, or give a function of (output, label)"
        )


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


def _add(numbers: Sequence[Number], into: torch.Tensor) -> None:
    """Add numbers, and tensors of them on a GPU, to a vector."""
    plain: list[float] = []
    tensors = []
    for each in numbers:
        if isinstance(each, torch.Tensor):
            tensors.append((len(plain), each))
            plain += [0.0] * each.numel()
        else:
            plain.append(each)
    vector = torch.tensor(plain, dtype=torch.float64).to(into.device, non_blocking=True)
    for at, each in tensors:
        vector[at : at + each.numel()] = each
    into += vector


class LoggedColumns:
    """The values that a model logs itself, as columns of the history: numbers as means, and torchmetrics metrics.

    The vector of sums has `width` numbers for them: for each its weight, and its sum or its states.
    """

    def __init__(self, logged: Mapping[LoggedName, Any]) -> None:
        self._metrics: dict[LoggedName, _Torchmetric | _Mean] = {}
        self._unexpected: set[str] = set()
        for key, metric in logged.items():
            clashes = key.name == "loss" or LoggedName(key.name, False) in logged
            name = f"val_{key.name}" if key.validation and clashes else key.name
            self._metrics[key] = _Mean(name) if metric is None else _Torchmetric(name, metric, None)
        self.names = [metric.name for metric in self._metrics.values()]
        self.width = sum(1 + metric.width for metric in self._metrics.values())
        self.gathers = any(metric.gathered for metric in self._metrics.values())

    def measure(self, logged: Mapping[LoggedName, LoggedValue], piece: Piece) -> list[Number]:
        """Return the numbers of a forward pass, and add the states that are gathered to `piece`."""
        for name in {key.name for key in logged.keys() - self._metrics.keys()} - self._unexpected - {*FACTS}:
            self._unexpected.add(name)
            log.warning(
                "self.log(%r) is ignored, because the first batch did not log it: the columns of the history are "
                "agreed on before the training. Log it in each step",
                name,
            )
        numbers: list[Number] = []
        for key, metric in self._metrics.items():
            if key not in logged:
                numbers += [0.0] * (1 + metric.width)
                continue
            value, rows = logged[key]
            numbers += (rows, *metric.numbers(value))
            if isinstance(metric, _Torchmetric) and metric.gathered:
                piece[metric.name] = metric.states(value)
        return numbers

    def logs(self, sums: Sums, pieces: Sequence[Piece], live: bool = False) -> dict[str, float]:
        """Return the columns that have values; `live`: without touching a metric's object."""
        out: dict[str, float] = {}
        at = 0
        for metric in self._metrics.values():
            rows, own = float(sums[at]), sums[at + 1 : at + 1 + metric.width]
            at += 1 + metric.width
            if rows and not (live and isinstance(metric, _Torchmetric)):
                out.update(_columns(metric, own, rows, pieces))
        return out


def _columns(metric: _Torchmetric | _Mean, sums: Sums, rows: float, pieces: Sequence[Piece]) -> dict[str, float]:
    own = [piece[metric.name] for piece in pieces if metric.name in piece]
    return columns_of(metric.name, metric.value(sums, rows, own))


class TorchMetricAccumulator(MetricAccumulator):
    """The sums of a module's training, `width` numbers: of each loss sum and denominator; the rows; the metrics.

    If it `gathers`, `measure` returns states to gather from all workers.
    """

    def __init__(
        self, objective: Objective, metrics: Mapping[str, Any], logged: Mapping[LoggedName, Any] | None = None
    ) -> None:
        self._objective = objective
        self._logged = LoggedColumns(logged or {})
        self._metrics: list[tuple[_FunctionMetric | _Torchmetric, int | None]] = []
        for name, metric in metrics.items():
            self._add(name, metric, None)
        self.rows_position = 2 * len(objective)
        self.loss_positions = range(0, self.rows_position, 2)
        self._logged_position = self.rows_position + 1 + sum(metric.width for metric, _ in self._metrics)
        self.width = self._logged_position + self._logged.width
        self.gathers = self._logged.gathers or any(metric.gathered for metric, _ in self._metrics)

    @property
    def names(self) -> list[str]:
        return [*(metric.name for metric, _ in self._metrics), *self._logged.names]

    @property
    def averaged(self) -> list[str]:
        """The metrics that returned one number for all rows in the last `measure`."""
        return [metric.name for metric, _ in self._metrics if isinstance(metric, _FunctionMetric) and metric.averaged]

    def _add(self, name: str, metric: Any, which: int | None) -> None:
        if isinstance(metric, tuple) and len(metric) == 2 and isinstance(metric[0], int):
            which, metric = metric
        if hasattr(metric, "update") and hasattr(metric, "_reductions"):
            self._metrics.append((_Torchmetric(name, metric, self._objective.rule(which)), which))
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
        """Add the sums of a forward pass to the float64 vector `into`; return the metric states that are gathered.

        If the vector is on a GPU, nothing waits for it there.
        """
        pairs = zip(result.sums, result.counts, strict=True)
        numbers = [number for value, count in pairs for number in (number_of(value.detach()), count)]
        numbers.append(float(rows))
        piece: Piece = {}
        outputs = tuple(each.detach() if isinstance(each, torch.Tensor) else each for each in result.outputs)
        with torch.no_grad():
            for metric, which in self._metrics:
                if not outputs:
                    raise DataError(
                        f"train_fn must return (loss, outputs), because the metric {metric.name} needs the outputs"
                    )
                several = [outputs, result.labels]
                if which is None:
                    output, label = (each[0] if len(each) == 1 else each for each in several)
                else:
                    output, label = (each[which] for each in several)
                numbers += metric.update(output, label, rows)
                if isinstance(metric, _Torchmetric) and metric.gathered:
                    piece[metric.name] = metric.states()
        numbers += self._logged.measure(result.logged, piece)
        _add(numbers, into[: self.width])
        return piece

    def logs(self, sums: Sums, pieces: Sequence[Piece], prefix: str = "") -> dict[str, float]:
        return self._logs(sums, pieces, prefix)

    def live_logs(self, sums: Sums) -> dict[str, float]:
        return self._logs(sums, (), live=True)

    def _logs(self, sums: Sums, pieces: Sequence[Piece], prefix: str = "", live: bool = False) -> dict[str, float]:
        end = self.rows_position
        out = self._objective.means(sums[0:end:2].tolist(), sums[1:end:2].tolist())
        at = end + 1
        for metric, _ in self._metrics:
            if not (live and isinstance(metric, _Torchmetric)):
                out.update(_columns(metric, sums[at : at + metric.width], self.rows(sums), pieces))
            at += metric.width
        out = {f"{prefix}{name}": value for name, value in out.items()}
        return {**out, **self._logged.logs(sums[self._logged_position :], pieces, live)}
