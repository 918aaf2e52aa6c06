"""The base classes that a framework derives from: an engine that computes steps, and an accumulator of its metrics."""

from __future__ import annotations

import math
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from enum import IntEnum
from pathlib import Path
from typing import Any, NamedTuple

import torch

from spark_elastic.collective.objects import allgather_object
from spark_elastic.collective.operations import allreduce_
from spark_elastic.collective.operators import Sum
from spark_elastic.data.order.shares import Shares, most_rows
from spark_elastic.data.reader import Batch
from spark_elastic.elastic.state import ElasticState
from spark_elastic.errors import UsageError
from spark_elastic.ml.training.spec import Piece, Progress, Sums, Training, add_sums

_RANKS = 8
_CPU_QUOTA = Path("/sys/fs/cgroup/cpu.max")


class MetricAccumulator(ABC):
    """The losses and metrics of one training as a float64 vector of sums, added up over batches, workers and worlds."""

    loss_positions: Sequence[int] = ()
    rows_position: int = -1

    @property
    @abstractmethod
    def names(self) -> list[str]:
        """The names of the metrics; a checkpoint is resumed only by a training with the same names."""

    @abstractmethod
    def logs(self, sums: Sums, pieces: Sequence[Piece], prefix: str = "") -> dict[str, float]:
        """Compute the losses and metrics by name, the loss first; a metric of several values has several columns."""

    @abstractmethod
    def live_logs(self, sums: Sums) -> dict[str, float]:
        """Compute the plain means of `logs`. Safe on any thread: the metrics' objects belong to the one that trains."""

    def rows(self, sums: Sums) -> int:
        return int(sums[self.rows_position])

    def non_finite_loss(self, sums: Any) -> float | None:
        """Return a loss that is NaN or infinite; None if all are finite."""
        for position in self.loss_positions:
            if position < len(sums) and not math.isfinite(sums[position]):
                return float(sums[position])
        return None


def columns_of(name: str, value: Any) -> dict[str, float]:
    """Return the columns of the history for a metric: a number, a dict of numbers, or an array or tensor on the CPU."""
    if isinstance(value, Mapping):
        return {f"{name}_{key}": float(one) for key, one in value.items()}
    values = value.reshape(-1).tolist() if hasattr(value, "reshape") else [float(value)]
    return {name: float(values[0])} if len(values) == 1 else {f"{name}_{at}": one for at, one in enumerate(values)}


def gather_pieces(pieces: list[Piece]) -> tuple[Piece, ...]:
    """Gather the metric states of all workers. Raises `HorovodInternalError` if the collective failed."""
    return tuple(piece for everyones in allgather_object(pieces) for piece in everyones)


class Measured(NamedTuple):
    """The measurements of one step, over all workers.

    `stop`: a worker requested the end of the training. `worked_ns`: how long each rank worked in the step before, in
    nanoseconds; 0: unknown. `most`: the largest share of each rank that fits into its memory; 0: unknown.
    """

    sums: Sums
    pieces: tuple[Piece, ...]
    stop: bool
    worked_ns: Sequence[float]
    most: Sequence[float]


class CallbackEvent(IntEnum):
    """A moment of the training at which callbacks are called. Each has random seeds of its own in an exact training."""

    FIT_BEGIN = 0
    EPOCH_BEGIN = 1
    BATCH_BEGIN = 2
    VALIDATION_BEGIN = 3
    EPOCH_END = 4
    FIT_END = 5


