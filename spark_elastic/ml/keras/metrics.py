"""Metrics as sums that are added up over batches, workers and worlds: each row counts once.

The state of a Keras metric is variables that batches are added to. Here each step begins with empty metrics, and what
it has left in them travels with the gradients. The sums of an epoch are plain numbers in float64; they are put into the
metrics to be asked for what they come to.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from spark_elastic.errors import InvalidSettingsError
from spark_elastic.ml.training.progress import Sums

_AUTOMATIC_NUMBER = re.compile(r"_\d+$")
"""Of a name that Keras has chosen, different in each process."""


class MetricSums:
    """The metrics of a compiled model whose variables exist, and the values that a train_step of one's own returns.

    The vector: what the metrics' variables hold beyond their first values; the returned values times the rows of each
    part; rows.

    Raises: InvalidSettingsError: a metric whose variables cannot be added up.
    """

    def __init__(self, model: Any) -> None:
        self._model = model
        found = {id(variable): variable for metric in model.metrics for variable in metric.variables}
        self._variables = list(found.values())
        for metric in model.metrics:
            for variable in metric.variables:
                if getattr(variable, "aggregation", "sum") != "sum":
                    raise InvalidSettingsError(
                        f"the metric {metric.name} keeps {variable.name} with aggregation={variable.aggregation!r}, "
                        "and only sums can be added up over workers; make it one, or take the metric out and compute "
                        "it of the model's outputs"
                    )
        model.reset_metrics()
        self._first = [np.array(variable.numpy()) for variable in self._variables]
        self._sizes = [first.size for first in self._first]
        starts = dict(zip(map(id, self._variables), np.cumsum([0, *self._sizes]).tolist(), strict=False))
        means = [each for each in _single(model.metrics) if isinstance(each, keras.metrics.Mean)]
        self._losses = [starts[id(each.total)] for each in means if each.name == "loss"]
        self._steps = {"": model.train_step, "val_": model.test_step}
        self.returned: dict[str, list[str]] = {"": [], "val_": []}
        """Names of what a train_step and a test_step of the model's own return, once it is known."""

    def width(self, prefix: str = "") -> int:
        return sum(self._sizes) + len(self.returned[prefix]) + 1

    @property
    def names(self) -> list[str]:
        """Of all that is measured, for comparison with those of a checkpoint."""
        metrics = [_AUTOMATIC_NUMBER.sub("", str(metric.name)) for metric in self._model.metrics]
        return [*metrics, *self.returned[""], f"{self.width()} numbers"]

    # --- in a graph -------------------------------------------------------------------------------

    def reset(self) -> None:
        for variable, first in zip(self._variables, self._first, strict=True):
            variable.assign(first)

    def held(self) -> list[Any]:
        """Return what has come in until now, for `put_back`."""
        return [variable.value.read_value() for variable in self._variables]

    def put_back(self, values: Sequence[Any]) -> None:
        for variable, value in zip(self._variables, values, strict=True):
            variable.assign(value)

    def read(self) -> Any:
        """What has come in since `reset`: float64, [n]."""
        parts = []
        for variable, first in zip(self._variables, self._first, strict=True):
            value = tf.cast(tf.reshape(variable.value, [-1]), tf.float64)
            parts.append(value - first.reshape(-1).astype(np.float64) if first.any() else value)
        return tf.concat(parts, 0) if parts else tf.zeros([0], tf.float64)

    def of_returned(self, prefix: str, logs: Any, rows: Any) -> Any:
        """The scalars that a step of the model's own has returned, times its rows: float64, [number of names]."""
        if _is_kerass(self._steps[prefix]) or not isinstance(logs, Mapping):
            return tf.zeros([0], tf.float64)
        scalars = {str(name): value for name, value in logs.items() if _is_scalar(value)}
        self.returned[prefix] = list(scalars)
        if not scalars:
            return tf.zeros([0], tf.float64)
        return tf.stack([tf.cast(tf.reshape(value, []), tf.float64) for value in scalars.values()]) * rows

    # --- outside of graphs ------------------------------------------------------------------------

    def logs(self, sums: Sums, prefix: str = "") -> dict[str, float]:
        """What the sums come to, by name; a metric of several values becomes several columns."""
        at, idle = 0, set()
        for variable, first, size in zip(self._variables, self._first, self._sizes, strict=True):
            added = sums[at : at + size]
            if not added.any():
                idle.add(id(variable))
            value = first.astype(np.float64) + added.reshape(first.shape)
            variable.assign((value if first.dtype.kind == "f" else value.round()).astype(first.dtype))
            at += size
        rows = self.rows(sums)
        names = self.returned[prefix]
        returned = dict(zip(names, (sums[at : at + len(names)] / max(rows, 1)).tolist(), strict=True))
        out: dict[str, float] = {}
        for metric in self._model.metrics:
            touched = any(id(variable) not in idle for variable in metric.variables)
            result = metric.result()
            columns = result if isinstance(result, Mapping) else {metric.name: result}
            for name, value in columns.items():
                if touched or (name not in returned and _is_kerass(self._steps[prefix])):
                    out.update(_columns(str(name), value))
        out = {**{name: value for name, value in returned.items() if name not in out}, **out}
        loss = {"loss": out.pop("loss")} if "loss" in out else {}
        return {f"{prefix}{name}": value for name, value in {**loss, **out}.items()}

    def told(self, sums: Sums) -> dict[str, float]:
        """What is a mean, without a word to the metrics themselves, which the training thread uses."""
        out: dict[str, float] = {}
        starts = dict(zip(map(id, self._variables), np.cumsum([0, *self._sizes]).tolist(), strict=False))
        for metric in _single(self._model.metrics):
            if isinstance(metric, keras.metrics.Mean):
                total, count = (float(sums[starts[id(variable)]]) for variable in (metric.total, metric.count))
                if count:
                    out[str(metric.name)] = total / count
        rows = self.rows(sums)
        returned = self.returned[""]
        at = sum(self._sizes)
        if rows:
            out.update(zip(returned, (sums[at : at + len(returned)] / rows).tolist(), strict=True))
        loss = {"loss": out.pop("loss")} if "loss" in out else {}
        return {**loss, **out}

    def rows(self, sums: Sums) -> int:
        return int(sums[-1])

    def lost(self, sums: Sums) -> float | None:
        """A loss of a training that is NaN or infinite; None: there is none.

        sums: also those of the metrics alone, as `read` gives them.
        """
        names = self.returned[""]
        places = [*self._losses, *([sum(self._sizes) + names.index("loss")] if "loss" in names else [])]
        for place in places:
            if place < len(sums) and not math.isfinite(sums[place]):
                return float(sums[place])
        return None


def _is_kerass(step: Any) -> bool:
    """Whether it is the train_step or test_step that every model has."""
    return str(step.__func__.__module__).partition(".")[0] == "keras"


def _is_scalar(value: Any) -> bool:
    shape = getattr(value, "shape", None)
    return isinstance(value, (int, float)) or (shape is not None and tuple(shape) == ())


def _columns(name: str, value: Any) -> dict[str, float]:
    values: Sequence[float] = np.asarray(value, np.float64).reshape(-1).tolist()
    return {name: values[0]} if len(values) == 1 else {f"{name}_{at}": one for at, one in enumerate(values)}


def _single(metrics: Sequence[Any]) -> list[Any]:
    """Without the containers that Keras puts the compiled ones into."""
    return [each for metric in metrics for each in (getattr(metric, "metrics", None) or [metric])]
