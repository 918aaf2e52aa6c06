"""Train a PyTorch module in a worker: choose the engine, and put the trainer together."""

from __future__ import annotations

from functools import partial

import torch

import spark_elastic.torch as hvd
from spark_elastic.collective.process import process
from spark_elastic.ml.callbacks import check_one_best
from spark_elastic.ml.torch.building import built
from spark_elastic.ml.torch.engine import TorchEngine
from spark_elastic.ml.torch.exact import ExactTorchEngine
from spark_elastic.ml.torch.rehearsal import rehearse
from spark_elastic.ml.torch.spec import TorchTraining
from spark_elastic.ml.training.saving import CallbackStates
from spark_elastic.ml.training.spec import TrainingResult
from spark_elastic.ml.training.trainer import Trainer
from spark_elastic.torch.elastic.state import TorchOptimizerSteps, handler_for


def train(training: TorchTraining) -> TrainingResult:
    """Train a module in a worker, or alone outside of a job; its weights are in the file `spec.MODEL_FILE`."""
    for name, value in training.config.items():
        getattr(torch, f"set_{name}")(value)
    hvd.init()
    device = hvd.device(training.device)
    training = built(training)
    if process.is_newcomer and (device.type == "cuda" or training.compile):
        rehearse(training, device, workers=hvd.size())
    return assemble(training).run()


def assemble(training: TorchTraining) -> Trainer:
    callbacks = [*training.callbacks, *training.plan_callbacks()]
    check_one_best(callbacks)
    kind = TorchEngine if training.virtual_workers is None else ExactTorchEngine
    engine = kind(training, any(callback.restores_best for callback in callbacks))
    states = CallbackStates(callbacks)
    steps = partial(TorchOptimizerSteps, observes_parameters=False, moved=engine.moved)
    values = {"scheduler": engine.schedule.scheduler, **({} if engine.scaler is None else {"scaler": engine.scaler})}
    return Trainer(training, engine, callbacks, states, handler_for, steps, **values)
