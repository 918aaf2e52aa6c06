"""Two names of Keras 2 that programs written for Horovod use, and that Keras 3 would refuse."""

from __future__ import annotations

import functools
import warnings
from typing import Any

import keras

_NAME = "experimental_run_tf_function"


def accept_old_names() -> None:
    """Have `model.compile` take `experimental_run_tf_function`, and optimizers have `lr`; each with a warning."""
    # where it is defined: Keras takes a `compile` of a subclass for one of the user's own, and leaves it out on loading
    owner = next(kind for kind in keras.Model.__mro__ if "compile" in vars(kind))
    plain = owner.compile
    if hasattr(plain, "accepts_old_names"):
        return

    @functools.wraps(plain)
    def compile(self: Any, *args: Any, **kwargs: Any) -> Any:
        if _NAME in kwargs:
            del kwargs[_NAME]
            warnings.warn(
                "compile(experimental_run_tf_function=...) has no effect: Keras 3 does not know it; leave it out",
                UserWarning,
                stacklevel=2,
            )
        return plain(self, *args, **kwargs)

    compile.accepts_old_names = True  # type: ignore[attr-defined]
    owner.compile = compile
    if not hasattr(keras.optimizers.Optimizer, "lr"):
        keras.optimizers.Optimizer.lr = property(_rate, _set_rate)


def _rate(optimizer: Any) -> Any:
    """The backend's own variable, as in Keras 2: `keras.backend.set_value` knows no other."""
    _warn_of_lr()
    rate = getattr(optimizer, "inner_optimizer", optimizer)._learning_rate
    return rate.value if isinstance(rate, keras.Variable) else rate


def _set_rate(optimizer: Any, value: Any) -> None:
    _warn_of_lr()
    optimizer.learning_rate = value


def _warn_of_lr() -> None:
    warnings.warn(
        "optimizer.lr is learning_rate in Keras 3; lr is accepted here for programs that were written for Horovod",
        UserWarning,
        stacklevel=3,
    )
