"""Rehearse a step on a copy of the model before this worker joins a world that trains already.

The first step on a GPU loads kernels and chooses algorithms, and that of a compiled model compiles: seconds, for which
all the others would wait.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import torch

from spark_elastic import clock
from spark_elastic.collective.process import process
from spark_elastic.ml.torch.engine import compile_model, copy_of_model, objective_of, single_row_norm
from spark_elastic.ml.torch.model_step import StepPosition
from spark_elastic.ml.torch.objective import BatchMaker
from spark_elastic.ml.torch.spec import TorchTraining
from spark_elastic.ml.training.engine import first_rows
from spark_elastic.wire.pickling import round_trip

log = logging.getLogger("spark_elastic.ml")


def rehearse(training: TorchTraining, device: torch.device, workers: int) -> None:
    """Do forward and backward of one batch on a copy; leave model, random states and other workers as they are.

    `workers` is the number of workers that will share a batch. An error is logged alone: the first step has it too.
    """
    began = clock.monotonic()
    try:
        with _random_states_kept(device), process.local_collectives():
            _step(training, device, training.per_worker_batch_size or max(1, (training.batch_size or 1) // workers))
    except Exception as error:  # of the user's code
        log.info("a step could not be rehearsed: %s: %s", type(error).__name__, error)
    else:
        log.info("a step was rehearsed in %.1f s, before joining", clock.monotonic() - began)
    if device.type == "cuda":
        torch.cuda.empty_cache()  # the copy's


def _step(training: TorchTraining, device: torch.device, rows: int) -> None:
    names = ("model", "loss", "train_fn", "transformation_fn")
    if training.made_by is None:
        copied = replace(training, **round_trip({name: getattr(training, name) for name in names}))
    else:  # the model cannot be pickled
        parts = round_trip({name: getattr(training, name) for name in names if name != "model"})
        copied = replace(training, model=copy_of_model(training), **parts)
    model = copied.model.to(device)
    compile_model(copied, model)
    objective = objective_of(copied, device)
    objective.set_mode(model, True)
    objective.prepare(model, StepPosition())
    part = BatchMaker(copied, device).parts(first_rows(copied, rows))[0]
    with single_row_norm(model, part.rows):
        result = objective.forward(model, part)
    objective.share(result, part.rows, result.counts if objective.coupled else ()).backward()  # type: ignore[no-untyped-call]
    if device.type == "cuda":
        torch.cuda.synchronize(device)


@contextmanager
def _random_states_kept(device: torch.device) -> Iterator[None]:
    of_python, of_numpy = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng([] if device.type == "cpu" else [device], device_type=device.type):
            yield
    finally:
        random.setstate(of_python)
        np.random.set_state(of_numpy)
