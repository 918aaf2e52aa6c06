"""How far a training has come: one immutable value, replaced after each step and each turn of a validation."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import numpy as np
import numpy.typing as npt

from spark_elastic.reporting.history import History

Sums = npt.NDArray[np.float64]
Piece = dict[str, dict[str, Any]]
"""What one batch of one worker has left in the states of metrics that have to be gathered: by metric, by state."""


class Phase(str, Enum):
    """What comes next."""

    TRAIN = "train"
    VALIDATE = "validate"
    EPOCH_END = "epoch end"
    """Logs, callbacks, learning rate: without a word between the workers but the clock, then all go on together."""
    FINISH = "finish"
    """The model is written, and all workers wait for that."""
    DONE = "done"


def _nothing() -> Sums:
    return np.zeros(0)


@dataclass(frozen=True, slots=True)
class Diverged:
    """Why a training has ended that has come to nothing: the loss of a step, or a weight after the last, is no finite
    number. step, epoch: as of `Progress`, before the step. loss: None: it was finite."""

    step: int
    epoch: int
    loss: float | None


@dataclass(frozen=True, slots=True, eq=False)
class Progress:
    """The plain part of the state; the tensors are in the model and the optimizer.

    position: rows of the epoch's order that were trained on. serial: steps and turns so far, which order checkpoints
    by age. sums, pieces: of this epoch's training, as the engine measures them. val_*: of the validation under way.
    began: the epoch's start, in seconds since 1970 by the clock of whoever was rank 0; None: not begun. stopped: why
    this is the last epoch, if it is not that by number. best_epoch: the one whose weights are kept as the best.
    diverged: it ends at once, without a model. Never in a checkpoint.
    """

    phase: Phase = Phase.TRAIN
    epoch: int = 0
    position: int = 0
    step: int = 0
    serial: int = 0
    sums: Sums = field(default_factory=_nothing)
    pieces: tuple[Piece, ...] = ()
    val_position: int = 0
    val_sums: Sums = field(default_factory=_nothing)
    val_pieces: tuple[Piece, ...] = ()
    began: float | None = None
    history: History = field(default_factory=History)
    stopped: str = ""
    best_epoch: int | None = None
    diverged: Diverged | None = None

    def __deepcopy__(self, memo: Any) -> Progress:
        return self  # the state is copied after every step; nothing in here is ever changed

    def to_json(self) -> dict[str, Any]:
        """Without the pieces, which are tensors."""
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
        """Raises: KeyError, ValueError: not what `to_json` gives."""
        return cls(
            phase=Phase(document["phase"]),
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


def added(sums: Sums, more: Sums) -> Sums:
    """A new vector; an empty one counts as zeros."""
    return sums + more if sums.size else more.copy()
