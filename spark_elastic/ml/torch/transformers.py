"""Models of transformers, and others that take inputs by name and return `.loss` and `.logits`, in an estimator."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from spark_elastic.errors import DataError, InvalidSettingsError
from spark_elastic.ml.model_function import is_function, name_of
from spark_elastic.ml.preparation import FLOAT, INTEGER
from spark_elastic.ml.torch.model_function import ModelFunction
from spark_elastic.ml.torch.model_step import ForwardResult, ModelStep, TorchBatch

_IGNORED_LABEL = -100
_LEARNING_RATE = 5e-5
_SHIFTED = ("ForCausalLM", "ForConditionalGeneration")


class NamedInputs(torch.nn.Module):
    """A model (`model`) that takes inputs by name, as a module that takes them by position and returns the logits."""

    def __init__(self, model: torch.nn.Module, inputs: Sequence[str]) -> None:
        super().__init__()
        self.model, self.inputs = model, tuple(inputs)

    def forward(self, *values: torch.Tensor) -> Any:
        return outputs_in(self.model(**dict(zip(self.inputs, values, strict=True))))


class NamedFunction:
    """A function that returns such a model, as one that returns it as `NamedInputs`."""

    def __init__(self, function: Callable[[], Any], inputs: Sequence[str]) -> None:
        self.function, self.inputs = function, tuple(inputs)
        self.__qualname__ = name_of(function)  # for errors

    def __call__(self) -> Any:
        made = self.function()
        return NamedInputs(made, self.inputs) if isinstance(made, torch.nn.Module) else made


class ModelLoss(ModelStep):
    """Calls a `NamedInputs` with its labels, for the loss that its model computes.

    That loss is a mean over the labels other than -100, so workers are weighted by the numbers of these. A causal
    language model (`shifted`) has no loss for the first token of a row. With `classes`, labels are one number a row.
    """

    decides = ("loss", "loss_weights", "sample_weight_col")
    name = "the model"
    takes_functions = exact = True

    def __init__(self, labels: Sequence[str], shifted: bool, classes: bool) -> None:
        self._labels, self._shifted, self._classes = tuple(labels), shifted, classes
        self.label_dtype = INTEGER if classes else None

    def compiled(self, model: NamedInputs) -> torch.nn.Module:
        return model.model

    def _count(self, batch: TorchBatch) -> float:
        """Return the labels that count, in rows, so that gradients are scaled by little."""
        label = batch.labels[0]
        if label.is_floating_point():
            return float(batch.rows)
        counted = label[:, 1:] if self._shifted and label.dim() > 1 else label
        return float((counted != _IGNORED_LABEL).sum()) * batch.rows / max(1, counted.numel())

    def __call__(self, model: NamedInputs, batch: TorchBatch) -> ForwardResult:
        inputs = dict(zip(model.inputs, batch.inputs, strict=True))
        output = model.model(**inputs, **dict(zip(self._labels, batch.labels, strict=True)))
        loss = getattr(output, "loss", None)
        if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
            raise DataError(
                f"{type(model.model).__name__} must return an object whose .loss is one number, not {loss!r:.200}; "
                f"label_cols must be named as the arguments of its forward, and are {', '.join(self._labels)}"
            )
        count, outputs = self._count(batch), outputs_in(output)
        total = loss.reshape(()) * count if count else _zero_of(outputs, loss)
        whole = not batch.labels[0].is_floating_point()
        rule = "argmax" if self._classes and whole else None
        return ForwardResult(outputs, batch.labels, [total], [count], rule=rule)


def _zero_of(outputs: Sequence[torch.Tensor], loss: torch.Tensor) -> torch.Tensor:
    """Return 0 with a graph to the parameters, whose backward pass may hold collectives, for rows without labels.

    It leads through the outputs: the mean over no labels may be 0 / 0, whose gradient is NaN even multiplied by 0.
    """
    found = [each for each in outputs if each.requires_grad]
    if not found:
        return loss.reshape(()).nan_to_num() * 0.0
    return sum(
        (each.masked_fill(torch.ones_like(each, dtype=torch.bool), 0.0).sum() for each in found), torch.zeros(())
    )


def outputs_in(output: Any) -> tuple[torch.Tensor, ...]:
    """Return the logits of a model's output; without logits, all of its tensors but the loss."""
    logits = getattr(output, "logits", None)
    if isinstance(logits, torch.Tensor):
        return (logits,)
    named = output.items() if isinstance(output, Mapping) else vars(output).items()
    return tuple(value for name, value in named if name != "loss" and isinstance(value, torch.Tensor))


def settings_of(model: Any, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of an estimator for the model, with those of the caller, `given`."""
    if not (isinstance(model, torch.nn.Module) or is_function(model)):
        raise InvalidSettingsError(
            f"from_transformers needs a torch.nn.Module, or a function without arguments that returns one, not "
            f"{model!r:.200}"
        )
    names = {name: _columns(given, name, example) for name, example in _EXAMPLES.items()}
    named: Any = NamedFunction(model, names["feature_cols"])
    if isinstance(model, torch.nn.Module):
        named = NamedInputs(model, names["feature_cols"])
    else:  # its class and configuration decide how it is trained
        model = ModelFunction(named, seed=given.get("seed") or 0)().model
    config = getattr(model, "config", None)
    shifted = hasattr(model, "loss_type") and model.loss_type in (None, *_SHIFTED)
    shifted = shifted and not getattr(config, "is_encoder_decoder", False)
    of_sequences = getattr(model, "loss_type", None) == "ForSequenceClassification"
    problem = getattr(config, "problem_type", None)
    several = getattr(config, "num_labels", 1) > 1 and problem in (None, "single_label_classification")
    classes = of_sequences and several
    step = ModelLoss(names["label_cols"], shifted, classes)
    if of_sequences and not classes:  # a regression, or several classes a row, whose loss needs reals
        step.label_dtype = FLOAT
    settings = {
        **given,
        "model": named,
        "train_fn": step,
        "feature_cols": [[name] for name in names["feature_cols"]],
    }
    if settings.get("optimizer") is None:
        settings["optimizer"] = partial(torch.optim.AdamW, lr=_LEARNING_RATE)
    return settings


_EXAMPLES = {"feature_cols": ["input_ids", "attention_mask"], "label_cols": ["labels"]}


def _columns(given: Mapping[str, Any], setting: str, example: list[str]) -> list[str]:
    value = given.get(setting)
    names = [value] if isinstance(value, str) else list(value or ())
    if not names or not all(isinstance(each, str) for each in names):
        raise InvalidSettingsError(
            f"{setting} must be names of columns that are arguments of the model's forward, such as {example}, not "
            f"{value!r}"
        )
    return names
