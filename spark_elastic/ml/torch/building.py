"""Make the module of a training: call the function that was given as the model, and give lazy modules their shapes."""

from __future__ import annotations

import itertools
from dataclasses import replace

import torch

from spark_elastic.errors import InvalidSettingsError
from spark_elastic.ml.model_function import Shapes
from spark_elastic.ml.torch.engine import objective_of
from spark_elastic.ml.torch.model_function import ModelFunction, seeded
from spark_elastic.ml.torch.model_step import ModelStep, StepPosition
from spark_elastic.ml.torch.objective import BatchMaker
from spark_elastic.ml.torch.serialization import frozen_digests
from spark_elastic.ml.torch.spec import TorchTraining
from spark_elastic.ml.training.dry_run import ROWS, user_code
from spark_elastic.ml.training.engine import first_rows


def built(training: TorchTraining) -> TorchTraining:
    """Return the training with a module for its model, which may be a function, and digests of its frozen parameters.

    In a worker, these are of the parameters that equal those of the driver's model. Others are sent and written: of a
    function, another kind of CPU or number of threads may draw or compute weights whose last bits differ.
    """
    function = training.model
    if isinstance(function, ModelFunction):
        with seeded(function.seed):
            training = replace(training, model=function.made(), made_by=function)
            if lazy_names(training.model):
                initialize(training)
    frozen = frozen_digests(training.model)
    if training.frozen is not None:
        frozen = {name: known for name, known in training.frozen.items() if frozen.get(name) == known}
    return replace(training, frozen=frozen)


def input_shapes(training: TorchTraining) -> Shapes:
    """Return the shapes of the model's inputs, as `ModelFunction` has them."""
    part = BatchMaker(training, torch.device("cpu")).parts(first_rows(training, ROWS), 1)[0]
    return tuple((-1, *each.shape[1:]) for each in part.inputs)


def lazy_names(model: torch.nn.Module) -> list[str]:
    """Return the names of parameters and buffers whose shapes follow from the first rows, as of `LazyLinear`."""
    named = itertools.chain(model.named_parameters(), model.named_buffers())
    return [name for name, value in named if torch.nn.parameter.is_lazy(value)]


def initialize(training: TorchTraining) -> None:
    """Call a model that has lazy modules with the first rows, in eval mode, so that its parameters get their shapes."""
    model, objective = training.model, objective_of(training)
    part = BatchMaker(training, torch.device("cpu")).parts(first_rows(training, ROWS), 1)[0]
    modes = {module: module.training for module in model.modules()}
    with user_code(subject(training), part.rows, part.tensors), torch.no_grad():
        # a model that decides how it is trained may have no call for other rows
        objective.set_mode(model, isinstance(training.train_fn, ModelStep))
        objective.prepare(model, StepPosition())
        objective.forward(model, part)
    for module, mode in modes.items():
        module.training = mode
    if left := lazy_names(model):
        raise InvalidSettingsError(
            f"{', '.join(left)} of the model got no shape from a call with the first rows; call the model once with "
            "rows that reach it before fit, or give its module the number of features"
        )


def subject(training: TorchTraining) -> str:
    """Return what an error about a call of the model names."""
    return training.train_fn.name if isinstance(training.train_fn, ModelStep) else "the model and its loss"
