"""What a framework adds to the phases of a training: it does the steps, measures, and copies its tensors."""

from __future__ import annotations

import os
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from spark_elastic.elastic.handled_state import HandledState
from spark_elastic.ml.training.metrics_common import MetricAccumulator
from spark_elastic.ml.training.progress import Piece, Progress, Sums

if TYPE_CHECKING:
    from spark_elastic.data.batch import Batch
    from spark_elastic.ml.training.spec import Training

# How many threads a worker may use, when it shares a host with others.

_QUOTA = Path("/sys/fs/cgroup/cpu.max")


def host_cores(quota: Path = _QUOTA) -> int:
    """Cores that this process may run on: those of its affinity, or of its container's quota if that is less."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        allowed, period = quota.read_text().split()
        if allowed != "max":
            cores = min(cores, max(1, round(int(allowed) / int(period))))
    except (OSError, ValueError):  # no container, or an older kernel's
        pass
    return cores


def threads_for(asked: int | None, cores: int, workers: int) -> int:
    """What was asked for, or an equal share of the host's cores, at least one."""
    return asked or max(1, cores // workers)


class Rows(Protocol):
    """A worker's share of a global batch, as the engine has made it of the reader's `Batch`."""

    @property
    def start(self) -> int: ...
    @property
    def stop(self) -> int: ...


class Measured(NamedTuple):
    """sums: float64, what was measured of a batch, over all workers. pieces: what of it cannot be added up, of all
    workers. stop: whether a worker has asked for the end."""

    sums: Sums
    pieces: tuple[Piece, ...]
    stop: bool


class Engine(Protocol):
    """One worker's model and optimizer. All of its collectives are called by all workers alike.

    model, optimizer: as callbacks see them. keeps_best: whether there is room for the weights of the best epoch.
    gathers: whether the pieces that `measure` returns are to be gathered from all workers.
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
        """Be this rank of a new world; nothing of a step that has failed in the last one is left."""

    def use_threads(self, count: int) -> None: ...

    def feed(self, batches: Generator[Batch]) -> Generator[Any]:
        """The batches as `step` and `measure` take them, see `Rows`. Whoever closes this closes `batches`."""

    # --- steps

    def begin_steps(self) -> None:
        """The model is going to be trained."""

    def step(self, batch: Any, at: Progress, stop: bool) -> Measured:
        """Forward, backward, reduction and the optimizer's step. Either all of it happens, or it raises and the state
        stands where it stood, once it was put back.

        stop: this worker asks for the end.
        Raises: HorovodInternalError.
        """

    # --- measurements

    def begin_validation(self) -> None:
        """The model is going to be evaluated."""

    def measure(self, batches: Iterable[Any]) -> tuple[Sums, list[Piece]]:
        """Of this worker's rows alone, without a collective. Sums: a new vector."""

    def share_buffers(self) -> None:
        """Running means and the like are each worker's own while it trains; from here on all have those of rank 0."""

    def logs(self, sums: Sums, pieces: Sequence[Piece], prefix: str = "") -> dict[str, float]:
        """What the sums come to, by name, with "loss" first."""

    def rows(self, sums: Sums) -> int: ...

    def lost(self, sums: Sums) -> float | None:
        """A loss among the sums of a step that is NaN or infinite; None: there is none. For next to nothing."""

    def lost_here(self) -> bool:
        """Whether the losses of this worker's own rows of the last step have one."""

    def has_nan(self) -> bool:
        """Whether a weight that is trained is NaN. Looks at all of them."""

    def told(self, sums: Sums) -> dict[str, float]:
        """Of what `logs` gives: what can be told from any thread at any moment, for next to nothing."""

    # --- ends

    def after_epoch(self, row: Mapping[str, float]) -> None:
        """The epoch's row is known: what follows it (a schedule) may be changed."""

    def after_callbacks(self) -> None:
        """All callbacks have seen the end of the epoch: what only some of the workers know of them may be told.

        Raises: HorovodInternalError.
        """

    def keep_best(self) -> None:
        """The present weights are the best."""

    def use_best(self) -> None:
        """The present weights become the best."""

    def finish(self) -> None:
        """The last step was done. May be called again."""

    def model_file(self) -> tuple[str, bytes]:
        """Name and contents of the file with the trained model."""

    def copies(self, at: Progress) -> Callable[[], dict[str, bytes]]:
        """Copies all tensors now; what is returned makes the files of a checkpoint of them, on another thread."""

    def load(self, files: Mapping[str, bytes]) -> tuple[tuple[Piece, ...], tuple[Piece, ...]]:
        """Take over the tensors of a checkpoint. Returns: the pieces of the training and of the validation.

        Raises: CheckpointError: not files of `copies`. KeyError, ValueError, RuntimeError, TypeError: of another model.
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

    def lost(self, sums: Sums) -> float | None:
        return self._metrics.lost(sums)

    def told(self, sums: Sums) -> dict[str, float]:
        return self._metrics.told(sums)

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


class TrainingState(HandledState):
    """With turns: changes that are no step, but after which those who are ahead are followed."""

    _only_optimizers_act = True
    at: Progress

    def turn_done(self) -> None:
        """`at` has changed after a collective that some may have missed."""
        self.check_host_updates()
