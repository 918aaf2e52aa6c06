"""What a model is compiled with: the settings of an estimator, and where they are silent, the model's own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import keras
import numpy as np

from spark_elastic.errors import InvalidSettingsError, nearest
from spark_elastic.ml.keras import losses
from spark_elastic.ml.keras.structure import output_names


@dataclass(frozen=True, slots=True, kw_only=True)
class CompileArguments:
    """As of `keras.Model.compile`. optimizer: an instance without variables. loss: None if the model adds its own."""

    optimizer: Any
    loss: Any = None
    loss_weights: Any = None
    metrics: Any = None
    weighted_metrics: Any = None


def compile_arguments(model: Any, **settings: Any) -> CompileArguments:
    """settings: of `CompileArguments`; those that are None are as the model was compiled.

    Raises: InvalidSettingsError: there is neither; or something that Keras does not know.
    """
    own = compiled_with(model)
    given = {name: value if value is not None else own.get(name) for name, value in settings.items()}
    if settings.get("loss") is not None and settings.get("loss_weights") is None:
        given["loss_weights"] = None  # those of the model were for its own losses
    given["optimizer"] = optimizer_of(given.get("optimizer"))
    return CompileArguments(**given)


def compiled_with(model: Any) -> dict[str, Any]:
    """The arguments of the last `model.compile`; {} if there was none."""
    config = getattr(getattr(model, "_compile_config", None), "config", None)
    if not getattr(model, "compiled", False) or config is None:
        return {}
    names = {each.name for each in fields(CompileArguments)}
    made = {name: value for name, value in config.items() if name in names}
    return {**made, "optimizer": getattr(model, "optimizer", None)}


def values_of(optimizer: Any) -> list[Any] | None:
    """What an optimizer has learnt, arrays in the order of its variables; None: it has not done a step yet."""
    if optimizer is None or not getattr(optimizer, "built", False) or int(optimizer.iterations.numpy()) == 0:
        return None
    return [np.asarray(each) for each in optimizer.variables]


def compile_again(model: Any, arguments: Mapping[str, Any], values: Sequence[Any] | None) -> None:
    """Compile a model as `compiled_with` and `values_of` say that another was."""
    model.compile(**arguments)
    if values is not None:
        model.optimizer.build(model.trainable_variables)
        for variable, value in zip(model.optimizer.variables, values, strict=True):
            variable.assign(value)


def optimizer_of(given: Any) -> Any:
    """A new optimizer with the settings of what was given: an instance, a name, or a configuration.

    Raises: InvalidSettingsError
    """
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
            raise InvalidSettingsError(f"optimizer={given!r} is no optimizer of Keras{hint}") from None
    if not isinstance(given, keras.optimizers.Optimizer):
        hint = f"; make one: {given.__name__}()" if isinstance(given, type) else ""
        raise InvalidSettingsError(
            f"optimizer must be a keras.optimizers.Optimizer, its name or its configuration, not {given!r}{hint}"
        )
    return given


def losses_by_output(loss: Any, names: Sequence[str] | None) -> list[tuple[str | None, Any]]:
    """(name of the output, its loss) for each output that has one, in the order of the outputs.

    names: of the outputs, None if they are not known. One loss for all of them stands for each.
    Raises: InvalidSettingsError: losses for outputs that the model does not have.
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
    """The losses with the names of their outputs, one for each label.

    labels: the columns; None: not known.
    Raises: InvalidSettingsError: something is no loss, or there are other than one for each label.
    """
    pairs = losses_by_output(loss, output_names(model))
    for _, each in pairs:
        if not losses.is_loss(each):
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
