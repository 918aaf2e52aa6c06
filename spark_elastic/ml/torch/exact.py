"""The steps and measurements of a training by virtual workers: the same bits for any number of workers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch

from spark_elastic.collective.objects import allgather_object
from spark_elastic.collective.shard_sums import tree_sum
from spark_elastic.data.reader import Batch
from spark_elastic.ml.torch.batch_norm import single_row_norm
from spark_elastic.ml.torch.metrics import TorchMetricAccumulator
from spark_elastic.ml.torch.model_step import TorchBatch
from spark_elastic.ml.torch.objective import BatchMaker, Objective
from spark_elastic.ml.torch.spec import TorchTraining
from spark_elastic.ml.training.engine import CallbackEvent, gather_pieces
from spark_elastic.ml.training.spec import Piece, Progress, Sums, add_sums
from spark_elastic.torch.elastic.virtual_shards import VirtualWorkers, align_tensor

_TRAIN, _ROWS, _VALIDATE, _CALLBACKS = range(4)
"""The last number of the key of random numbers: of a shard's passes, of its `transformation_fn`, of its validation, of
callbacks."""


class ExactSteps:
    """Computes each batch shard by shard, see `VirtualWorkers`; a `TorchEngine` applies the gradients."""

    def __init__(
        self,
        training: TorchTraining,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        objective: Objective,
        metrics: TorchMetricAccumulator,
        maker: BatchMaker,
    ) -> None:
        assert training.virtual_workers is not None
        self.workers = VirtualWorkers(
            training.virtual_workers,
            model,
            optimizer,
            seed=training.seed,
            threads=training.num_threads or 1,
            drawing={
                "loss": training.loss,
                "metrics": training.metrics,
                "transformation_fn": training.transformation_fn,
            },
        )
        self._training = training
        self._model = model
        self._objective, self._metrics, self._maker = objective, metrics, maker

    def gradients(self, batch: Batch, at: Progress, stop: bool) -> tuple[torch.Tensor, tuple[Piece, ...], float | None]:
        """Compute the gradients of a batch.

        Returns:
            The sums of losses and metrics of the whole batch followed by the stop flag, float64; the metric states that
            were gathered; and a loss of this worker's own rows that is not finite, if there is one.
        """
        model, objective, metrics, workers = self._model, self._objective, self._metrics, self.workers
        shards = self._parts(batch, (at.epoch, batch.start, _ROWS))
        key = (at.epoch, batch.start, _TRAIN)
        counts = self._counts(shards, key) if objective.coupled else ()
        numbers = torch.zeros((workers.count, metrics.width), dtype=torch.float64)
        pieces: list[Piece] = []
        computing = workers.compute(_bounds(batch), key, numbers, float(stop))
        while True:
            try:
                shard = next(computing)
            except StopIteration as end:
                votes = float(end.value)
                break
            for part in shards[shard.index]:
                with single_row_norm(model, part.rows):
                    result = objective.forward(model, part)
                objective.share(result, batch.global_rows, counts).backward()  # type: ignore[no-untyped-call]
                pieces.append(metrics.measure(result, part.rows, numbers[shard.index]))
        own = workers.own_shards()
        own_loss = metrics.non_finite_loss(numbers[own.start : own.stop].sum(0).numpy())
        total = torch.cat([tree_sum(numbers), torch.tensor([votes], dtype=torch.float64)])
        return total, gather_pieces(pieces) if metrics.gathers else (), own_loss

    def _counts(self, shards: Mapping[int, Sequence[TorchBatch]], key: tuple[int, ...]) -> list[float]:
        """Return the denominators of the losses for the whole batch, which a forward pass of each shard tells."""
        workers = self.workers
        table = torch.zeros((workers.count, len(self._objective)), dtype=torch.float64)
        with torch.no_grad(), workers.buffers_kept() as put_back:
            for index, parts in shards.items():
                put_back()
                workers.seed_shard(key, index)
                for part in parts:
                    with single_row_norm(self._model, part.rows):
                        result = self._objective.forward(self._model, part)
                    table[index] += torch.tensor(result.counts, dtype=torch.float64)
        return tree_sum(workers.gather(table)).tolist()

    def seed_callbacks(self, event: CallbackEvent, epoch: int, position: int) -> None:
        """Seed the random generators for an event of callbacks; see `Engine.seed_callbacks`."""
        self.workers.seed_shard((epoch, position, _CALLBACKS), event)

    def measure(self, batches: Iterable[Batch], before: Sums, epoch: int) -> tuple[Sums, tuple[Piece, ...]]:
        """Measure batches of a validation; see `Engine.measure_together`."""
        metrics, workers = self._metrics, self.workers
        tables: list[torch.Tensor] = []
        pieces: list[tuple[int, int, Piece]] = []
        with torch.no_grad(), workers.buffers_kept() as put_back:
            for number, batch in enumerate(batches):
                table = torch.zeros((workers.count, metrics.width), dtype=torch.float64)
                for index, parts in self._parts(batch, (epoch, batch.start, _VALIDATE)).items():
                    put_back()
                    workers.seed_shard((epoch, batch.start, _VALIDATE), index)
                    for part in parts:
                        result = self._objective.forward(self._model, part)
                        pieces.append((number, index, metrics.measure(result, part.rows, table[index])))
                tables.append(table)
        sums = before
        if tables:
            for table in workers.gather(torch.stack(tables)):
                sums = add_sums(sums, tree_sum(table).numpy())
        if not metrics.gathers:
            return sums, ()
        everyones = [each for own in allgather_object(pieces) for each in own]
        return sums, tuple(piece for *_, piece in sorted(everyones, key=lambda each: each[:2]))

    def _parts(self, batch: Batch, key: tuple[int, ...]) -> dict[int, list[TorchBatch]]:
        """Return the parts of each of this worker's shards that has rows, by the number of the shard."""
        found = {}
        for index, (first, last) in zip(self.workers.own_shards(), _bounds(batch), strict=True):
            if first == last:
                continue
            rows = {name: values[first:last] for name, values in batch.tensors.items()}
            self.workers.seed_shard(key, index)
            parts = self._maker.parts(Batch(rows, last - first, batch.global_rows, batch.start, batch.stop))
            found[index] = [_aligned(part) for part in parts]
        return found


def _bounds(batch: Batch) -> list[tuple[int, int]]:
    """Return where the rows of each of this worker's shards begin and end among its rows."""
    bounds, at = [], 0
    for rows in batch.parts:
        bounds.append((at, at + rows))
        at += rows
    return bounds


def _aligned(part: TorchBatch) -> TorchBatch:
    """Return the batch with tensors that begin where torch would allocate them, see `align_tensor`."""
    tensors = {id(each): align_tensor(each) for each in part.tensors.values() if isinstance(each, torch.Tensor)}
    return TorchBatch(
        tuple(tensors.get(id(each), each) for each in part.inputs),
        tuple(tensors.get(id(each), each) for each in part.labels),
        None if part.weights is None else tensors.get(id(part.weights), part.weights),
        part.rows,
        {name: tensors.get(id(each), each) for name, each in part.tensors.items()},
    )
