"""Accept two names of Keras 2 that Keras 3 would refuse and that programs written for Horovod use."""

from __future__ import annotations

import functools
import warnings
from typing import Any

import keras

_ARGUMENT = "experimental_run_tf_function"


def accept_keras2_names() -> None:
    """Make `model.compile` accept `experimental_run_tf_function`, and optimizers `lr`, each with a warning."""
    # Replace `compile` in the class that defines it. Keras takes a `compile` of a subclass for the user's and does not
    # call it when a model is loaded.
    owner = next(kind for kind in keras.Model.__mro__ if "compile" in vars(kind))
    plain = owner.compile
    if hasattr(plain, "accepts_keras2_names"):
        return

    @functools.wraps(plain)
    def compile(self: Any, *args: Any, **kwargs: Any) -> Any:
        if _ARGUMENT in kwargs:
            del kwargs[_ARGUMENT]
            warnings.warn(
                "compile(experimental_run_tf_function=...) has no effect: Keras 3 has no such argument; remove it",
                UserWarning,
                stacklevel=2,
            )
        return plain(self, *args, **kwargs)

    compile.accepts_keras2_names = True  # type: ignore[attr-defined]
    owner.compile = compile
    if not hasattr(keras.optimizers.Optimizer, "lr"):
        keras.optimizers.Optimizer.lr = property(_rate, _set_rate)


def _rate(optimizer: Any) -> Any:
    """Return the backend's variable, as Keras 2 did: `keras.backend.set_value` accepts no other."""
    _warn_of_lr()
    rate = getattr(optimizer, "inner_optimizer", optimizer)._learning_rate
    return rate.value if isinstance(rate, keras.Variable) else rate


def _set_rate(optimizer: Any, value: Any) -> None:
    _warn_of_lr()
    optimizer.learning_rate = value


def _warn_of_lr() -> None:
    warnings.warn(
        "optimizer.lr is learning_rate in Keras 3; lr is accepted for programs that were written for Horovod",
        UserWarning,
        stacklevel=3,
    )
