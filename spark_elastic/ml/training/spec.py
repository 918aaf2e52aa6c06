"""The data of a training: the settings that all frameworks share, how far it has come, and its result."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import numpy as np
import numpy.typing as npt

from spark_elastic.data.dataset import Dataset
from spark_elastic.data.store import Store
from spark_elastic.ml.callbacks import BestCheckpoint, Callback
from spark_elastic.reporting.history import History
from spark_elastic.runs.lease import Fence

HISTORY_FILE = "history.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointPlan:
    """When durable checkpoints are written, and which are kept."""

    every_epochs: int | None = 1  # write one at the end of every n-th epoch; None: not at the end of epochs
    every_seconds: float | None = None  # write one when this time has passed since the last
    keep: int = 3  # this many of the newest, besides the best epoch's
    best_of: str | None = None  # the column by which an epoch is best; `mode` is as of `callbacks.Monitor`
    mode: str = "auto"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Training:
    """The settings of one training; each framework adds its own. Pickled as a whole.

    Tensors of the dataset are named "features_0", ...; "label_0", ...; "sample_weight". Fields that are not explained
    here are settings of the estimators, see `ml.shared_params`, or arguments of `data.reader.BatchReader`.

    Attributes:
        seed: Seed of the order, and of the random numbers of a step (dropout), which follow from (seed, epoch,
            position, rank): a repeated step gets the same ones, another world gets others.
        fence: Lets a worker check that its driver still holds the run; None if no other driver can take it.
        driver_decides_s: Seconds to wait at the end of an epoch for the driver's callbacks; 0: they get the epochs, and
            no worker waits; None: there are none.
    """

    dataset: Dataset  # the rows to train on; its split "validation", if it has one, is evaluated after every epoch
    store: Store  # the folder of this run, for the trained model, the history and the checkpoints
    transformation_fn: Callable[[dict[str, Any]], Mapping[str, Any]] | None = None
    batch_size: int | None = None
    per_worker_batch_size: int | None = None
    accumulation_steps: int = 1
    balance: str = "equal"
    epochs: int = 1
    shuffle: bool = True
    seed: int = 0
    order: str = "auto"
    gradient_clip_norm: float | None = None
    gradient_clip_value: float | None = None
    gradient_compression: str = "none"
    sync_batch_norm: bool = True
    checkpoints: CheckpointPlan | None = None  # None: only checkpoints that callbacks request are written
    resume_from: str | None = None  # name of the checkpoint to resume from
    fence: Fence | None = None
    device: str | None = None
    num_threads: int | None = None
    input_shapes: Sequence[Sequence[int] | None] | None = None
    label_shapes: Sequence[Sequence[int] | None] | None = None
    loss_is_per_worker: bool = False
    prefetch: int = 3
    cache_dir: str | None = None
    cache_bytes: int | None = None
    allow_nan_loss: bool = False
    driver_decides_s: float | None = None
    verbose: int = 1

    @property
    def validates(self) -> bool:
        return "validation" in self.dataset.splits and self.dataset.rows("validation") > 0

    def plan_callbacks(self) -> list[Callback]:
        plan = self.checkpoints
        if plan is None or plan.best_of is None:
            return []
        return [BestCheckpoint(plan.best_of, mode=plan.mode, restore=False)]


Sums = npt.NDArray[np.float64]  # measurements that can be added: losses, metrics, row counts
Piece = dict[str, dict[str, Any]]  # metric states to gather: by metric, by state


class TrainingPhase(str, Enum):
    """The phase that comes next."""

    TRAIN = "train"
    VALIDATE = "validate"
    EPOCH_END = "epoch end"  # the epoch's row of the history, callbacks, learning rate
    FINISH = "finish"  # the model is written, and all workers wait for that
    DONE = "done"


@dataclass(frozen=True, slots=True)
class Diverged:
    """Why a training ended without a model: a loss that is not finite, or if `loss` is None a weight at the end."""

    step: int
    epoch: int
    loss: float | None


def add_sums(sums: Sums, more: Sums) -> Sums:
    """Return the sum as a new vector; an empty `sums` counts as zeros."""
    return sums + more if sums.size else more.copy()


STOPPED_ELSEWHERE = "a callback of another worker requested the end of the training"


@dataclass(frozen=True, slots=True, eq=False)
class Progress:
    """The plain part of a training's state: how far it is. Replaced after each step or validation turn."""

    phase: TrainingPhase = TrainingPhase.TRAIN
    epoch: int = 0
    position: int = 0  # rows of the epoch's order that were trained on
    step: int = 0
    serial: int = 0  # steps and validation turns so far; orders checkpoints by age
    sums: Sums = field(default_factory=lambda: np.zeros(0))  # over this epoch's steps; `pieces` are its metric states
    pieces: tuple[Piece, ...] = ()
    val_position: int = 0  # rows of the validation split that were evaluated; `val_sums` and `val_pieces` are of them
    val_sums: Sums = field(default_factory=lambda: np.zeros(0))
    val_pieces: tuple[Piece, ...] = ()
    began: float | None = None  # start of the epoch, in seconds since 1970 by the clock of rank 0; None before it
    history: History = field(default_factory=History)
    stopped: str = ""  # why this epoch is the last one, if it is not the last by number; otherwise ""
    best_epoch: int | None = None  # the epoch whose weights are kept as the best
    diverged: Diverged | None = None  # set when the training ends without a model. Never in a checkpoint

    def __deepcopy__(self, memo: Any) -> Progress:
        return self  # the state is copied after every step, and nothing in here is ever changed

    def to_json(self) -> dict[str, Any]:
        """Return plain values of everything but the pieces, which are tensors."""
        return {
            "phase": self.phase.value,
            "history": self.history.to_json(),
            "work": list(self.history.work),
            "stopped": self.stopped,
            "best_epoch": self.best_epoch,
            **{name: getattr(self, name) for name in _COUNTS},
            **{name: getattr(self, name).tolist() for name in _SUMS},
        }

    @classmethod
    def from_json(
        cls, document: Mapping[str, Any], pieces: tuple[Piece, ...] = (), val_pieces: tuple[Piece, ...] = ()
    ) -> Progress:
        """Restore what `to_json` returned. Raises `KeyError` or `ValueError` if the document is something else."""
        values: dict[str, Any] = {name: int(document[name]) for name in _COUNTS}
        values |= {name: np.array(document[name], dtype=np.float64) for name in _SUMS}
        return cls(
            phase=TrainingPhase(document["phase"]),
            history=History.from_json(document["history"], document.get("work")),
            stopped=str(document["stopped"]),
            best_epoch=document["best_epoch"],
            pieces=pieces,
            val_pieces=val_pieces,
            **values,
        )


_COUNTS = ("epoch", "position", "step", "serial", "val_position")
_SUMS = ("sums", "val_sums")


@dataclass(frozen=True, slots=True)
class TrainingResult:
    """The result of a training in one worker; equal in all workers but for the clock and where stated."""

    history: History
    steps: int
    epochs: int
    stopped: str = ""  # why the training ended before the last epoch; "" otherwise
    restored: int | None = None  # the epoch whose weights the trained model has; None: those of the last step
    diverged: Diverged | None = None  # why there is no trained model
    caused_divergence: bool = False  # the non-finite loss came from this worker's own rows; differs between workers
    unsaved: Mapping[str, bytes] = field(default_factory=dict)  # the files that rank 0 could not write to the store
