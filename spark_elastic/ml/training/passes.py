"""The two phases that go over rows: training, step by step, and validation, turn by turn."""

from __future__ import annotations

import itertools
from collections.abc import Generator
from contextlib import closing
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from spark_elastic import clock
from spark_elastic.collective.objects import allgather_object
from spark_elastic.collective.operations import allreduce_
from spark_elastic.collective.reduction import Sum
from spark_elastic.ml.training.progress import Diverged, Phase, Piece, added

if TYPE_CHECKING:
    from spark_elastic.ml.training.trainer import Trainer

TURN_BATCHES = 16
"""Batches of a validation between two reductions: what a kill costs at most, none of which was an applied step."""


def train(trainer: Trainer) -> None:
    """The rest of the epoch."""
    state = trainer.state
    if state.at.began is None:
        if state.at.position == 0:
            for callback in trainer.callbacks:
                callback.on_epoch_begin(trainer.run)
        state.at = replace(state.at, began=clock.wall())
    trainer.engine.begin_steps()
    reader = trainer.reader("train")
    batches = reader.epoch(state.at.epoch, state.at.position, batch_size=trainer.batch_size)
    # whoever keeps the error of a failed step must not keep the threads that read ahead
    with closing(trainer.engine.feed(batches)) as fed:
        for batch in fed:
            _step(trainer, batch, last=batch.stop >= reader.rows)
            if state.at.phase is not Phase.TRAIN:
                return


def _step(trainer: Trainer, batch: Any, last: bool) -> None:
    state, run, at = trainer.state, trainer.run, trainer.state.at
    for call in trainer.on_batch_begin:
        call(run)
    measured = trainer.engine.step(batch, at, bool(run.why))
    if not trainer.training.allow_nan_loss and (loss := trainer.engine.lost(measured.sums)) is not None:
        _end(trainer, loss)
        return
    phase, stopped = Phase.TRAIN, at.stopped
    if measured.stop:
        stopped = run.why or "a callback of another worker has asked for it"
    if last or stopped:
        phase = Phase.VALIDATE if trainer.training.validates else Phase.EPOCH_END
    state.at = replace(
        at,
        phase=phase,
        position=batch.stop,
        step=at.step + 1,
        serial=at.serial + 1,
        sums=added(at.sums, measured.sums),
        pieces=at.pieces + measured.pieces,
        stopped=stopped,
    )
    for call in trainer.on_batch_end:
        call(run)
    trainer.lasting.after_step(trainer)
    state.check_host_updates()


def _end(trainer: Trainer, loss: float) -> None:
    """The loss of a step is no finite number, on all workers alike: it came out of their reduction.

    Nothing is written any more, and no callback is called.
    """
    state, at = trainer.state, trainer.state.at
    trainer.lost_here = trainer.engine.lost_here()
    state.at = replace(at, phase=Phase.FINISH, serial=at.serial + 1, diverged=Diverged(at.step, at.epoch, loss))
    state.check_host_updates()


def validate(trainer: Trainer) -> None:
    """The rest of the validation split."""
    state = trainer.state
    if state.at.val_position == 0:
        trainer.engine.share_buffers()
        for callback in trainer.callbacks:
            callback.on_validation_begin(trainer.run)
    trainer.engine.begin_validation()
    reader = trainer.reader("validation")
    batches = reader.epoch(0, state.at.val_position, batch_size=trainer.batch_size)
    with closing(trainer.engine.feed(batches)) as fed:
        while state.at.phase is Phase.VALIDATE:
            _turn(trainer, fed, reader.rows)


def _turn(trainer: Trainer, fed: Generator[Any], rows: int) -> None:
    state, at = trainer.state, trainer.state.at
    position = at.val_position

    def batches() -> Generator[Any]:
        nonlocal position
        for batch in itertools.islice(fed, TURN_BATCHES):
            yield batch
            position = batch.stop

    sums, pieces = trainer.engine.measure(batches())
    numbers = allreduce_(torch.from_numpy(sums), op=Sum)
    everyones = gathered(pieces) if trainer.engine.gathers else ()
    state.at = replace(
        at,
        phase=Phase.EPOCH_END if position >= rows else Phase.VALIDATE,
        serial=at.serial + 1,
        val_position=position,
        val_sums=added(at.val_sums, numbers.numpy()),
        val_pieces=at.val_pieces + everyones,
    )
    state.turn_done()


def gathered(pieces: list[Piece]) -> tuple[Piece, ...]:
    """Those of all workers. Raises: HorovodInternalError."""
    return tuple(piece for everyones in allgather_object(pieces) for piece in everyones)
