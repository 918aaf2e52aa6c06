"""What a Keras loss says about its labels and about predictions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import keras

from spark_elastic.errors import InvalidSettingsError
from spark_elastic.ml.preparation import FLOAT, INTEGER


@dataclass(frozen=True, slots=True)
class LossKind:
    """What a loss is known to be of.

    logits, probabilities: how a prediction is made of outputs that are one or the other (see the setting `prediction`).
    labels: "class" (its number), "one-hot" (a value for each class) or "number" (as many as the output has).
    """

    logits: str
    probabilities: str
    labels: str


_CLASSES = ("argmax", "argmax_probability")
_BINARY = ("binary_logit", "binary_probability")
_RAW, _BY_SIGN = ("value", "value"), ("binary_logit", "binary_logit")
_KINDS: Mapping[str, LossKind] = {
    "sparse_categorical_crossentropy": LossKind(*_CLASSES, "class"),
    "categorical_crossentropy": LossKind(*_CLASSES, "one-hot"),
    "categorical_focal_crossentropy": LossKind(*_CLASSES, "one-hot"),
    "categorical_hinge": LossKind("argmax", "argmax", "one-hot"),
    "categorical_generalized_cross_entropy": LossKind("argmax_probability", "argmax_probability", "class"),
    "binary_crossentropy": LossKind(*_BINARY, "number"),
    "binary_focal_crossentropy": LossKind(*_BINARY, "number"),
    "hinge": LossKind(*_BY_SIGN, "number"),
    "squared_hinge": LossKind(*_BY_SIGN, "number"),
    **dict.fromkeys(
        (
            *("mean_squared_error", "mean_absolute_error", "mean_absolute_percentage_error", "huber", "log_cosh"),
            *("mean_squared_logarithmic_error", "poisson", "kl_divergence", "cosine_similarity"),
        ),
        LossKind(*_RAW, "number"),
    ),
}


def found(loss: Any) -> Any:
    """The loss that a name or a configuration stands for; anything else as it is.

    Raises: InvalidSettingsError: there is no such loss.
    """
    if not isinstance(loss, (str, dict)):
        return loss
    try:
        return keras.losses.get(loss)
    except (ValueError, TypeError) as error:
        raise InvalidSettingsError(f"loss={loss!r} is no loss of Keras: {str(error).splitlines()[0]}") from None


def kind(loss: Any) -> LossKind | None:
    """None: a loss of the user's own."""
    function = found(loss)
    if isinstance(function, keras.losses.Loss):
        function = getattr(function, "fn", None)
    if not getattr(function, "__module__", "").startswith("keras."):
        return None
    return _KINDS.get(getattr(function, "__name__", ""))


def rule(loss: Any) -> str | None:
    """How the loss makes a prediction of an output; None: it does not say. See the setting `prediction`."""
    known = kind(loss)
    if known is None:
        return None
    return known.logits if of_logits(loss) else known.probabilities


def of_logits(loss: Any) -> bool:
    """Whether the loss takes outputs without softmax or sigmoid."""
    settings = getattr(loss, "_fn_kwargs", None) or {}
    return bool(settings.get("from_logits", False))


def label_dtype(loss: Any) -> str | None:
    """What a label that is one number has to be for this loss; None: whatever it is."""
    known = kind(loss)
    return None if known is None else INTEGER if known.labels == "class" else FLOAT


def name_of(loss: Any) -> str:
    """For errors."""
    return str(loss if isinstance(loss, str) else getattr(loss, "name", None) or getattr(loss, "__name__", repr(loss)))


def is_loss(value: Any) -> bool:
    if isinstance(value, (str, dict)):
        found(value)
        return True
    return isinstance(value, keras.losses.Loss) or (callable(value) and not isinstance(value, type))
