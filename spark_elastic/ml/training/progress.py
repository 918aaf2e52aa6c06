"""The progress of a training: one immutable value, replaced after each step and each turn of a validation."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from spark_elastic.reporting.history import History

if TYPE_CHECKING:
    from spark_elastic.ml.training.spec import Diverged

Sums = npt.NDArray[np.float64]
"""Measurements of a batch that can be added over batches and workers: losses, metrics, row counts."""
Piece = dict[str, dict[str, Any]]
"""Metric states of one worker's batch that cannot be added and are gathered instead: by metric, by state."""


class TrainingPhase(str, Enum):
    """The phase that comes next."""

    TRAIN = "train"
    VALIDATE = "validate"
    EPOCH_END = "epoch end"
    """The epoch's row of the history, callbacks, learning rate."""
    FINISH = "finish"
    """The model is written, and all workers wait for that."""
    DONE = "done"


def _no_sums() -> Sums:
    return np.zeros(0)


@dataclass(frozen=True, slots=True, eq=False)
class Progress:
    """The plain part of a training's state; the tensors are in the model and the optimizer.

    Attributes:
        position: Rows of the epoch's order that were trained on.
        step: Optimizer steps that were applied.
        serial: Steps and validation turns so far; orders checkpoints by age.
        sums: Sums over this epoch's steps, as the engine measures them.
        pieces: Metric states of this epoch's steps.
        val_position: Rows of the validation split that were evaluated; `val_sums` and `val_pieces` are of them.
        began: Start of the epoch, in seconds since 1970 by the clock of rank 0; None before it.
        stopped: Why this epoch is the last one, if it is not the last by number; otherwise "".
        best_epoch: The epoch whose weights are kept as the best.
        diverged: Set when the training ends without a model. Never in a checkpoint.
    """

    phase: TrainingPhase = TrainingPhase.TRAIN
    epoch: int = 0
    position: int = 0
    step: int = 0
    serial: int = 0
    sums: Sums = field(default_factory=_no_sums)
    pieces: tuple[Piece, ...] = ()
    val_position: int = 0
    val_sums: Sums = field(default_factory=_no_sums)
    val_pieces: tuple[Piece, ...] = ()
    began: float | None = None
    history: History = field(default_factory=History)
    stopped: str = ""
    best_epoch: int | None = None
    diverged: Diverged | None = None

    def __deepcopy__(self, memo: Any) -> Progress:
        return self  # the state is copied after every step, and nothing in here is ever changed

    def to_json(self) -> dict[str, Any]:
        """Return plain values of everything but the pieces, which are tensors."""
        return {
            "phase": self.phase.value,
            "epoch": self.epoch,
            "position": self.position,
            "step": self.step,
            "serial": self.serial,
            "sums": self.sums.tolist(),
            "val_position": self.val_position,
            "val_sums": self.val_sums.tolist(),
            "history": self.history.to_json(),
            "stopped": self.stopped,
            "best_epoch": self.best_epoch,
        }

    @classmethod
    def from_json(
        cls, document: Mapping[str, Any], pieces: tuple[Piece, ...] = (), val_pieces: tuple[Piece, ...] = ()
    ) -> Progress:
        """Restore what `to_json` returned. Raises `KeyError` or `ValueError` if the document is something else."""
        return cls(
            phase=TrainingPhase(document["phase"]),
            epoch=int(document["epoch"]),
            position=int(document["position"]),
            step=int(document["step"]),
            serial=int(document["serial"]),
            sums=np.array(document["sums"], dtype=np.float64),
            pieces=pieces,
            val_position=int(document["val_position"]),
            val_sums=np.array(document["val_sums"], dtype=np.float64),
            val_pieces=val_pieces,
            history=History.from_json(document["history"]),
            stopped=str(document["stopped"]),
            best_epoch=document["best_epoch"],
        )


def add_sums(sums: Sums, more: Sums) -> Sums:
    """Return the sum as a new vector; an empty `sums` counts as zeros."""
    return sums + more if sums.size else more.copy()
