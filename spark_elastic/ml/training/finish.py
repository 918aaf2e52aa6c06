"""The end of a training: what it has come to is written, and all workers wait for that."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from spark_elastic.collective.operations import allreduce_, barrier
from spark_elastic.collective.reduction import Max
from spark_elastic.errors import CheckpointError
from spark_elastic.ml.training.progress import Diverged, Phase
from spark_elastic.ml.training.reporting import notify
from spark_elastic.ml.training.saving import Saving
from spark_elastic.ml.training.spec import HISTORY_FILE

if TYPE_CHECKING:
    from spark_elastic.ml.training.trainer import Trainer

log = logging.getLogger("spark_elastic.ml")

POLL_S = 0.5
"""How long a worker keeps the others waiting at a time: the end may take minutes, and none of them is stuck."""


def finish(trainer: Trainer) -> None:
    """Write the model. Who is rank 0 now does it, again if the last rank 0 is gone, and all wait for it."""
    state, engine = trainer.state, trainer.engine
    if state.at.diverged is not None:
        _leave(trainer)
        return
    engine.finish()
    for callback in trainer.callbacks:
        callback.on_fit_end(trainer.run)
    if trainer.run.wants_restore and engine.keeps_best and state.at.best_epoch is not None:
        engine.use_best()
    if not trainer.training.allow_nan_loss and engine.has_nan():  # the weights are the same on all workers
        at = state.at
        state.at = replace(at, diverged=Diverged(at.step - 1, at.epoch - 1, None))
        _leave(trainer)
        return
    if trainer.rank == 0 and trainer.saving is None:
        trainer.saving = _saving(trainer)
    _until_all(trainer)
    state.at = replace(state.at, phase=Phase.DONE, serial=state.at.serial + 1)


def _leave(trainer: Trainer) -> None:
    """End without a model; what was written before stays."""
    if trainer.rank == 0:
        try:
            trainer.lasting.drain()
        except CheckpointError as error:
            log.warning("%s", error)
    barrier()
    state = trainer.state
    state.at = replace(state.at, phase=Phase.DONE, serial=state.at.serial + 1)


def _until_all(trainer: Trainer) -> None:
    """Wait until the files are written, and all hosts have compared the rows with their checksums.

    Raises: DatasetError: rows were damaged. RunTakenError: another driver has the run. HorovodInternalError.
    """
    waiting = True
    while waiting:
        mine = trainer.saving is None or trainer.saving.over(POLL_S)
        mine = trainer.rows_checked(POLL_S if mine else 0.0) and mine
        waiting = bool(allreduce_(torch.tensor([float(not mine)]), op=Max).item())


def _saving(trainer: Trainer) -> Saving:
    training, engine, history = trainer.training, trainer.engine, trainer.state.at.history
    name, model = engine.model_file()

    def files() -> dict[str, bytes]:
        try:
            trainer.lasting.drain()
        except CheckpointError as error:  # what is missing is only what it could go on from
            log.warning("%s", error)
        return {name: model, HISTORY_FILE: history.dumps().encode()}

    def check() -> None:
        if training.fence is not None:
            training.fence.check()

    return Saving(training.store, files, check, notify, try_s=trainer.save_s)
