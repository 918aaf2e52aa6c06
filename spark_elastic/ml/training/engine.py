"""The interface between the trainer and a framework: the framework computes steps, measures, and copies its tensors."""

from __future__ import annotations

import os
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from spark_elastic.collective.objects import allgather_object
from spark_elastic.elastic.state import ElasticState
from spark_elastic.ml.training.metrics_common import MetricAccumulator
from spark_elastic.ml.training.progress import Piece, Progress, Sums

if TYPE_CHECKING:
    from spark_elastic.data.reader import Batch
    from spark_elastic.ml.training.spec import Training

_CPU_QUOTA = Path("/sys/fs/cgroup/cpu.max")


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
    """Return the requested number of threads, or an equal share of the host's cores, at least one."""
    return requested or max(1, cores // workers)


class Rows(Protocol):
    """A worker's share of a global batch, as the engine made it of the reader's `Batch`."""

    @property
    def start(self) -> int: ...
    @property
    def stop(self) -> int: ...


class Measured(NamedTuple):
    """The measurements of one step.

    Attributes:
        sums: Sums over all workers.
        pieces: Metric states of all workers that cannot be added.
        stop: A worker requested the end of the training.
    """

    sums: Sums
    pieces: tuple[Piece, ...]
    stop: bool


class Engine(Protocol):
    """One worker's model and optimizer. All workers call the methods that contain collectives alike.

    Attributes:
        model: The framework's model, for callbacks.
        optimizer: The framework's optimizer, for callbacks.
        keeps_best: There is a copy of the model for the weights of the best epoch.
        gathers: The pieces that `measure` returns have to be gathered from all workers.
    """

    @property
    def model(self) -> Any: ...
    @property
    def optimizer(self) -> Any: ...
    @property
    def keeps_best(self) -> bool: ...
    @property
    def gathers(self) -> bool: ...
    @property
    def learning_rate(self) -> float: ...

    def enter(self, rank: int, size: int) -> None:
        """Take this rank in a new world, and drop what is left of a step that failed in the last one."""

    def use_threads(self, count: int) -> None: ...

    def feed(self, batches: Generator[Batch]) -> Generator[Any]:
        """Yield the batches as `step` and `measure` take them, see `Rows`. Closing it closes `batches`."""

    # --- steps ------------------------------------------------------------------------------------

    def begin_steps(self) -> None:
        """Put the model into training mode."""

    def step(self, batch: Any, at: Progress, stop: bool) -> Measured:
        """Do the forward and backward passes, the reduction, and the optimizer's step.

        A step happens completely, or it raises and the state can be put back to the one before the step. `stop` says
        that this worker requests the end of the training.

        Raises:
            HorovodInternalError: A collective failed.
        """

    # --- measurements -----------------------------------------------------------------------------

    def begin_validation(self) -> None:
        """Put the model into evaluation mode."""

    def measure(self, batches: Iterable[Any]) -> tuple[Sums, list[Piece]]:
        """Measure this worker's rows, without a collective. The sums are a new vector."""

    def share_buffers(self) -> None:
        """Broadcast running means and the like from rank 0; while training, each worker has its own."""

    def logs(self, sums: Sums, pieces: Sequence[Piece], prefix: str = "") -> dict[str, float]:
        """Return loss and metrics by name, the loss first."""

    def rows(self, sums: Sums) -> int:
        """Return the number of rows in the sums."""

    def non_finite_loss(self, sums: Sums) -> float | None:
        """Return a loss among a step's sums that is NaN or infinite; None if there is none. Cheap."""

    def has_local_non_finite_loss(self) -> bool:
        """Return whether a loss of this worker's own rows in the last step is NaN or infinite."""

    def has_nan(self) -> bool:
        """Return whether a trained weight is NaN. Looks at all of them."""

    def live_logs(self, sums: Sums) -> dict[str, float]:
        """Return the part of `logs` that any thread can compute cheaply at any moment."""

    # --- ends -------------------------------------------------------------------------------------

    def after_epoch(self, row: Mapping[str, float]) -> None:
        """Advance what follows the epoch's row, such as a learning rate schedule."""

    def after_callbacks(self) -> None:
        """Share what only some workers' callbacks changed at the end of the epoch.

        Raises:
            HorovodInternalError: A collective failed.
        """

    def keep_best(self) -> None:
        """Copy the present weights as the best."""

    def use_best(self) -> None:
        """Give the model the best weights."""

    def finish(self) -> None:
        """Finish the model after the last step. May be called again."""

    def model_file(self) -> tuple[str, bytes]:
        """Return the name and the contents of the file with the trained model."""

    def copies(self, at: Progress) -> Callable[[], dict[str, bytes]]:
        """Copy all tensors, and return a function that makes the files of a checkpoint of them on another thread."""

    def load(self, files: Mapping[str, bytes]) -> tuple[tuple[Piece, ...], tuple[Piece, ...]]:
        """Take over the tensors of a checkpoint, and return the pieces of training and of validation.

        Raises:
            CheckpointError: The files are not those of `copies`.
            KeyError, ValueError, RuntimeError, TypeError: The files are of another model.
        """

    def close(self) -> None: ...


class FrameworkEngine:
    """The part of an `Engine` that is the same for every framework: rank, metrics, and events that need no action.

    Args:
        training: the settings.
        model: the model, as callbacks see it.
        best: a copy of the model for the weights of the best epoch; None: no callback restores them.
        metrics: the losses and metrics.
    """

    def __init__(self, training: Training, model: Any, best: Any, metrics: MetricAccumulator) -> None:
        self.model = model
        self.best = best
        self._training = training
        self._metrics = metrics
        self._rank, self._size = 0, 1

    @property
    def keeps_best(self) -> bool:
        return self.best is not None

    def enter(self, rank: int, size: int) -> None:
        self._rank, self._size = rank, size

    def begin_steps(self) -> None: ...

    def begin_validation(self) -> None: ...

    def logs(self, sums: Sums, pieces: Sequence[Piece], prefix: str = "") -> dict[str, float]:
        return self._metrics.logs(sums, pieces, prefix)

    def rows(self, sums: Sums) -> int:
        return self._metrics.rows(sums)

    def non_finite_loss(self, sums: Sums) -> float | None:
        return self._metrics.non_finite_loss(sums)

    def live_logs(self, sums: Sums) -> dict[str, float]:
        return self._metrics.live_logs(sums)

    def after_epoch(self, row: Mapping[str, float]) -> None: ...

    def after_callbacks(self) -> None: ...

    def finish(self) -> None: ...

    def close(self) -> None: ...


def first_rows(training: Training, rows: int) -> Batch:
    """Read the first rows of the training dataset, in the order of its files."""
    with training.dataset.reader(
        "train", batch_size=rows, shuffle=False, prefetch=0, cache_dir=training.cache_dir
    ) as reader:
        return next(iter(reader.epoch(0)))


class TrainingState(ElasticState):
    """The elastic state of a training: the framework's tensors, and how far the training has come.

    Besides steps it counts turns: changes that are not steps, but after which a member that is ahead is followed.
    """

    at: Progress

    def turn_done(self) -> None:
        """Mark a resume point: `at` changed after a collective whose result some members may have missed."""
        self.check_host_updates()


def gather_pieces(pieces: list[Piece]) -> tuple[Piece, ...]:
    """Gather the metric states of all workers. Raises `HorovodInternalError` if the collective failed."""
    return tuple(piece for everyones in allgather_object(pieces) for piece in everyones)
