"""The training itself, as it runs in every worker: put together here, done in `trainer`."""

from __future__ import annotations

import copy
import logging
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

import torch

import spark_elastic.torch as hvd
from spark_elastic.collective.process import process
from spark_elastic.data.read_order import lanes_of, resolve_order
from spark_elastic.errors import CheckpointError, InvalidSettingsError
from spark_elastic.ml.callbacks import BestCheckpoint, Callback, check_one_best
from spark_elastic.ml.checkpoints import Checkpoints, CheckpointWriter
from spark_elastic.ml.torch.batches import LABEL, WEIGHT, BatchMaker
from spark_elastic.ml.torch.metrics import Tally
from spark_elastic.ml.torch.objective import Objective
from spark_elastic.ml.torch.optimizers import Schedule, build_optimizer
from spark_elastic.ml.torch.progress import Phase, Progress
from spark_elastic.ml.torch.snapshots import restore
from spark_elastic.ml.torch.spec import CHECKPOINTS, CheckpointPlan, TorchTraining, TrainingResult
from spark_elastic.ml.torch.trainer import Trainer, TrainingState

log = logging.getLogger("spark_elastic.ml")


def train(training: TorchTraining) -> TrainingResult:
    """Do a training; to be run in the workers of a job, `spark_elastic.run(train, (training,))`.

    The trained model lies in `training.store` as `spec.MODEL_FILE` when this returns. Outside of a job it is done in
    this process alone.

    Raises:
        InvalidSettingsError, DataError: model, losses, metrics, optimizer and data do not fit together.
        CheckpointError: `resume_from` cannot be used.
    """
    hvd.init()
    trainer = _assemble(training)

    @hvd.elastic.run
    def loop(state: TrainingState) -> TrainingResult:
        trainer.go_on()
        at = state.at
        return TrainingResult(at.history, at.step, len(at.history), at.stopped, trainer.restored)

    try:
        return loop(trainer.state)
    finally:
        trainer.close()


def objective_of(training: TorchTraining, device: torch.device | None = None) -> Objective:
    """device: where the class weights and the like of losses are to be.

    Raises: InvalidSettingsError: losses, weights and labels do not fit.
    """
    if device is not None:
        for loss in training.loss if isinstance(training.loss, Sequence) else [training.loss]:
            if isinstance(loss, torch.nn.Module):
                loss.to(device)
    names = {field.name for field in training.dataset.layout.fields}
    return Objective(
        training.loss,
        training.train_fn,
        labels=sum(name.startswith(LABEL) for name in names),
        weighted=WEIGHT in names,
        loss_weights=training.loss_weights,
    )


def _assemble(training: TorchTraining) -> Trainer:
    device = _device(training.device)
    model = training.model.to(device)
    optimizer = build_optimizer(training.optimizer, model)
    if training.compression != "none" and hvd.size() == 1 and not process.provisional:
        log.info("gradient_compression has no effect in a world of one worker")
    schedule = Schedule(training, optimizer)
    plan = training.checkpoints
    callbacks = [*training.callbacks, *implied(plan)]
    check_one_best(callbacks)
    best = None
    if any(callback.restores_best for callback in callbacks):
        best = copy.deepcopy(model).requires_grad_(False)
    objective = objective_of(training, device)
    tally = Tally(objective, training.metrics)
    distributed = hvd.DistributedOptimizer(
        optimizer,
        named_parameters=_named(model, optimizer),
        compression=getattr(hvd.Compression, training.compression),
        backward_passes_per_step=training.accumulation,
        op=hvd.Sum,
    )
    settings = {
        "rows": training.dataset.rows("train"),
        "seed": training.seed,
        "shuffle": training.shuffle,
        **_order(training),
        "metrics": tally.names,
    }
    at = Progress()
    checkpoints = Checkpoints(training.store.sub(CHECKPOINTS))
    if training.resume_from is not None:
        try:
            at = restore(
                checkpoints.load(training.resume_from),
                model=model,
                optimizer=distributed,
                scheduler=schedule.scheduler,
                best=best,
                callbacks=callbacks,
                settings=settings,
            )
            at = _to_go_on(at, training)
        except CheckpointError as error:
            # A newcomer gets the state from the others, unless they are lost before their first step.
            if not process.provisional:
                raise
            log.info("%s; the others have newer ones", error)
    state = TrainingState(
        model, distributed, scheduler=schedule.scheduler, best=best, callbacks=_States(callbacks), at=at
    )
    return Trainer(
        training,
        state=state,
        objective=objective,
        tally=tally,
        schedule=schedule,
        callbacks=callbacks,
        maker=BatchMaker(training, device),
        writer=CheckpointWriter(checkpoints, plan.keep if plan is not None else 1),
        settings=settings,
        device=device,
    )


class _States:
    """What the callbacks keep, as one value of the state."""

    def __init__(self, callbacks: list[Callback]) -> None:
        self._callbacks = callbacks

    def state_dict(self) -> dict[str, Any]:
        return {str(number): callback.state_dict() for number, callback in enumerate(self._callbacks)}

    def load_state_dict(self, states: Mapping[str, Any]) -> None:
        for number, callback in enumerate(self._callbacks):
            callback.load_state_dict(states[str(number)])


def implied(plan: CheckpointPlan | None) -> list[Callback]:
    """Callbacks that a plan for checkpoints stands for."""
    if plan is None or plan.best_of is None:
        return []
    return [BestCheckpoint(plan.best_of, mode=plan.mode, restore=False)]


def _order(training: TorchTraining) -> dict[str, Any]:
    """Of the rows in an epoch: what `position` means depends on it."""
    dataset, cache_bytes = training.dataset, training.cache_bytes
    order = resolve_order(dataset, order=training.order, shuffle=training.shuffle, cache_bytes=cache_bytes)
    if order != "lanes":
        return {"order": order}
    return {"order": order, "lanes": asdict(lanes_of(dataset, cache_bytes=cache_bytes))}


def _to_go_on(at: Progress, training: TorchTraining) -> Progress:
    """A training that had come to its end goes on if it is to have more epochs now."""
    if at.phase is Phase.FINISH and at.epoch < training.epochs and not at.stopped:
        return replace(at, phase=Phase.TRAIN)
    if at.phase is Phase.TRAIN and at.position == 0 and at.epoch >= training.epochs:
        return replace(at, phase=Phase.FINISH)
    return at


def _named(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> list[tuple[str, torch.nn.Parameter]]:
    trained = {id(param) for group in optimizer.param_groups for param in group["params"]}
    return [(name, param) for name, param in model.named_parameters() if id(param) in trained]


def _device(asked: str | None) -> torch.device:
    """Raises: InvalidSettingsError: there is no such device here."""
    available = torch.cuda.is_available()
    if asked is None:
        asked = "cuda" if available else "cpu"
    try:
        device = torch.device(asked)
    except RuntimeError as error:
        raise InvalidSettingsError(f"device={asked!r}: {error}") from None
    if device.type != "cuda":
        return device
    if not available:
        raise InvalidSettingsError(f"device={asked!r}, but torch sees no GPU in this worker")
    if ":" not in asked:
        device = torch.device("cuda", hvd.local_rank() % torch.cuda.device_count())
    return device
