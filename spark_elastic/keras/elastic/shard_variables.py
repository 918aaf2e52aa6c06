"""Variables that shards of a batch change besides the trained weights: moving statistics, metrics, counters, seeds."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf
import torch

from spark_elastic.collective.shard_sums import tree_sum
from spark_elastic.errors import UsageError
from spark_elastic.keras.backend import describe

_EXACT_IN_FLOAT64 = 2.0**53
_FEW = 8
"""Up to this number of variables, reading or assigning one after another takes less time than the call of a graph."""


class ShardVariables:
    """Lets each shard start from the values before the step, and combines what the shards leave in them.

    - Moving statistics of batch normalisation become the average of what the shards leave, weighted by their rows.
    - What shards add to the variables of metrics, and to integers, is added up.
    - Any other variable must be left with the same value by all shards.

    Args:
        model: A built model or layer.
        metrics: Metrics, whose variables are sums.
        seeds: A function that returns more variables to set when a shard begins, as `begin_shard` is told.
        gather: Sums a float64 matrix with a row for each shard over the workers, in place; each row is 0 on all workers
            but one.
    """

    def __init__(
        self,
        model: Any,
        metrics: Sequence[Any],
        seeds: Callable[[], list[Any]],
        gather: Callable[[torch.Tensor], torch.Tensor],
    ) -> None:
        self._model, self._metrics = model, metrics
        self._more_seeds = seeds
        self._gather = gather
        self._known: list[int] = []
        self._before: list[Any] = []
        self._left: dict[int, list[Any]] = {}
        """By shard: what it has left in `_others`, if it has changed one of them."""
        self.seeds: list[Any] = []

    def begin_step(self) -> int:
        """Copy the variables before the first shard; return the length of the vectors of `end_shard`."""
        seeds = [*map(_native, seeds_of(self._model)), *self._more_seeds()]
        metrics = [_native(variable) for metric in self._metrics for variable in metric.variables]
        norms = [_native(each) for layer in _norms(self._model) for each in (layer.moving_mean, layer.moving_variance)]
        of_norms = set(map(id, norms))
        others = [each for each in buffers_of(self._model) if id(_native(each)) not in of_norms]
        known = [id(variable) for variable in (*seeds, *metrics, *norms, *map(_native, others))]
        if known != self._known:
            self._build(seeds, metrics, norms, others)
            self._known = known
        self._left = {}
        self._before = list(self._read())
        return self._width

    def begin_shard(self, seeds: Sequence[Any]) -> None:
        """Give all variables the values from before the step, and the seeds these values."""
        self._begin(self._before[len(self.seeds) :], self._seed_values(seeds))

    def set_seeds(self, seeds: Sequence[Any]) -> None:
        """Give the seeds these values, and leave other variables as they are."""
        self._set_seeds(self._seed_values(seeds))

    def _seed_values(self, seeds: Sequence[Any]) -> list[Any]:
        return [np.asarray(each, kind) for each, kind in zip(seeds, self._seed_kinds, strict=True)]

    def end_shard(self, shard: int) -> torch.Tensor:
        """Return by how much the shard has changed the variables, and a flag for each other one: float64."""
        if not self._width:
            return torch.zeros(0, dtype=torch.float64)
        vector = self._end(self._before[len(self.seeds) :]).numpy()
        if self._others and vector[len(vector) - len(self._others) :].any():
            self._left[shard] = [variable.numpy() for variable in self._others]
        return torch.from_numpy(np.array(vector))

    def check_metrics(self) -> None:
        """Raise UsageError if a shard has made variables of a metric, which would have this worker's rows alone."""
        for metric in self._metrics:
            if any(id(_native(each)) not in self._known for each in metric.variables):
                raise UsageError(
                    f"the metric {metric.name} has made its variables in a shard; make them before, on all workers: "
                    "call it on some rows and then its reset_state()"
                )

    def put_back(self) -> None:
        """Put all variables back to the values from before the step, which has failed or did not train."""
        self._put_back(self._before)

    def combine(self, rows: torch.Tensor, counts: torch.Tensor, training: bool) -> None:
        """Set the variables to what all shards together leave.

        Args:
            rows: The vectors of all shards.
            counts: The rows of each shard, float64.
            training: False: variables that are no metrics' keep their values from before.

        Raises:
            UsageError: Shards have left different values in a variable that cannot be combined.
            HorovodInternalError: A peer is gone.
        """
        if not self._width:
            return
        others = len(self._others)
        flags = rows[:, rows.shape[1] - others :]
        present = [shard for shard, count in enumerate(counts.tolist()) if count]
        contents = self._contents(present) if training and others and bool(flags.any()) else None
        sums, averages = rows[:, : self._sums], rows[:, self._sums : rows.shape[1] - others]
        weights = (counts / counts.sum().clamp(min=1.0)).reshape(-1, 1) * float(training)
        totals = torch.cat([tree_sum(sums.contiguous()), tree_sum((averages * weights).contiguous())])
        before = self._before[len(self.seeds) :]
        self._end_step(before, totals.numpy())
        if contents is not None:
            self._combine_others(contents, present)

    # --- graphs -------------------------------------------------------------------------------------------

    def _build(self, seeds: list[Any], metrics: list[Any], norms: list[Any], others: list[Any]) -> None:
        self.seeds = seeds
        self._seed_kinds = [variable.dtype.as_numpy_dtype for variable in seeds]
        self._others, self._names = list(map(_native, others)), [describe(each).path for each in others]
        counted = [*metrics, *norms]
        everything = [*counted, *self._others]
        sizes = [int(np.prod(variable.shape)) for variable in counted]
        self._sums = sum(sizes[: len(metrics)])
        self._width = sum(sizes) + len(self._others)
        few = len(seeds) + len(everything) <= _FEW

        def graph(function: Any) -> Any:
            return tf.function(function, autograph=False)

        def graph_of_many(function: Any) -> Any:
            return function if few else graph(function)

        def set_seeds(values: list[Any]) -> None:
            for variable, value in zip(seeds, values, strict=True):
                variable.assign(value, read_value=False)

        def begin(before: list[Any], values: list[Any]) -> None:
            set_seeds(values)
            for variable, value in zip(everything, before, strict=True):
                variable.assign(value, read_value=False)

        def put_back(before: list[Any]) -> None:
            for variable, value in zip([*seeds, *everything], before, strict=True):
                variable.assign(value, read_value=False)

        def end(before: list[Any]) -> Any:
            parts = [
                tf.reshape(tf.cast(variable, tf.float64) - tf.cast(value, tf.float64), [-1])
                for variable, value in zip(counted, before, strict=False)
            ]
            flags = [
                tf.cast(_changed(variable.read_value(), value), tf.float64)
                for variable, value in zip(self._others, before[len(counted) :], strict=True)
            ]
            return tf.concat([*parts, tf.stack(flags)] if flags else [*parts, tf.zeros([0], tf.float64)], 0)

        def end_step(before: list[Any], totals: Any) -> None:
            for variable, value, total in zip(counted, before, tf.split(totals, sizes) if sizes else [], strict=False):
                now = tf.cast(value, tf.float64) + tf.reshape(total, variable.shape)
                variable.assign(tf.cast(now, variable.dtype), read_value=False)
            for variable, value in zip(self._others, before[len(counted) :], strict=True):
                variable.assign(value, read_value=False)

        self._begin, self._set_seeds = graph_of_many(begin), graph_of_many(set_seeds)
        self._put_back = graph_of_many(put_back)
        self._end, self._end_step = graph(end), graph(end_step)
        self._read = graph_of_many(lambda: [variable.read_value() for variable in (*seeds, *everything)])

    # --- variables without a rule ---------------------------------------------------------------------------

    def _values_before(self) -> list[Any]:
        return [value.numpy() for value in self._before[len(self._before) - len(self._others) :]]

    def _contents(self, present: Sequence[int]) -> list[torch.Tensor]:
        """Return what all shards have left in each other variable: a float64 matrix with a row for each shard."""
        before = self._values_before()
        for name, value in zip(self._names, before, strict=True):
            if value.dtype.kind not in "fiub" and str(value.dtype) != "bfloat16":
                raise UsageError(f"the variable {name} is {value.dtype}, and was changed in a shard; {_ADVICE}")
        sizes = [value.size for value in before]
        matrix = torch.zeros((max(present) + 1, sum(sizes) + 1), dtype=torch.float64)
        for shard, left in self._left.items():
            matrix[shard, :-1] = torch.cat([_flat(each) for each in left])
            matrix[shard, -1] = 1.0
        self._gather(matrix)
        unchanged = torch.cat([_flat(each) for each in before]) + 0.0
        matrix[:, :-1] = torch.where(matrix[:, -1:] > 0, matrix[:, :-1], unchanged)
        return list(matrix[:, :-1].split(sizes, dim=1))

    def _combine_others(self, contents: Sequence[torch.Tensor], present: Sequence[int]) -> None:
        for name, variable, values, value in zip(
            self._names, self._others, contents, self._values_before(), strict=True
        ):
            left, before = [values[shard] for shard in present], _flat(value)
            total = left[0]
            if value.dtype.kind in "iu":
                total = before + sum((each - before for each in left), torch.zeros_like(before))
                if bool((total.abs() >= _EXACT_IN_FLOAT64).any()):
                    raise UsageError(f"the variable {name} counts beyond 2**53, which cannot be added up exactly")
            elif not all(_same(each, left[0]) for each in left):
                raise UsageError(
                    f"the shards of a batch have left different values in the variable {name}, and no rule says how to "
                    f"combine them; {_ADVICE}"
                )
            variable.assign(tf.cast(total.numpy().reshape(value.shape), variable.dtype))