class Engine(ABC):
    """One worker's model and optimizer. All workers call the methods that contain collectives alike.

    `best` is a copy of the model for the weights of the best epoch; None: no callback restores them.
    """

    updating: bool = False  # the optimizer has begun to change parameters, and has not finished
    gathers: bool = False  # the pieces that `measure` returns have to be gathered from all workers
    memory_errors: tuple[type[Exception], ...] = (MemoryError, torch.OutOfMemoryError)
    balances: bool = True  # its time can be measured, and it reads no batch before the step before is done
    has_own_statistics: bool = False  # a layer computes statistics over this worker's rows of a batch

    def __init__(self, training: Training, model: Any, optimizer: Any, best: Any, metrics: MetricAccumulator) -> None:
        self.model = model
        self.optimizer = optimizer
        self.best = best
        self.metrics = metrics
        self._training = training
        self.worked_ns = 0  # how long this worker has worked in the last step; 0: unknown
        self.most = 0  # the largest share that it has memory for; 0: unknown
        self.set_world(0, 1)

    @property
    @abstractmethod
    def learning_rate(self) -> float: ...

    def set_world(self, rank: int, size: int, shares: Shares = None) -> None:
        """Be rank `rank` of `size` from the next step on; `shares`: the rows of each rank in a full batch."""
        self._rank, self._size, self._shares = rank, size, shares

    @property
    def reader_world(self) -> tuple[int, int, Shares]:
        """The rank, size and shares whose rows of each global batch this worker reads."""
        return self._rank, self._size, self._shares

    def divided(self, rows: int) -> tuple[int, int]:
        """Return what the shares of a full batch of `rows` rows sum to, and the least share: two for statistics."""
        return rows, self._training.accumulation_steps * (2 if self.has_own_statistics else 1)

    def _passes(self, rows: int) -> int:
        """Return the passes that each worker makes over a batch of `rows` rows: as many as that with the most rows."""
        return min(self._training.accumulation_steps, most_rows(rows, self._size, self._shares))

    def _votes(self, stop: bool) -> list[int]:
        """Return what a step adds to its sums: 1 to stop, then this worker's `worked_ns` and `most` among zeros.

        Lengths are rounded up, so that few changes of the world need buckets of another size.
        """
        votes = [[0] * (-(-self._size // _RANKS) * _RANKS) for _ in range(2)]
        votes[0][self._rank], votes[1][self._rank] = self.worked_ns, self.most
        return [int(stop), *votes[0], *votes[1]]

    def _measured(self, numbers: Sums, pieces: tuple[Piece, ...] = ()) -> Measured:
        """Return the measurements, from the sums of all workers followed by those of their `_votes`."""
        count = len(self._votes(False))
        sums, (stop, *rest) = numbers[:-count], numbers[-count:].tolist()
        return Measured(sums, pieces, bool(stop), rest[: self._size], rest[count // 2 :][: self._size])

    @abstractmethod
    def use_threads(self, count: int) -> None: ...

    def begin_steps(self) -> None:  # noqa: B027 (does nothing unless an engine overrides it)
        """Put the model into training mode."""

    def ahead(self, batches: Iterator[Batch], rows: int) -> Iterator[Batch]:
        """Return the batches of an epoch of `rows` rows for `step`, which may read the next one meanwhile."""
        return batches

    @abstractmethod
    def step(self, batch: Batch, at: Progress, stop: bool) -> Measured:
        """Do the forward and backward passes, the reduction, and the optimizer's step.

        A step happens completely, or it raises and the state can be put back to the one before the step. `stop` says
        that this worker requests the end of the training.

        Raises:
            HorovodInternalError: A collective failed.
        """

    def begin_validation(self, at: Progress) -> None:  # noqa: B027 (does nothing unless an engine overrides it)
        """Put the model into evaluation mode, after the training of an epoch."""

    def seed_callbacks(self, event: CallbackEvent, epoch: int = 0, position: int = 0) -> None:  # noqa: B027
        """Seed the random generators that callbacks may draw from at an event, if the training is to be exact."""

    @abstractmethod
    def measure(self, batches: Iterable[Batch]) -> tuple[Sums, list[Piece]]:
        """Measure this worker's rows of batches that all workers measure. The sums are a new vector."""

    def measure_together(self, batches: Iterable[Batch], before: Sums) -> tuple[Sums, tuple[Piece, ...]]:
        """Measure the rows of all workers; return their sums added to `before`, and their metric states."""
        sums, pieces = self.measure(batches)
        global_sums = allreduce_(torch.from_numpy(sums), op=Sum).numpy()
        return add_sums(before, global_sums), gather_pieces(pieces) if self.gathers else ()

    def conditions(self) -> dict[str, Any]:
        """Return what the result depends on besides the settings that every training has, for a checkpoint: JSON."""
        return {}

    def check_conditions(self, then: Mapping[str, Any]) -> None:  # noqa: B027 (nothing depends on it by default)
        """Raise CheckpointError if a training that resumes with other conditions would have another result."""

    @abstractmethod
    def share_buffers(self) -> None:
        """Broadcast running means and the like from rank 0; while training, each worker has its own."""

    @abstractmethod
    def has_local_non_finite_loss(self) -> bool:
        """Return whether a loss of this worker's own rows in the last step is NaN or infinite."""

    @abstractmethod
    def has_nan(self) -> bool:
        """Return whether a trained weight is NaN. Looks at all of them."""

    def after_epoch(self, row: Mapping[str, float]) -> None:  # noqa: B027 (does nothing unless an engine overrides it)
        """Advance what follows the epoch's row of the history, such as a learning rate schedule."""

    def after_callbacks(self) -> None:  # noqa: B027 (does nothing unless an engine overrides it)
        """Share what only some workers' callbacks changed at the end of the epoch, with a collective."""

    @abstractmethod
    def copy_weights(self, source: Any, target: Any) -> None:
        """Copy the weights of the model to `best`, or back."""

    def finish(self) -> None:  # noqa: B027 (does nothing unless an engine overrides it)
        """Finish the model after the last step. May be called again."""

    @abstractmethod
    def model_file(self) -> tuple[str, bytes]:
        """Return the name and the contents of the file with the trained model."""

    @abstractmethod
    def copies(self, at: Progress) -> Callable[[], dict[str, bytes]]:
        """Copy all tensors, and return a function that makes the files of a checkpoint of them on another thread."""

    @abstractmethod
    def load(self, files: Mapping[str, bytes]) -> tuple[tuple[Piece, ...], tuple[Piece, ...]]:
        """Load the tensors of a checkpoint. Return the metric states of the epoch's steps, and of its validation."""

    def close(self) -> None:  # noqa: B027 (does nothing unless an engine overrides it)
        """Release what the training attached to the user's model and optimizer."""


class TrainingState(ElasticState):
    """The elastic state of a training: the framework's tensors, and how far the training has come (`at`).

    Its tensors are never copied: no collective follows a change of them before `at` counts it.
    """

    at: Progress
    engine: Engine | None = None  # set by the trainer

    def save(self) -> None:
        self._counter.saved_version = self.version

    def restore(self) -> None:
        """Keep the present values. Raises UsageError if a collective failed within the optimizer's step."""
        if self.engine is not None and self.engine.updating:
            raise UsageError(
                "a worker was lost while the optimizer changed the parameters, which cannot be undone: an optimizer of "
                "an estimator must not call collectives in its step(); start again from the last checkpoint"
            )


def host_cores(quota: Path = _CPU_QUOTA) -> int:
    """Return the cores that this process may use: its affinity, or its container's quota if that is less."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        allowed, period = quota.read_text().split()
        if allowed != "max":
            cores = min(cores, max(1, round(int(allowed) / int(period))))
    except (OSError, ValueError):  # not in a container, or cgroup v1
        pass
    return cores


def threads_for(requested: int | None, cores: int, workers: int) -> int:
    return requested or max(1, cores // workers)


def first_rows(training: Training, rows: int) -> Batch:
    cache: dict[str, Any] = {"cache_dir": training.cache_dir, "cache_bytes": training.cache_bytes}
    with training.dataset.reader("train", batch_size=rows, shuffle=False, prefetch=0, **cache) as reader:
        return next(iter(reader.epoch(0)))
