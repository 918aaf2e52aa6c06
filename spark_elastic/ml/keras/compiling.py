"""What a Keras model is called with (its inputs and outputs) and compiled with (its optimizer, losses and metrics).

Inputs and outputs are flat lists here, whatever structure the model has: in the order of `model.inputs` and
`model.outputs`; those of a dict in the order of their names.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

import keras
import numpy as np

from spark_elastic.data.manifest import Kind, TensorField
from spark_elastic.errors import DataError, InvalidSettingsError, NotPicklableError, nearest
from spark_elastic.ml.keras.serialization import Flags, architecture, check_config, custom_names, custom_objects_of
from spark_elastic.ml.preparation import FLOAT, INTEGER

_MANTISSA = {"bfloat16": 7, "float16": 10, "float32": 23, "float64": 52}


def inputs_of(model: Any, flat: Sequence[Any]) -> Any:
    """Return the inputs as the model is called with them: one tensor, or the list or dict that the model declares."""
    struct = getattr(model, "_inputs_struct", None)
    if isinstance(struct, dict) and len(struct) == len(flat):
        return dict(zip(sorted(struct), flat, strict=True))
    return flat[0] if len(flat) == 1 else list(flat)


def input_names(model: Any) -> list[str] | None:
    """Return the name of each input; None if the model declares no inputs, as subclasses of Model."""
    struct = getattr(model, "_inputs_struct", None)
    if isinstance(struct, dict):
        return sorted(struct)
    inputs = getattr(model, "inputs", None)
    return None if inputs is None else [str(each.name) for each in inputs]


def order_by_name(model: Any, columns: Sequence[Any]) -> list[int] | None:
    """Return the number of the column for each input, if columns (feature_cols) have names of inputs; None if none has.

    The other columns go to the other inputs in the order in which they are.
    """
    names, given = input_names(model) or [], [each if isinstance(each, str) else "+".join(each) for each in columns]
    if len(names) != len(given) or not set(names) & set(given):
        return None
    others = (at for at, column in enumerate(given) if column not in names)
    return [given.index(name) if name in given else next(others) for name in names]


def check_columns(
    setting: str, ends: str, names: Sequence[str | None] | None, columns: Sequence[Sequence[str]], structure: Any
) -> None:
    """Raise InvalidSettingsError if columns may belong to other inputs or outputs than those they are given to.

    `ends` is "inputs" or "outputs"; `names` are in order, None if not known; `columns` are those of each; `structure`
    is the dict of the symbolic ones, if they are in one: it is ordered by name, whatever the order it was written in.
    """
    for name, given in zip(names or (), columns, strict=False):
        if len(given) == 1 and given[0] != name and given[0] in (names or ()):
            raise InvalidSettingsError(
                f"{setting} gives the column {given[0]!r} to {name!r}: the model's {ends} are, in order, "
                f"{', '.join(map(str, names or ()))} (those of a dict are ordered by name). List the columns in this "
                "order; if the column is meant for it, rename the column"
            )
    if not isinstance(structure, Mapping):
        return
    pairs = zip(sorted(structure), columns, strict=False)
    nameless = [(name, tuple(structure[name].shape), "+".join(given)) for name, given in pairs if list(given) != [name]]
    for at, (name, shape, column) in enumerate(nameless):
        for other, another, with_it in nameless[at + 1 :]:
            if len(shape) == len(another) and all(
                n == m or None in (n, m) for n, m in zip(shape, another, strict=True)
            ):
                raise InvalidSettingsError(
                    f"{setting} gives {column!r} and {with_it!r} to {name!r} and {other!r}, which are {ends} of one "
                    f"shape in a dict, and no name says which belongs to which. Give the columns the names of the "
                    f"model's {ends}, {', '.join(sorted(structure))} (withColumnsRenamed; several columns of one "
                    f"input as an array), or give the model a list of {ends}"
                )


def output_names(model: Any) -> list[str] | None:
    """Return the names of the outputs, the keys of dicts of losses; None if the model has none before it is called."""
    struct = getattr(model, "_outputs_struct", None)
    if isinstance(struct, dict):
        return sorted(struct)
    if (names := getattr(model, "output_names", None)) is not None:
        return [str(name) for name in names]
    outputs = getattr(model, "outputs", None)
    return None if outputs is None else [str(each._keras_history[0].name) for each in outputs]


def check_kept(model: Any, at: int, name: str, values: Any) -> None:
    """Raise DataError if the array `name` has integers that input number `at` cannot hold: Keras would cast them."""
    if values.dtype.kind not in "iu" or not values.size:
        return
    inputs = getattr(model, "inputs", None) or []
    known = str(inputs[at].dtype) if at < len(inputs) else ""
    if known in _MANTISSA:
        high = 2 << _MANTISSA[known]
        low = -high
    elif known.startswith(("int", "uint")) and not np.can_cast(values.dtype, known):
        low, high = int(np.iinfo(known).min), int(np.iinfo(known).max)
    else:
        return
    if int(values.min()) < low or int(values.max()) > high:
        wrong = values[(values < low) | (values > high)]
        raise DataError(
            f"{name} holds {wrong.reshape(-1)[0]}, and the model's input {inputs[at].name} is of type {known}, which "
            f"keeps integers up to {high:,} as they are; make it keras.Input(..., dtype='int64')"
        )


def build_for(
    model: Any, inputs: Sequence[TensorField], seed: int, custom_objects: Mapping[str, Any] | None = None
) -> Any:
    """Return a built copy of an unbuilt model, which is called with rows of zeros; its weights follow from the seed."""
    check_config(model, NotPicklableError)
    for field in inputs:
        if field.kind not in (Kind.DENSE, Kind.SPARSE):
            raise InvalidSettingsError(
                f"the model is not built, and rows of {field.name} ({'+'.join(field.columns)}) have no fixed shape: "
                "build it first, by calling it on an array"
            )
    config = architecture(model)
    objects = custom_objects_of(model, custom_names(model, config), custom_objects)
    before = random.getstate()
    random.seed(seed)  # initializers without a seed of their own draw one from Python's generator
    try:
        with Flags.of(model).creating():
            copied = keras.saving.deserialize_keras_object(config, custom_objects=objects, safe_mode=False)
        build(copied, [(field.dtype, field.shape) for field in inputs])
    finally:
        random.setstate(before)
    return copied


def check_takes_any_rows(model: Any) -> None:
    """Raise InvalidSettingsError if an input of a model has a fixed number of rows."""
    for each in getattr(model, "inputs", None) or ():
        if each.shape[0] is not None:
            raise InvalidSettingsError(
                f"the model's input {each.name} takes batches of {each.shape[0]} rows only, but workers take shares of "
                "a batch that have any size; create it with shape= instead of batch_shape="
            )


def is_built(model: Any) -> bool:
    """Return whether a model has its weights."""
    # a subclass that does not define build() is marked as built, though it may have no variables yet
    return bool(model.built and (model.variables or all(each.built for each in model._flatten_layers())))


def build(model: Any, inputs: Sequence[tuple[str, Sequence[int]]]) -> None:
    """Build a model by a call with a row of zeros; `inputs` are the dtype and the shape of a row of each input."""
    rows = [np.zeros((1, *shape), dtype) for dtype, shape in inputs]
    try:
        if isinstance(model, keras.Sequential) and len(rows) == 1:
            model.build((None, *rows[0].shape[1:]))  # the call alone would fix the number of rows
        model(inputs_of(model, rows))
    except Exception as error:
        shapes = ", ".join(f"features_{at} {each.dtype} {list(each.shape)}" for at, each in enumerate(rows))
        raise InvalidSettingsError(
            f"the model is not built, and cannot be built for rows of these columns ({shapes}): {error}"
        ) from error


@dataclass(frozen=True, slots=True, kw_only=True)
class CompileArguments:
    """The arguments of `keras.Model.compile`. Without a loss, the model adds its own."""

    optimizer: Any
    loss: Any = None
    loss_weights: Any = None
    metrics: Any = None
    weighted_metrics: Any = None


def compile_arguments(model: Any, **settings: Any) -> CompileArguments:
    """Return the settings as arguments of `compile`; settings that are None are taken from the compiled model."""
    own = compiled_with(model)
    given = {name: value if value is not None else own.get(name) for name, value in settings.items()}
    if settings.get("loss") is not None and settings.get("loss_weights") is None:
        given["loss_weights"] = None  # the model's weights belong to the model's losses
    optimizer = given["optimizer"] = optimizer_of(given.get("optimizer"))
    scaled = isinstance(optimizer, keras.optimizers.LossScaleOptimizer) or optimizer is own.get("optimizer")
    if model.dtype_policy.name == "mixed_float16" and not scaled:  # as `compile` does
        given["optimizer"] = keras.optimizers.LossScaleOptimizer(optimizer, name="loss_scale_optimizer")
    return CompileArguments(**given)


def compiled_with(model: Any) -> dict[str, Any]:
    """Return the arguments of the last `model.compile`; {} if the model is not compiled."""
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


def build_optimizer(model: Any, values: Sequence[Any] | None) -> None:
    """Create the optimizer's variables, and assign these values; raise InvalidSettingsError if they are of others."""
    optimizer = model.optimizer
    optimizer.build(model.trainable_variables)
    if values is None:
        return
    variables = optimizer.variables
    if [tuple(each.shape) for each in values] != [tuple(each.shape) for each in variables]:
        raise InvalidSettingsError(
            f"the optimizer has {len(values)} values of its steps so far, and {len(variables)} are needed for "
            "the weights that are trained now; give a new optimizer"
        )
    for variable, value in zip(variables, values, strict=True):
        variable.assign(value)


