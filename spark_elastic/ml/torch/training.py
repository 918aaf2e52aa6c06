"""The training of a module, as it runs in every worker: put together here, done in `ml.training`."""

from __future__ import annotations

import copy
import logging
from collections.abc import Sequence

import torch

import spark_elastic.torch as hvd
from spark_elastic.collective.process import process
from spark_elastic.elastic.steps import LoopWatch
from spark_elastic.ml.callbacks import check_one_best
from spark_elastic.ml.preparation import WEIGHT
from spark_elastic.ml.torch.batch_norm import synchronise
from spark_elastic.ml.torch.engine import TorchEngine
from spark_elastic.ml.torch.metrics import Tally
from spark_elastic.ml.torch.objective import Objective
from spark_elastic.ml.torch.optimizers import Schedule, build_optimizer
from spark_elastic.ml.torch.spec import TorchTraining
from spark_elastic.ml.training.columns import LABEL
from spark_elastic.ml.training.engine import TrainingState
from spark_elastic.ml.training.saving import CallbackStates, CheckpointSchedule
from spark_elastic.ml.training.spec import TrainingResult
from spark_elastic.ml.training.trainer import Trainer
from spark_elastic.torch.elastic.handlers import handler_for
from spark_elastic.torch.elastic.state import TorchSteps

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
    return _assemble(training).run()


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
    device = hvd.device(training.device)
    model = training.model.to(device)
    if training.sync_batch_norm:
        synchronise(model)
    optimizer = build_optimizer(training.optimizer, model)
    if training.compression != "none" and hvd.size() == 1 and not process.provisional:
        log.info("gradient_compression has no effect in a world of one worker")
    schedule = Schedule(training, optimizer)
    callbacks = [*training.callbacks, *training.plan_callbacks()]
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
    engine = TorchEngine(
        training,
        model=model,
        optimizer=distributed,
        best=best,
        objective=objective,
        tally=tally,
        schedule=schedule,
        device=device,
    )
    checkpoints = CheckpointSchedule(training, engine, callbacks, tally.names)
    at = checkpoints.first_progress()
    values = {
        "model": model,
        "optimizer": distributed,
        "scheduler": schedule.scheduler,
        "best": best,
        "callbacks": CallbackStates(callbacks),
        "at": at,
    }
    state = TrainingState(handler_for, LoopWatch, TorchSteps, values)
    return Trainer(training, engine=engine, state=state, callbacks=callbacks, checkpoints=checkpoints)


def _named(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> list[tuple[str, torch.nn.Parameter]]:
    trained = {id(param) for group in optimizer.param_groups for param in group["params"]}
    return [(name, param) for name, param in model.named_parameters() if id(param) in trained]
