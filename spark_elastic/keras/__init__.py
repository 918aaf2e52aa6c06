"""Data-parallel training with Keras 3 on TensorFlow or PyTorch: ``import spark_elastic.keras as hvd``.

Start reading at `optimizer` (gradients are reduced), `callbacks` (for `model.fit`) and `elastic` (training that
continues when the world changes). `tensorflow_backend` and `torch_backend` hold the code of one backend each; neither
needs the other's package.
"""

from __future__ import annotations

# Checks the backend, so it must come before any other import of Keras.
import spark_elastic.keras.backend  # noqa: F401

# isort: split
from spark_elastic.collective import surface
from spark_elastic.collective.operators import Compression
from spark_elastic.collective.process import process
from spark_elastic.collective.surface import *  # noqa: F403
from spark_elastic.keras import callbacks, elastic
from spark_elastic.keras.callbacks import BestModelCheckpoint
from spark_elastic.keras.functions import (
    accept_keras2_names,
    allgather,
    allreduce,
    broadcast,
    broadcast_global_variables,
    load_model,
    reducescatter,
)
from spark_elastic.keras.optimizer import DistributedOptimizer, PartialDistributedOptimizer
from spark_elastic.keras.printing import PrintedByRank0
from spark_elastic.keras.sync_batch_normalization import SyncBatchNormalization

accept_keras2_names()
process.follow(PrintedByRank0().follow)

__all__ = [
    "BestModelCheckpoint",
    "Compression",
    "DistributedOptimizer",
    "PartialDistributedOptimizer",
    "SyncBatchNormalization",
    "allgather",
    "allreduce",
    "broadcast",
    "broadcast_global_variables",
    "callbacks",
    "elastic",
    "load_model",
    "reducescatter",
]
__all__ += surface.__all__