def optimizer_of(given: Any) -> Any:
    """Look up the optimizer of a name or configuration; return an instance itself; else raise InvalidSettingsError."""
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


class KerasLossKind(NamedTuple):
    """The rules for a prediction (setting `prediction`) of a known loss from logits and from probabilities."""

    logits: str
    probabilities: str
    labels: str  # "class" (its number), "one-hot" (a value for each class) or "number" (as many as the output has)


_CLASSES = ("argmax", "argmax_probability")
_BINARY = ("binary_logit", "binary_probability")
_KINDS: Mapping[str, KerasLossKind] = {
    "sparse_categorical_crossentropy": KerasLossKind(*_CLASSES, "class"),
    "categorical_crossentropy": KerasLossKind(*_CLASSES, "one-hot"),
    "categorical_focal_crossentropy": KerasLossKind(*_CLASSES, "one-hot"),
    "categorical_hinge": KerasLossKind("argmax", "argmax", "one-hot"),
    "categorical_generalized_cross_entropy": KerasLossKind("argmax_probability", "argmax_probability", "class"),
    "binary_crossentropy": KerasLossKind(*_BINARY, "number"),
    "binary_focal_crossentropy": KerasLossKind(*_BINARY, "number"),
    "hinge": KerasLossKind("binary_logit", "binary_logit", "number"),
    "squared_hinge": KerasLossKind("binary_logit", "binary_logit", "number"),
    **dict.fromkeys(
        (
            *("mean_squared_error", "mean_absolute_error", "mean_absolute_percentage_error", "huber", "log_cosh"),
            *("mean_squared_logarithmic_error", "poisson", "kl_divergence", "cosine_similarity"),
        ),
        KerasLossKind("value", "value", "number"),
    ),
}


