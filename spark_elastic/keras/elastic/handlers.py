"""Handlers for the values of a `KerasState`: models, optimizers, metrics, variables and seeds."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from operator import attrgetter
from typing import Any

import keras
import torch

from spark_elastic.elastic.handlers import HasStateDict, Layout, StateDictHandler, StateHandler, TensorSpec
from spark_elastic.errors import UsageError
from spark_elastic.keras import backend
from spark_elastic.keras.backend import Description, Variable
from spark_elastic.keras.optimizer import reduces
from spark_elastic.torch.elastic.handlers import SamplerStateHandler
from spark_elastic.torch.elastic.sampler import ElasticSampler


class VariablesHandler(StateHandler):
    """The handler of a value that consists of Keras variables, which are sent as bytes and matched by their order.

    Their paths are used in messages only, because two processes may have numbered their layers differently. Error
    messages call the value `what`.
    """

    observed = True
    staged = True

    def __init__(
        self, value: Any, what: str, variables_of: Callable[[Any], Iterable[Variable]] = attrgetter("variables")
    ) -> None:
        super().__init__(value)
        self._what = what
        self._variables_of = variables_of
        self._saved = backend.Copies()
        """Also of the variables, because a value that is built later gets others, before and between these as well."""
        self._saved_whole = False
        """True if the value was built when it was saved."""

    def variables(self) -> list[Variable]:
        """Return all variables, in an order that is the same on every member."""
        return list(self._variables_of(self.value))

    def built(self) -> bool:
        """Return True if the value has all its variables."""
        return bool(getattr(self.value, "built", True))

    # --- sent to other members ---------------------------------------------------------------------------

    def layout(self) -> Layout:
        layout = []
        for each in map(backend.describe, self.variables()):
            size = math.prod(each.shape) * backend.numpy_type(each.dtype).itemsize
            layout.append(TensorSpec(each, (size,), torch.uint8, True))
        return layout

    def identities(self, layout: Layout) -> Sequence[Hashable]:
        return [(number, *piece.key[1:]) for number, piece in enumerate(layout)]

    def tensors(self, layout: Layout) -> list[torch.Tensor]:
        return [backend.to_wire(variable) for variable in self.variables()[: len(layout)]]

    def prepare(self, layout: Layout, metadata: Any) -> None:
        theirs = [Description(*piece.key) for piece in layout]
        mine = [backend.describe(variable) for variable in self.variables()]
        for other, own in zip(theirs, itertools.chain(mine, itertools.repeat(None)), strict=False):
            if own is None or own[1:] != other[1:]:
                have = "no such variable" if own is None else f"{own.shape} {own.dtype} ({own.path})"
                raise UsageError(
                    f"{self._what} of this worker differs from the others': {other.path} is {other.shape} "
                    f"{other.dtype} there, and {have} here; build the same on every worker"
                )

    def fill(self, layout: Layout, tensors: Sequence[torch.Tensor]) -> None:
        for variable, tensor in zip(self.variables(), tensors, strict=False):
            backend.from_wire(variable, tensor)

    # --- copies ---------------------------------------------------------------------------------

    def save(self) -> None:
        """Copy all variables at once; TensorFlow copies the memory of a variable when it is changed next."""
        self._light = self.light()
        self._saved = backend.Copies(self.variables())
        self._saved_whole = self.built()

    def save_new(self) -> None:
        """Save also the variables that were created since the last save, if the value has been built since then."""
        if not self._saved_whole and self.built():
            self._saved.add(self.variables())
            self._saved_whole = True

    def restore(self) -> None:
        self._saved.restore()
        self.set_light(self._light)


class ModelHandler(VariablesHandler):
    """The handler of a model or layer: weights, seeds of random layers and, in copies alone, the metrics."""

    def __init__(self, value: Any) -> None:
        super().__init__(value, "the model")
        self._metrics = backend.Copies()

    def awaits_build(self) -> bool:
        return not self.built()

    def metadata(self) -> Any:
        return _plain(self.value.get_build_config()) if self.value.built else None

    def prepare(self, layout: Layout, metadata: Any) -> None:
        if len(self.variables()) < len(layout) and not self.value.built and metadata:
            self.value.build_from_config(metadata)
        super().prepare(layout, metadata)

    def save(self) -> None:
        super().save()
        self._metrics = backend.Copies(self.value.metrics_variables)

    def restore(self) -> None:
        super().restore()
        self._metrics.restore()

    def trained(self) -> list[Variable]:
        """Return the variables that layers have for training, also those of frozen layers."""
        return [variable for layer in self.value._flatten_layers() for variable in layer._trainable_variables]


class OptimizerHandler(VariablesHandler):
    """The handler of an optimizer with all its variables; a newcomer builds it for those of `models`, by name."""

    def __init__(self, value: Any, models: Callable[[], Mapping[str, Any]]) -> None:
        super().__init__(value, "the optimizer")
        self._models = models

    def steps_applied(self) -> Any:
        """Return the number of steps that the optimizer has applied; in a graph, a tensor."""
        if reduces(self.value):
            return self.value.steps_applied()  # includes steps that loss scaling skipped
        return getattr(self.value, "inner_optimizer", self.value)._iterations.value

    def light(self) -> float | None:
        """Return the learning rate, which callbacks change between steps; None if it follows a schedule."""
        return None if (rate := learning_rate_of(self.value)) is None else float(rate.numpy())

    def set_light(self, light: float | None) -> None:
        rate = learning_rate_of(self.value)
        if light is not None and rate is not None and light != self.light():
            rate.assign(light)

    def metadata(self) -> list[tuple[str, int]] | None:
        """Return for which variables it was built: the name of the model in the state, and the index in that model."""
        if not self.value.built:
            return None
        places = {
            id(variable): (name, number)
            for name, model in self._models().items()
            for number, variable in enumerate(model.variables)
        }
        trained = self.value._trainable_variables
        if any(id(variable) not in places for variable in trained):
            return []
        return [places[id(variable)] for variable in trained]

    def prepare(self, layout: Layout, metadata: Any) -> None:
        if not self.value.built and metadata is not None:
            if not metadata:
                raise UsageError(
                    "the optimizer of this worker has not been built, and that of the others was built for variables "
                    "that no model in the state has; call optimizer.build(variables) before the elastic loop, or put "
                    "the models that it trains into the state"
                )
            models = {name: model.variables for name, model in self._models().items()}
            self.value.build([models[model][number] for model, number in metadata])
        super().prepare(layout, metadata)


def learning_rate_of(optimizer: Any) -> Any:
    """Return the variable of an optimizer's learning rate; None if it follows a schedule."""
    rate = getattr(getattr(optimizer, "inner_optimizer", optimizer), "_learning_rate", None)
    return rate if isinstance(rate, keras.Variable) else None


