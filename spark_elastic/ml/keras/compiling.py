"""The arguments that a model is compiled with: optimizer, losses, metrics; from the settings, else from the model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import keras
import numpy as np

from spark_elastic.errors import InvalidSettingsError, nearest
from spark_elastic.ml.keras.structure import output_names
from spark_elastic.ml.preparation import FLOAT, INTEGER


@dataclass(frozen=True, slots=True, kw_only=True)
class CompileArguments:
    """The arguments of `keras.Model.compile`.

    Attributes:
        optimizer: an instance without variables.
        loss: a loss, or one for each output; None: the model adds its own.
        loss_weights: factors of the losses.
        metrics: metrics that ignore sample weights.
        weighted_metrics: metrics that use sample weights.
    """

    optimizer: Any
    loss: Any = None
    loss_weights: Any = None
    metrics: Any = None
    weighted_metrics: Any = None


def compile_arguments(model: Any, **settings: Any) -> CompileArguments:
    """Return the settings; those that are None are taken from the compiled model.

    Raises:
        InvalidSettingsError: there is no optimizer, or one that Keras does not know.
    """
    own = compiled_with(model)
    given = {name: value if value is not None else own.get(name) for name, value in settings.items()}
    if settings.get("loss") is not None and settings.get("loss_weights") is None:
        given["loss_weights"] = None  # the model's weights belong to the model's losses
    given["optimizer"] = optimizer_of(given.get("optimizer"))
    return CompileArguments(**given)


def compiled_with(model: Any) -> dict[str, Any]:
    """Return the arguments of the last `model.compile`; {} without any."""
    config = getattr(getattr(model, "_compile_config", None), "config", None)
    if not getattr(model, "compiled", False) or config is None:
        return {}
    names = {each.name for each in fields(CompileArguments)}
    made = {name: value for name, value in config.items() if name in names}
    return {**made, "optimizer": getattr(model, "optimizer", None)}


def values_of(optimizer: Any) -> list[Any] | None:
    """Return the values of an optimizer's variables, in their order; None if it has not done a step yet."""
    if optimizer is None or not getattr(optimizer, "built", False) or int(optimizer.iterations.numpy()) == 0:
        return None
    return [np.asarray(each) for each in optimizer.variables]


def compile_again(model: Any, arguments: Mapping[str, Any], values: Sequence[Any] | None) -> None:
    """Compile a model with what `compiled_with` and `values_of` returned for another."""
    model.compile(**arguments)
    if values is not None:
        model.optimizer.build(model.trainable_variables)
        for variable, value in zip(model.optimizer.variables, values, strict=True):
            variable.assign(value)


def optimizer_of(given: Any) -> Any:
    """Return the optimizer of an instance, a name or a configuration; raise InvalidSettingsError for anything else."""
    if given is None:
        raise InvalidSettingsError(
            "optimizer is not set, and the model is not compiled: keras.optimizers.Adam(1e-3), for example"
        )
    if isinstance(given, (str, dict)):
        try:
            return keras.optimizers.get(given)
        except (ValueError, TypeError) as error:
            close = nearest(given, [name.lower() for name in dir(keras.optimizers)]) if isinstance(given, str) else None
            hint = f"; did you mean {close!r}?" if close else f": {str(error).splitlines()[0]}"
            raise InvalidSettingsError(f"optimizer={given!r} is not an optimizer of Keras{hint}") from None
    if not isinstance(given, keras.optimizers.Optimizer):
        hint = f"; make one: {given.__name__}()" if isinstance(given, type) else ""
        raise InvalidSettingsError(
            f"optimizer must be a keras.optimizers.Optimizer, its name or its configuration, not {given!r}{hint}"
        )
    return given


# --- known losses: how they read labels, and how a prediction follows from an output ------------------


@dataclass(frozen=True, slots=True)
class KerasLossKind:
    """The properties of a known loss.

    Attributes:
        logits: how a prediction follows from outputs without softmax or sigmoid, as of the setting `prediction`.
        probabilities: how a prediction follows from outputs that are probabilities.
        labels: "class" (its number), "one-hot" (a value for each class) or "number" (as many as the output has).
    """

    logits: str
    probabilities: str
    labels: str