def loss_of(loss: Any) -> Any:
    """Look up the loss of a name or configuration, or raise InvalidSettingsError; return other values unchanged."""
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
    """Return the rule for a prediction from an output of this loss, as in the setting `prediction`; None: unknown."""
    known = loss_kind(loss)
    if known is None:
        return None
    of_logits = (getattr(loss, "_fn_kwargs", None) or {}).get("from_logits", False)
    return known.logits if of_logits else known.probabilities


def label_dtype(loss: Any) -> str | None:
    """Return the type that this loss needs for scalar labels: INTEGER for class numbers, else FLOAT; None: unknown."""
    known = loss_kind(loss)
    return None if known is None else INTEGER if known.labels == "class" else FLOAT


def losses_by_output(loss: Any, names: Sequence[str] | None) -> list[tuple[str | None, Any]]:
    """Return (name of the output, its loss) for each output that has a loss, in the order of the outputs.

    `loss` is the argument of `compile`; a single one is for every output. The `names` of the outputs may not be known.
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
    return [] if loss is None else [(name, loss) for name in (names if names is not None else [None])]


def check_losses(model: Any, loss: Any, labels: Sequence[Any] | None) -> list[tuple[str | None, Any]]:
    """Return `losses_by_output`; raise InvalidSettingsError if one is not a loss, or the number of labels differs."""
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
            f"{len(pairs)} losses (of the outputs {outputs}) for {len(labels)} label_cols {list(labels)!r}; there "
            "must be a label for each output that has a loss, in their order"
        )
    return pairs