_ADVICE = (
    "only the moving statistics of BatchNormalization, metrics and integer counters can depend on a shard's rows: "
    "update others after the shards, from values that are the same on all workers"
)


def buffers_of(model: Any) -> list[Any]:
    """Return the variables that a forward pass changes, such as moving means; frozen weights are not among them."""
    trained = {id(each) for layer in model._flatten_layers() for each in layer._trainable_variables}
    return [each for each in model.non_trainable_weights if id(each) not in trained]


def seeds_of(model: Any) -> list[Any]:
    """Return the states of the model's random generators."""
    known = {id(each) for each in model.weights}
    return [each for each in model.variables if id(each) not in known and tuple(each.shape) == (2,)]


def _norms(model: Any) -> list[Any]:
    """Return the layers of batch normalisation that keep moving statistics as Keras does."""
    kind = keras.layers.BatchNormalization
    return [each for each in model._flatten_layers() if isinstance(each, kind) and type(each).call is kind.call]


def _native(variable: Any) -> Any:
    return variable.value if isinstance(variable, keras.Variable) else variable


def _changed(now: Any, before: Any) -> Any:
    different = tf.not_equal(now, before)
    if now.dtype.is_floating:
        different = tf.logical_and(
            different, tf.logical_not(tf.logical_and(tf.math.is_nan(now), tf.math.is_nan(before)))
        )
    return tf.reduce_any(different)


def _flat(array: Any) -> torch.Tensor:
    return torch.from_numpy(np.array(array, np.float64).reshape(-1))


def _same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return True if two tensors have the same values; a NaN is the same as another."""
    return bool(((one == other) | ((one != one) & (other != other))).all())
