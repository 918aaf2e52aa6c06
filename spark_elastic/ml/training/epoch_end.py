"""The end of an epoch: its row of the history, what callbacks make of it, and whether there is another one."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch

from spark_elastic import clock
from spark_elastic.collective.operations import allreduce_, broadcast_
from spark_elastic.collective.reduction import Max
from spark_elastic.ml.training.progress import Phase, Progress
from spark_elastic.ml.training.reporting import measured
from spark_elastic.reporting.format import epoch_line

if TYPE_CHECKING:
    from spark_elastic.ml.training.trainer import Trainer

log = logging.getLogger("spark_elastic.ml")


def end_epoch(trainer: Trainer) -> None:
    """All go on to the next epoch, or to the end, together."""
    at, run, engine = trainer.state.at, trainer.run, trainer.engine
    if not at.val_sums.size:
        engine.share_buffers()
    logs, val_logs = _logs(trainer, at)
    row = {**logs, **val_logs}
    engine.after_epoch(row)
    for callback in trainer.callbacks:
        run.caller = callback
        if val_logs:
            callback.on_validation_end(run, val_logs)
        callback.on_epoch_end(run, row)
    engine.after_callbacks()
    # Nobody goes on before all have been called, and all go on or stop alike.
    stop = allreduce_(torch.tensor([float(bool(run.why))]), op=Max)
    stopped = at.stopped
    if stop.item() and not stopped:
        stopped = run.why or "a callback of another worker has asked for it"
    if run.wants_best and engine.keeps_best:
        engine.keep_best()
    finished = bool(stopped) or at.epoch + 1 >= trainer.training.epochs
    trainer.state.at = Progress(
        phase=Phase.FINISH if finished else Phase.TRAIN,
        epoch=at.epoch + 1,
        step=at.step,
        serial=at.serial + 1,
        history=at.history.with_row(row),
        stopped=stopped,
        best_epoch=at.epoch if run.wants_best else at.best_epoch,
    )
    trainer.lasting.after_epoch(trainer, finished)
    run.forget()
    if trainer.rank == 0 and _is_lost(row) and not any(map(_is_lost, at.history)):
        log.warning("the loss of epoch %d is not a number; training goes on", at.epoch + 1)
    if trainer.rank == 0 and trainer.training.verbose and trainer.reporter is None:
        print(epoch_line(at.epoch, trainer.training.epochs, row["seconds"], measured(row)), flush=True)
    trainer.state.turn_done()


def _logs(trainer: Trainer, at: Progress) -> tuple[dict[str, float], dict[str, float]]:
    """Of training and of validation; from the sums and the clock of rank 0, so that they are equal to the bit."""
    engine = trainer.engine
    now = clock.wall()
    facts = torch.tensor([now - (at.began or now), now, *at.sums, *at.val_sums], dtype=torch.float64)
    broadcast_(facts, 0)
    numbers = facts.numpy()
    train, validation = numbers[2 : 2 + at.sums.size], numbers[2 + at.sums.size :]
    logs = {
        "epoch": at.epoch,
        "steps": at.step,
        "rows": engine.rows(train),
        "seconds": float(numbers[0]),
        "ended": float(numbers[1]),
        "lr": engine.learning_rate,
        **engine.logs(train, at.pieces),
    }
    return logs, engine.logs(validation, at.val_pieces, "val_") if at.val_sums.size else {}


def _is_lost(row: Mapping[str, float]) -> bool:
    return math.isnan(row.get("loss", 0.0))