_CLASSES = ("argmax", "argmax_probability")
_BINARY = ("binary_logit", "binary_probability")
_RAW, _BY_SIGN = ("value", "value"), ("binary_logit", "binary_logit")
_KINDS: Mapping[str, KerasLossKind] = {
    "sparse_categorical_crossentropy": KerasLossKind(*_CLASSES, "class"),
    "categorical_crossentropy": KerasLossKind(*_CLASSES, "one-hot"),
    "categorical_focal_crossentropy": KerasLossKind(*_CLASSES, "one-hot"),
    "categorical_hinge": KerasLossKind("argmax", "argmax", "one-hot"),
    "categorical_generalized_cross_entropy": KerasLossKind("argmax_probability", "argmax_probability", "class"),
    "binary_crossentropy": KerasLossKind(*_BINARY, "number"),
    "binary_focal_crossentropy": KerasLossKind(*_BINARY, "number"),
    "hinge": KerasLossKind(*_BY_SIGN, "number"),
    "squared_hinge": KerasLossKind(*_BY_SIGN, "number"),
    **dict.fromkeys(
        (
            *("mean_squared_error", "mean_absolute_error", "mean_absolute_percentage_error", "huber", "log_cosh"),
            *("mean_squared_logarithmic_error", "poisson", "kl_divergence", "cosine_similarity"),
        ),
        KerasLossKind(*_RAW, "number"),
    ),
}


def loss_of(loss: Any) -> Any:
    """Return the loss of a name or configuration, and anything else unchanged.

    Raises:
        InvalidSettingsError: Keras has no such loss.
    """
    if not isinstance(loss, (str, dict)):
        return loss
    try:
        return keras.losses.get(loss)
    except (ValueError, TypeError) as error:
        raise InvalidSettingsError(f"loss={loss!r} is not a loss of Keras: {str(error).splitlines()[0]}") from None


def loss_kind(loss: Any) -> KerasLossKind | None:
    """Return the properties of a loss of Keras; None for a user's own loss."""
    function = loss_of(loss)
    if isinstance(function, keras.losses.Loss):
        function = getattr(function, "fn", None)
    if not getattr(function, "__module__", "").startswith("keras."):
        return None
    return _KINDS.get(getattr(function, "__name__", ""))


def rule(loss: Any) -> str | None:
    """Return how a prediction follows from an output of this loss, as of the setting `prediction`; None: unknown."""
    known = loss_kind(loss)
    if known is None:
        return None
    of_logits = (getattr(loss, "_fn_kwargs", None) or {}).get("from_logits", False)
    return known.logits if of_logits else known.probabilities


def label_dtype(loss: Any) -> str | None:
    """Return the type that a scalar label needs for this loss: INTEGER for class numbers, else FLOAT; None: unknown."""
    known = loss_kind(loss)
    return None if known is None else INTEGER if known.labels == "class" else FLOAT


def name_of(loss: Any) -> str:
    """Return the name of a loss for an error message."""
    return str(loss if isinstance(loss, str) else getattr(loss, "name", None) or getattr(loss, "__name__", repr(loss)))


def losses_by_output(loss: Any, names: Sequence[str] | None) -> list[tuple[str | None, Any]]:
    """Return (name of the output, its loss) for each output that has a loss, in the order of the outputs.

    Args:
        loss: the argument `loss` of `compile`; a single loss is that of every output.
        names: the names of the outputs; None if they are not known.

    Raises:
        InvalidSettingsError: there are losses for outputs that the model does not have.
    """
    if isinstance(loss, Mapping) and "class_name" not in loss:
        order = list(names) if names is not None else sorted(loss)
        if unknown := [name for name in loss if name not in order]:
            raise InvalidSettingsError(
                f"loss has {', '.join(map(repr, unknown))}, and the model's outputs are {', '.join(order)}"
            )
        return [(name, loss[name]) for name in order if loss.get(name) is not None]
    if isinstance(loss, (list, tuple)):
        if names is not None and len(loss) != len(names):
            raise InvalidSettingsError(f"{len(loss)} losses for the {len(names)} outputs of the model: {names}")
        named = names if names is not None else [None] * len(loss)
        return [(name, each) for name, each in zip(named, loss, strict=True) if each is not None]
    if loss is None:
        return []
    return [(name, loss) for name in (names if names is not None else [None])]


def check_losses(model: Any, loss: Any, labels: Sequence[str] | None) -> list[tuple[str | None, Any]]:
    """Return the losses with the names of their outputs, one for each label.

    Args:
        model: the model.
        loss: the argument `loss` of `compile`.
        labels: the label columns; None if they are not known.

    Raises:
        InvalidSettingsError: a value is not a loss, or the numbers of losses and labels differ.
    """
    pairs = losses_by_output(loss, output_names(model))
    for _, each in pairs:
        made = loss_of(each)
        if not isinstance(made, keras.losses.Loss) and (not callable(made) or isinstance(made, type)):
            hint = f"; make one: {each.__name__}()" if isinstance(each, type) else ""
            raise InvalidSettingsError(
                f"loss must be the name of a loss, a keras.losses.Loss or a function of (label, output), not {each!r}"
                f"{hint}"
            )
    if labels and pairs and len(pairs) != len(labels) and pairs[0][0] is not None:
        outputs = ", ".join(str(name) for name, _ in pairs)
        raise InvalidSettingsError(
            f"{len(pairs)} losses (of the outputs {outputs}) for {len(labels)} label_cols ({', '.join(labels)}); there "
            "must be a label for each output that has a loss, in their order"
        )
    return pairs