class _ResettableHandler(StateDictHandler):
    """The handler of an object with `state_dict` and `load_state_dict`; calls its `reset`, if any, in a new world."""

    def reset(self) -> None:
        if callable(reset := getattr(self.value, "reset", None)):
            reset()


class VariableList(list[Variable]):
    """A value of a state that consists of variables in a fixed order."""


def handler_for(value: Any, models: Callable[[], Mapping[str, Any]]) -> StateHandler | None:
    """Return a handler for the value; None for a plain Python object."""
    if isinstance(value, type):
        return None
    if isinstance(value, keras.optimizers.Optimizer):
        return OptimizerHandler(value, models)
    if isinstance(value, keras.metrics.Metric):
        return VariablesHandler(value, "the metric")
    if isinstance(value, keras.layers.Layer):  # models are layers
        return ModelHandler(value)
    if isinstance(value, VariableList):
        return VariablesHandler(value, "the list of variables", list)
    if isinstance(value, keras.Variable):
        return VariablesHandler(value, "the variable", lambda variable: [variable])
    if isinstance(value, keras.random.SeedGenerator):
        return VariablesHandler(value, "the seed generator", lambda generator: [generator.state])
    if isinstance(value, ElasticSampler):
        return SamplerStateHandler(value)
    return _ResettableHandler(value) if isinstance(value, HasStateDict) else None


def _plain(config: Any) -> Any:
    """Return a configuration without Keras' kinds of lists and dicts, which cannot be unpickled."""
    if isinstance(config, Mapping):
        return {key: _plain(value) for key, value in config.items()}
    if isinstance(config, list | tuple):
        return (tuple if isinstance(config, tuple) else list)(map(_plain, config))
    return config
