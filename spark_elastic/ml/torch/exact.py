"""The engine of an exact training: the same bits for any number of workers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

import spark_elastic.torch as hvd
from spark_elastic.collective.objects import allgather_object
from spark_elastic.data.order.shares import Shares
from spark_elastic.data.reader import Batch
from spark_elastic.errors import CheckpointError, InvalidSettingsError
from spark_elastic.exact.shards import VirtualWorkers, align_tensor
from spark_elastic.exact.sums import rows_of, tree_sum
from spark_elastic.ml.torch.engine import TorchEngine, single_row_norm
from spark_elastic.ml.torch.model_step import TorchBatch
from spark_elastic.ml.torch.spec import TorchTraining
from spark_elastic.ml.training.engine import CallbackEvent, gather_pieces
from spark_elastic.ml.training.spec import Piece, Progress, Sums, add_sums

_TRAIN, _ROWS, _VALIDATE, _CALLBACKS = range(4)  # the last number of the key of random numbers


class ExactTorchEngine(TorchEngine):
    """Computes each batch shard by shard, see `VirtualWorkers`; every worker reads all rows of the batch."""

    _workers: VirtualWorkers

    def __init__(self, training: TorchTraining, keeps_best: bool) -> None:
        if (device := hvd.device(training.device)).type != "cpu":
            raise InvalidSettingsError(
                f"consistency='exact' trains on the CPU, and this worker would train on {device}; set device='cpu'"
            )
        super().__init__(training, keeps_best)

    def _reducing(self, training: TorchTraining, model: torch.nn.Module, optimizer: Any, named: Any) -> Any:
        assert training.virtual_workers is not None
        self._workers = VirtualWorkers(
            training.virtual_workers,
            model,
            optimizer,
            seed=training.seed,
            threads=training.num_threads or 1,
            generators=training.generators,
        )
        return optimizer

    def set_world(self, rank: int, size: int, shares: Shares = None) -> None:
        super().set_world(rank, size, shares)
        self._workers.reduction.shares = None if shares is None else tuple(shares)

    def divided(self, rows: int) -> tuple[int, int]:
        return self._workers.count, 1

    @property
    def reader_world(self) -> tuple[int, int, Shares]:
        return 0, 1, None

    def use_threads(self, count: int) -> None:
        """Do nothing: bits may depend on the number of threads, and the world must not decide it."""

    def share_buffers(self) -> None:
        """Do nothing: they are the same on all workers."""

    def _seed(self, epoch: int, position: int) -> None:
        """Do nothing: each shard is seeded."""

    def _gradients(self, batch: Batch, at: Progress, stop: bool) -> tuple[torch.Tensor, tuple[Piece, ...]]:
        model, objective, metrics, workers = self.model, self._objective, self.metrics, self._workers
        shards = self._parts(batch, (at.epoch, batch.start, _ROWS))
        key = (at.epoch, batch.start, _TRAIN)
        counts = self._counts(shards, key) if objective.coupled else ()
        numbers = torch.zeros((workers.count, metrics.width), dtype=torch.float64)
        pieces: list[Piece] = []
        computing = workers.compute(self._bounds(batch), key, numbers, self._votes(stop))
        while True:
            try:
                shard = next(computing)
            except StopIteration as end:
                votes = end.value
                break
            for part in shards[shard.index]:
                with single_row_norm(model, part.rows):
                    result = objective.forward(model, part)
                objective.share(result, batch.global_rows, counts).backward()  # type: ignore[no-untyped-call]
                pieces.append(metrics.measure(result, part.rows, numbers[shard.index]))
        own = workers.reduction.shards()
        self._own_numbers = numbers[own.start : own.stop].sum(0)
        total = torch.cat([tree_sum(numbers), torch.tensor(votes, dtype=torch.float64)])
        return total, gather_pieces(pieces) if metrics.gathers else ()

    def _counts(self, shards: Mapping[int, Sequence[TorchBatch]], key: tuple[int, ...]) -> list[float]:
        """Return the denominators of the losses for the whole batch, found by a forward pass of each shard."""
        workers = self._workers
        table = torch.zeros((workers.count, len(self._objective)), dtype=torch.float64)
        with torch.no_grad(), workers.buffers_kept() as put_back:
            for index, parts in shards.items():
                put_back()
                workers.seed_shard(key, index)
                for part in parts:
                    with single_row_norm(self.model, part.rows):
                        result = self._objective.forward(self.model, part)
                    table[index] += torch.tensor([*map(float, result.counts)], dtype=torch.float64)
        return tree_sum(workers.reduction.gather(table)).tolist()

    def _bounds(self, batch: Batch) -> list[tuple[int, int]]:
        """Return where the rows of each of this worker's shards begin and end in the batch."""
        workers = self._workers
        return [rows_of(shard, workers.count, batch.global_rows) for shard in workers.reduction.shards()]

    def _parts(self, batch: Batch, key: tuple[int, ...]) -> dict[int, list[TorchBatch]]:
        """Return the parts of each of this worker's shards that has rows, by the number of the shard."""
        found = {}
        for index, (first, last) in zip(self._workers.reduction.shards(), self._bounds(batch), strict=True):
            if first == last:
                continue
            rows = {name: values[first:last] for name, values in batch.tensors.items()}
            self._workers.seed_shard(key, index)
            parts = self._maker.parts(Batch(rows, last - first, batch.global_rows, batch.start, batch.stop))
            found[index] = [_aligned(part) for part in parts]
        return found

    def measure_together(self, batches: Iterable[Batch], before: Sums) -> tuple[Sums, tuple[Piece, ...]]:
        metrics, workers, epoch = self.metrics, self._workers, self._validated.epoch
        tables: list[torch.Tensor] = []
        pieces: list[tuple[int, int, Piece]] = []
        with torch.no_grad(), workers.buffers_kept() as put_back:
            for number, batch in enumerate(batches):
                table = torch.zeros((workers.count, metrics.width), dtype=torch.float64)
                for index, parts in self._parts(batch, (epoch, batch.start, _VALIDATE)).items():
                    put_back()
                    workers.seed_shard((epoch, batch.start, _VALIDATE), index)
                    for part in parts:
                        result = self._objective.forward(self.model, part)
                        pieces.append((number, index, metrics.measure(result, part.rows, table[index])))
                tables.append(table)
        sums = before
        if tables:
            for table in workers.reduction.gather(torch.stack(tables)):
                sums = add_sums(sums, tree_sum(table).numpy())
        if not metrics.gathers:
            return sums, ()
        everyones = [each for own in allgather_object(pieces) for each in own]
        return sums, tuple(piece for *_, piece in sorted(everyones, key=lambda each: each[:2]))

    def seed_callbacks(self, event: CallbackEvent, epoch: int = 0, position: int = 0) -> None:
        self._workers.seed_shard((epoch, position, _CALLBACKS), event)

    def conditions(self) -> dict[str, Any]:
        return {"virtual_workers": self._workers.count, "environment": self._workers.environment_check.environment}

    def check_conditions(self, then: Mapping[str, Any]) -> None:
        if then.get("virtual_workers") != self._workers.count:
            raise CheckpointError(
                f"the checkpoint was written with virtual_workers={then.get('virtual_workers')}, but virtual_workers "
                f"is {self._workers.count} now; use another run_id to start over"
            )
        self._workers.environment_check.compare(then["environment"])

    def finish(self) -> None:
        self.optimizer.zero_grad()

    def close(self) -> None:
        self._hooks.put_back()
        self._workers.close()


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
