"""What every training has in common: what it is told, when it writes checkpoints, what it comes to."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from spark_elastic.errors import InvalidSettingsError
from spark_elastic.ml.training.progress import Diverged
from spark_elastic.reporting.history import History

if TYPE_CHECKING:
    from spark_elastic.data.dataset import Dataset
    from spark_elastic.data.store import Store
    from spark_elastic.ml.run_lease import Fence

HISTORY_FILE = "history.json"
CHECKPOINTS = "checkpoints"
"""In the run's store: the folder of the durable checkpoints."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointPlan:
    """When durable checkpoints are written, and which are kept.

    every_epochs: at the end of every so many epochs; None: not then. every_steps: after every so many optimizer steps.
    every_seconds: once so much time has passed since the last. keep: the newest so many. best_of: the column of the
    history by which the best of the epochs is kept as well, whatever its age; mode: "min", "max" or "auto", as of
    `callbacks.Monitor`.
    """

    every_epochs: int | None = 1
    every_steps: int | None = None
    every_seconds: float | None = None
    keep: int = 3
    best_of: str | None = None
    mode: str = "auto"

    def __post_init__(self) -> None:
        for name in ("every_epochs", "every_steps", "every_seconds"):
            value = getattr(self, name)
            if value is not None and value <= 0:
                raise InvalidSettingsError(f"{name} must be positive, not {value!r}")
        if self.keep < 1:
            raise InvalidSettingsError(f"keep must be at least 1, not {self.keep!r}")
        if self.mode not in ("auto", "min", "max"):
            raise InvalidSettingsError(f'mode must be "auto", "min" or "max", not {self.mode!r}')


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Training:
    """One training; each framework adds its own settings. It is pickled as a whole.

    Tensors of the dataset are named "features_0", ...; "label_0", ...; "sample_weight".

    dataset: what to train on; its split "validation" is evaluated after every epoch, if it is there.
    store: the folder of this run: the trained model, the history and the checkpoints go there. fence: of the driver
        that has it; None: nobody else can have it.
    transformation_fn: of the columns of a batch, {name: array or list}, to those that are trained on, with as many
        rows.
    batch_size: rows of a global batch, which is one optimizer step; workers share it. per_worker_batch_size instead of
        it: rows of each worker, so that the global batch follows the number of workers.
    accumulation: parts that each worker cuts its share of a batch into, one after the other, to save memory. The
        gradient is that of the whole batch, so this changes no result.
    shuffle, seed: of the order of the rows. The random numbers of a step (dropout) follow from (seed, epoch, position,
        rank): the same again if the step is done again, other ones in other worlds.
    clip_norm, clip_value: bounds of the reduced gradient's norm, or of each of its values.
    compression: of gradients on the wire: "none", "fp16", "bf16".
    sync_batch_norm: whether batch normalisation takes the statistics of all workers' rows of a batch.
    checkpoints: None: none but those that callbacks ask for. resume_from: one that `Checkpoints.latest` has found.
    num_threads: of the framework in each worker. None: the workers of a host share its cores.
    input_shapes, label_shapes: of one row, for each tensor; None: as stored.
    prefetch: batches that are read ahead.
    allow_nan_loss: the training goes on where the loss is not finite; otherwise it ends, without a model.
    verbose: 0: silent; 1: rank 0 prints a line for each epoch; 2: and for checkpoints.
    """

    dataset: Dataset
    store: Store
    transformation_fn: Callable[[dict[str, Any]], Mapping[str, Any]] | None = None
    batch_size: int | None = None
    per_worker_batch_size: int | None = None
    accumulation: int = 1
    epochs: int = 1
    shuffle: bool = True
    seed: int = 0
    order: str = "auto"
    clip_norm: float | None = None
    clip_value: float | None = None
    compression: str = "none"
    sync_batch_norm: bool = True
    checkpoints: CheckpointPlan | None = None
    resume_from: str | None = None
    fence: Fence | None = None
    device: str | None = None
    num_threads: int | None = None
    input_shapes: Sequence[Sequence[int] | None] | None = None
    label_shapes: Sequence[Sequence[int] | None] | None = None
    prefetch: int = 3
    cache_dir: str | None = None
    cache_bytes: int | None = None
    allow_nan_loss: bool = False
    verbose: int = 1

    def __post_init__(self) -> None:
        if (self.batch_size is None) == (self.per_worker_batch_size is None):
            raise InvalidSettingsError("give either batch_size or per_worker_batch_size")
        for name in ("batch_size", "per_worker_batch_size", "accumulation", "epochs", "num_threads"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise InvalidSettingsError(f"{name} must be at least 1, not {value!r}")
        for name in ("clip_norm", "clip_value"):
            value = getattr(self, name)
            if value is not None and value <= 0:
                raise InvalidSettingsError(f"{name} must be positive, not {value!r}")
        if self.compression not in ("none", "fp16", "bf16"):
            raise InvalidSettingsError(f'compression must be "none", "fp16" or "bf16", not {self.compression!r}')

    @property
    def validates(self) -> bool:
        """Whether there are rows to validate with."""
        return "validation" in self.dataset.splits and self.dataset.rows("validation") > 0


@dataclass(frozen=True, slots=True)
class TrainingResult:
    """What a training returns in each worker; equal in all of them but for the clock.

    steps: optimizer steps. epochs: that were done. stopped: why before the last epoch; "" otherwise. restored: the
    epoch whose weights the trained model has, if not those of the last step. diverged: why there is no trained model.
    lost_here: this worker's own rows had the loss that ended the training; not equal in all. unsaved: files by name
    that rank 0 could not write to the store.
    """

    history: History
    steps: int
    epochs: int
    stopped: str = ""
    restored: int | None = None
    diverged: Diverged | None = None
    lost_here: bool = False
    unsaved: Mapping[str, bytes] = field(default_factory=dict)
