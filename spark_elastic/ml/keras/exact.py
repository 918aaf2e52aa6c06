"""The steps and measurements of a training of Keras by virtual workers: the same bits for any number of workers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import numpy as np
import tensorflow as tf
import torch

from spark_elastic.collective.shard_sums import tree_sum
from spark_elastic.data.reader import Batch
from spark_elastic.keras.elastic.virtual_shards import KerasVirtualWorkers
from spark_elastic.ml.keras.compiling import CompileArguments
from spark_elastic.ml.keras.feeding import BatchFeeder, BatchPart
from spark_elastic.ml.keras.metrics import KerasMetricAccumulator
from spark_elastic.ml.keras.steps import StepGraphs, part_arguments
from spark_elastic.ml.training.engine import CallbackEvent
from spark_elastic.ml.training.spec import Progress, Sums, Training, add_sums

_TRAIN, _ROWS, _VALIDATE, _CALLBACKS = range(4)
"""The last number of the key of random numbers: of a shard's passes, of its `transformation_fn`, of its validation, of
callbacks."""


class KerasExactSteps:
    """Computes each batch shard by shard, see `KerasVirtualWorkers`, and does the optimizer's step.

    Args:
        training: The settings.
        model: The compiled model.
        feeder: The converter of a shard's rows to arrays.
        metrics: The losses and metrics.
        graphs: The graphs of a shard's pass and of the update.
        compiled: The losses and metrics that the user gave, which may have random generators.
    """

    def __init__(
        self,
        training: Training,
        model: Any,
        feeder: BatchFeeder,
        metrics: KerasMetricAccumulator,
        graphs: StepGraphs,
        compiled: CompileArguments,
    ) -> None:
        assert training.virtual_workers is not None
        self.workers = KerasVirtualWorkers(
            training.virtual_workers,
            model,
            model.optimizer,
            seed=training.seed,
            threads=training.num_threads or 1,
            variables=graphs.variables,
            drawing={
                "loss": compiled.loss,
                "metrics": [compiled.metrics, compiled.weighted_metrics],
                "transformation_fn": training.transformation_fn,
            },
        )
        self._feeder, self._metrics, self._graphs = feeder, metrics, graphs

    def step(self, batch: Batch, at: Progress, stop: bool) -> tuple[Sums, float | None]:
        """Do a step.

        Returns:
            The sums of losses and metrics of the whole batch followed by the number of workers that ask to stop; and a
            loss of this worker's own rows that is not finite, if there is one.
        """
        workers = self.workers
        shards = self._parts(batch, (at.epoch, batch.start, _ROWS))
        totals = self._totals(shards)
        numbers = torch.zeros((workers.count, self._width("")), dtype=torch.float64)
        computing = workers.compute(bounds_of(batch), (at.epoch, batch.start, _TRAIN), numbers, float(stop))
        while True:
            try:
                shard = next(computing)
            except StopIteration as end:
                votes = float(end.value)
                break
            for part in shards[shard.index]:
                gradients, sums = self._graphs.shard_part(*part_arguments(part, batch.global_rows, totals))
                shard.add_gradients(gradients)
                shard.numbers += torch.from_numpy(sums.numpy())
        own = workers.own_shards()
        own_loss = self._metrics.non_finite_loss(numbers[own.start : own.stop].sum(0).numpy())
        self._graphs.update(workers.gradients)
        return np.append(tree_sum(numbers).numpy(), votes), own_loss

    def seed_callbacks(self, event: CallbackEvent, epoch: int, position: int) -> None:
        """Seed the random generators for an event of callbacks; see `Engine.seed_callbacks`."""
        self.workers.seed_shard((epoch, position, _CALLBACKS), event)

    def measure(
        self,
        batches: Iterable[Batch],
        before: Sums,
        epoch: int,
        around: Callable[[int, Callable[[CallbackEvent], None]], AbstractContextManager[None]],
    ) -> Sums:
        """Measure batches of a validation, each within `around(its number, seed)`; see `Engine.measure_together`.

        `seed` seeds the random generators for an event of callbacks at this batch.
        """
        workers = self.workers
        tables: list[torch.Tensor] = []
        with workers.variables_kept() as put_back:
            for batch in batches:
                table = torch.zeros((workers.count, self._width("val_")), dtype=torch.float64)
                seed = partial(self.seed_callbacks, epoch=epoch, position=batch.start)
                with around(batch.start // batch.global_rows, seed):
                    shards = self._parts(batch, (epoch, batch.start, _VALIDATE))
                    totals = self._totals(shards)
                    for index, parts in shards.items():
                        put_back()
                        workers.seed_shard((epoch, batch.start, _VALIDATE), index)
                        for part in parts:
                            sums = self._graphs.evaluate_part(*part_arguments(part, batch.global_rows, totals))
                            table[index] += torch.from_numpy(sums.numpy())
                tables.append(table)
        sums = before
        if tables:
            for table in workers.gather(torch.stack(tables)):
                sums = add_sums(sums, tree_sum(table).numpy())
        return sums

    def _width(self, prefix: str) -> int:
        return self._metrics.width(prefix)

    def _parts(self, batch: Batch, key: tuple[int, ...]) -> dict[int, list[BatchPart]]:
        """Return the parts of each of this worker's shards that has rows, by the number of the shard."""
        found = {}
        for index, (first, last) in zip(self.workers.own_shards(), bounds_of(batch), strict=True):
            if first == last:
                continue
            rows = {name: values[first:last] for name, values in batch.tensors.items()}
            self.workers.seed_shard(key, index)
            parts = self._feeder.arrays(Batch(rows, last - first, batch.global_rows, batch.start, batch.stop))
            # copied to memory as TensorFlow allocates it
            found[index] = [BatchPart(tuple(map(tf.constant, part)), len(part[0])) for part in parts]
        return found

    def _totals(self, shards: dict[int, list[BatchPart]]) -> list[float]:
        """Return the denominators of the losses in the whole batch, added up in the order of the shards."""
        parts = [[part.tensors for part in shards.get(index, [])] for index in range(self.workers.count)]
        return self._graphs.totals(parts, lambda table: tree_sum(self.workers.gather(table)))


def bounds_of(batch: Batch) -> list[tuple[int, int]]:
    """Return where the rows of each of this worker's shards begin and end among its rows."""
    return list(_bounds(batch.parts))


def _bounds(counts: Sequence[int]) -> Iterator[tuple[int, int]]:
    at = 0
    for rows in counts:
        yield at, at + rows
        at += rows
