"""Train a module in a worker: put the parts together here; `ml.training` runs the phases."""

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
from spark_elastic.ml.torch.engine import TorchEngine, synchronise
from spark_elastic.ml.torch.metrics import TorchMetricAccumulator
from spark_elastic.ml.torch.objective import Objective
from spark_elastic.ml.torch.optimizers import LearningRateSchedule, build_optimizer
from spark_elastic.ml.torch.spec import TorchTraining
from spark_elastic.ml.training.columns import LABEL
from spark_elastic.ml.training.engine import TrainingState
from spark_elastic.ml.training.saving import CallbackStates, CheckpointSchedule
from spark_elastic.ml.training.spec import TrainingResult
from spark_elastic.ml.training.trainer import Trainer
from spark_elastic.torch.elastic.state import TorchOptimizerSteps, handler_for

log = logging.getLogger("spark_elastic.ml")


def train(training: TorchTraining) -> TrainingResult:
    """Train a module; run it in the workers of a job: `spark_elastic.run(train, (training,))`.

    Outside of a job this process trains alone. When it returns, the trained model is in `training.store`, in the file
    `spec.MODEL_FILE`.

    Raises:
        InvalidSettingsError: model, losses, metrics and optimizer do not go together.
        DataError: they do not go with the data.
        CheckpointError: `resume_from` cannot be used.
    """
    hvd.init()
    return assemble(training).run()


def objective_of(training: TorchTraining, device: torch.device | None = None) -> Objective:
    """Build the losses of a training.

    Args:
        training: the settings.
        device: where to move the losses' tensors, such as class weights; None: leave them.

    Raises:
        InvalidSettingsError: the numbers of losses, weights and labels do not match.
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


def assemble(training: TorchTraining) -> Trainer:
    """Build the trainer of this worker; raise as `train` does."""
    device = hvd.device(training.device)
    model = training.model.to(device)
    if training.sync_batch_norm:
        synchronise(model)
    optimizer = build_optimizer(training.optimizer, model)
    if training.compression != "none" and hvd.size() == 1 and not process.provisional:
        log.info("gradient_compression has no effect in a world of one worker")
    schedule = LearningRateSchedule(training, optimizer)
    callbacks = [*training.callbacks, *training.plan_callbacks()]
    check_one_best(callbacks)
    best = None
    if any(callback.restores_best for callback in callbacks):
        best = copy.deepcopy(model).requires_grad_(False)
    objective = objective_of(training, device)
    metrics = TorchMetricAccumulator(objective, training.metrics)
    distributed = hvd.DistributedOptimizer(
        optimizer,
        named_parameters=_trained_parameters(model, optimizer),
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
        metrics=metrics,
        schedule=schedule,
        device=device,
    )
    checkpoints = CheckpointSchedule(training, engine, callbacks, metrics.names)
    at = checkpoints.first_progress()
    values = {
        "model": model,
        "optimizer": distributed,
        "scheduler": schedule.scheduler,
        "best": best,
        "callbacks": CallbackStates(callbacks),
        "at": at,
    }
    state = TrainingState(handler_for, LoopWatch, TorchOptimizerSteps, values)
    return Trainer(training, engine=engine, state=state, callbacks=callbacks, checkpoints=checkpoints)


def _trained_parameters(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer
) -> list[tuple[str, torch.nn.Parameter]]:
    trained = {id(param) for group in optimizer.param_groups for param in group["params"]}
    return [(name, param) for name, param in model.named_parameters() if id(param) in trained]
