"""Horovod's module names for ours, so that programs written for Horovod run here unchanged."""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import os
import sys
import threading
import types
import unittest.mock
from collections.abc import Callable, Sequence
from typing import Any

OURS = {
    "horovod.torch": "spark_elastic.torch",
    "horovod.torch.elastic": "spark_elastic.torch.elastic",
    "horovod.torch.mpi_ops": "spark_elastic.torch",
    "horovod.tensorflow": "spark_elastic.tensorflow",
    "horovod.tensorflow.elastic": "spark_elastic.tensorflow.elastic",
    "horovod.tensorflow.keras": "spark_elastic.tensorflow.keras",
    "horovod.tensorflow.keras.callbacks": "spark_elastic.keras.callbacks",
    "horovod.tensorflow.keras.elastic": "spark_elastic.keras.elastic",
    "horovod.keras": "spark_elastic.keras",
    "horovod.keras.callbacks": "spark_elastic.keras.callbacks",
    "horovod.keras.elastic": "spark_elastic.keras.elastic",
    "horovod.common.exceptions": "spark_elastic.errors",
}
"""Loaded when they are imported, as a program uses one framework and has perhaps no other."""


def install() -> None:
    """Have `import horovod...` give the modules of this package from now on."""
    sys.meta_path.insert(0, _Finder())


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, fullname: str, path: Any, target: Any = None) -> Any:
        if fullname in OURS or fullname in _WRITTEN_HERE:
            return importlib.machinery.ModuleSpec(fullname, self, is_package=True)
        return None

    def create_module(self, spec: Any) -> types.ModuleType:
        if spec.name in OURS:
            alias = _Alias(spec.name, importlib.import_module(OURS[spec.name]))
            vars(alias).update(_INTERNALS.get(spec.name, dict)())
            return alias
        module = types.ModuleType(spec.name)
        vars(module).update(_WRITTEN_HERE[spec.name]())
        return module

    def exec_module(self, module: types.ModuleType) -> None:
        pass


class _Alias(types.ModuleType):
    """Give a module's attributes under another name. Imports set `__spec__` and submodules here, not on the module."""

    def __init__(self, name: str, ours: types.ModuleType) -> None:
        super().__init__(name)
        self.__dict__["_ours"] = ours

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_ours"], name)

    def __dir__(self) -> list[str]:
        return dir(self.__dict__["_ours"])


# --- what tests take from elsewhere in Horovod, by what it is for ------------------------------------


def _is_version_greater_equal_than(one: str, other: str) -> bool:
    from packaging import version

    return version.parse(one) >= version.parse(other)


def _executing_eagerly() -> bool:
    import tensorflow as tf

    return bool(tf.executing_eagerly())


def _in_thread(
    target: Callable[..., Any], args: Sequence[Any] = (), name: str | None = None, daemon: bool = True, **_: Any
) -> threading.Thread:
    thread = threading.Thread(target=target, args=tuple(args), name=name, daemon=daemon)
    thread.start()
    return thread


_WRITTEN_HERE: dict[str, Callable[[], dict[str, Any]]] = {
    "horovod": lambda: {"__path__": [], "__version__": "0.28.1"},
    "horovod.common": dict,
    "horovod.common.util": lambda: {"is_version_greater_equal_than": _is_version_greater_equal_than},
    "horovod.tensorflow.util": lambda: {"_executing_eagerly": _executing_eagerly},
    "horovod.runner": dict,
    "horovod.runner.util": dict,
    "horovod.runner.util.threads": lambda: {"in_thread": _in_thread},
    "mock": lambda: {**vars(unittest.mock), "version_info": (5, 0, 0)},
}


def _of_tensorflow() -> dict[str, Any]:
    return {"_executing_eagerly": _executing_eagerly}


_INTERNALS: dict[str, Callable[[], dict[str, Any]]] = {"horovod.tensorflow": _of_tensorflow}
"""Names of Horovod's own, not meant for users, that its tests use beside the public ones."""


def tell_position(rank: int, size: int, local_rank: int, local_size: int) -> None:
    """Set the variables in which `horovodrun` tells a process its place."""
    os.environ.update(
        HOROVOD_RANK=str(rank),
        HOROVOD_SIZE=str(size),
        HOROVOD_LOCAL_RANK=str(local_rank),
        HOROVOD_LOCAL_SIZE=str(local_size),
    )


# --- what Keras 3 has renamed or dropped --------------------------------------------------------------


def give_keras_2_names() -> None:
    """Have Keras 3 accept names of Keras 2 that Horovod's programs use, none of which has to do with Horovod.

    Otherwise they would end before they come to their first collective.
    """
    import keras
    import tensorflow as tf

    def without(plain: Callable[..., Any], dropped: Sequence[str], renamed: dict[str, str], defaults: dict[str, Any]):
        def called(self: Any, *args: Any, **kwargs: Any) -> Any:  # Keras looks for a parameter in front of the others
            for name in dropped:
                kwargs.pop(name, None)
            for old, new in renamed.items():
                if old in kwargs:
                    kwargs[new] = kwargs.pop(old)
            return plain(self, *args, **{**defaults, **kwargs})

        return called

    for name in ("Adam", "RMSprop", "SGD"):
        kind = getattr(keras.optimizers, name)
        kind.__init__ = without(kind.__init__, ["decay"], {"lr": "learning_rate"}, {})
    # a subclass may leave the learning rate out, and sets it by itself
    base = keras.optimizers.Optimizer
    plain = base.__init__

    def init(self: Any, learning_rate: Any = 0.001, *args: Any, **kwargs: Any) -> None:
        plain(self, learning_rate, *args, **kwargs)

    base.__init__ = init
    base.apply_gradients = without(base.apply_gradients, ["experimental_aggregate_gradients"], {}, {})
    embedding = keras.layers.Embedding
    embedding.__init__ = without(embedding.__init__, ["input_length"], {}, {})
    norm = keras.layers.BatchNormalization
    norm.__init__ = without(norm.__init__, ["fused"], {}, {})
    keras.Variable.ref = lambda self: self.value.ref()
    for namespace in (keras, tf.keras):
        namespace.losses.mean_squared_error = keras.losses.MeanSquaredError()
        namespace.layers.ThresholdedReLU = lambda theta=1.0: keras.layers.ReLU(threshold=theta)
