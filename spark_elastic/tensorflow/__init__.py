"""Data-parallel TensorFlow with Horovod's names: ``import spark_elastic.tensorflow as hvd``.

Start reading at `gradients` (reductions of a step's gradients), `operations` (collectives on tensors) and `host` (how a
graph calls Python of this process).
"""

from __future__ import annotations

from typing import Any

from spark_elastic.collective import surface
from spark_elastic.collective.operators import Compression
from spark_elastic.collective.surface import *  # noqa: F403
from spark_elastic.errors import MissingExtraError

try:
    import tensorflow as _tensorflow  # noqa: F401
except ImportError as error:
    raise MissingExtraError(what="spark_elastic.tensorflow", package="tensorflow", extra="tensorflow") from error

from spark_elastic.tensorflow import operations
from spark_elastic.tensorflow.gradients import DistributedGradientTape, PartialDistributedGradientTape
from spark_elastic.tensorflow.operations import *  # noqa: F403

# Names from packages that import this one; importing them here would be circular, so they are imported on first use.
_LAZY = {
    "DistributedOptimizer": ("spark_elastic.keras.optimizer", "DistributedOptimizer"),
    "SyncBatchNormalization": ("spark_elastic.keras.sync_batch_normalization", "SyncBatchNormalization"),
    "elastic": ("spark_elastic.tensorflow.elastic", None),
    "keras": ("spark_elastic.tensorflow.keras", None),
}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    module, attribute = _LAZY[name]
    value = importlib.import_module(module)
    globals()[name] = value = value if attribute is None else getattr(value, attribute)
    return value


__all__ = [
    "Compression",
    "DistributedGradientTape",
    "DistributedOptimizer",  # noqa: F405
    "PartialDistributedGradientTape",
    "SyncBatchNormalization",  # noqa: F405
    "elastic",  # noqa: F405
    "keras",  # noqa: F405
]
__all__ += surface.__all__
__all__ += operations.__all__
