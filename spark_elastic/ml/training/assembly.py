"""How a training is put together and run, whatever framework does it."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

from spark_elastic.collective.process import process
from spark_elastic.data.read_order import lanes_of, resolve_order
from spark_elastic.elastic.frontend import frontend
from spark_elastic.elastic.loop import elastic_loop
from spark_elastic.errors import CheckpointError
from spark_elastic.ml.callbacks import BestCheckpoint, Callback
from spark_elastic.ml.training.checkpoint_schedule import Lasting
from spark_elastic.ml.training.engine import Engine, TrainingState
from spark_elastic.ml.training.progress import Phase, Progress
from spark_elastic.ml.training.spec import CheckpointPlan, Training, TrainingResult
from spark_elastic.ml.training.trainer import Trainer

log = logging.getLogger("spark_elastic.ml")


def run(trainer: Trainer) -> TrainingResult:
    """Do the training, through any number of worlds."""

    def loop(state: TrainingState) -> TrainingResult:
        trainer.go_on()
        at = state.at
        return TrainingResult(
            at.history,
            at.step,
            len(at.history),
            at.stopped,
            trainer.restored,
            at.diverged,
            trainer.lost_here,
            trainer.unsaved,
        )

    try:
        return elastic_loop(loop, frontend)(trainer.state)
    finally:
        trainer.close()


def implied(plan: CheckpointPlan | None) -> list[Callback]:
    """Callbacks that a plan for checkpoints stands for."""
    if plan is None or plan.best_of is None:
        return []
    return [BestCheckpoint(plan.best_of, mode=plan.mode, restore=False)]


def settings_of(training: Training, metrics: Sequence[str]) -> dict[str, Any]:
    """What must be the same for a training that goes on from a checkpoint of this one."""
    return {
        "rows": training.dataset.rows("train"),
        "seed": training.seed,
        "shuffle": training.shuffle,
        **_order(training),
        "metrics": list(metrics),
    }


def first_progress(training: Training, lasting: Lasting, engine: Engine, callbacks: Sequence[Callback]) -> Progress:
    """Where the training begins: at the checkpoint that it is to resume from, or at the start.

    Raises: CheckpointError: the checkpoint cannot be used.
    """
    if training.resume_from is None:
        return Progress()
    try:
        return _to_go_on(lasting.restore(training.resume_from, engine, callbacks), training)
    except CheckpointError as error:
        # A newcomer gets the state from the others, unless they are lost before their first step.
        if not process.provisional:
            raise
        log.info("%s; the others have newer ones", error)
        return Progress()


class CallbackStates:
    """What the callbacks keep, as one value of the state."""

    def __init__(self, callbacks: Sequence[Callback]) -> None:
        self._callbacks = callbacks

    def state_dict(self) -> dict[str, Any]:
        return {str(number): callback.state_dict() for number, callback in enumerate(self._callbacks)}

    def load_state_dict(self, states: Mapping[str, Any]) -> None:
        for number, callback in enumerate(self._callbacks):
            callback.load_state_dict(states[str(number)])


def _order(training: Training) -> dict[str, Any]:
    """Of the rows in an epoch: what `position` means depends on it."""
    dataset, cache_bytes = training.dataset, training.cache_bytes
    order = resolve_order(dataset, order=training.order, shuffle=training.shuffle, cache_bytes=cache_bytes)
    if order != "lanes":
        return {"order": order}
    return {"order": order, "lanes": asdict(lanes_of(dataset, cache_bytes=cache_bytes))}


def _to_go_on(at: Progress, training: Training) -> Progress:
    """A training that had come to its end goes on if it is to have more epochs now."""
    if at.phase is Phase.FINISH and at.epoch < training.epochs and not at.stopped:
        return replace(at, phase=Phase.TRAIN)
    if at.phase is Phase.TRAIN and at.position == 0 and at.epoch >= training.epochs:
        return replace(at, phase=Phase.FINISH)
    return at
