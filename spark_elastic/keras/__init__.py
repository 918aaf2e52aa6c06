"""Data-parallel Keras 3, on TensorFlow or PyTorch: ``import spark_elastic.keras as hvd``."""

from __future__ import annotations

# Before anything imports Keras: it says what to do if the backend is none of ours.
import spark_elastic.keras.backend  # noqa: F401

# isort: split
from spark_elastic.collective import surface
from spark_elastic.collective.surface import *  # noqa: F403
from spark_elastic.keras import callbacks, elastic
from spark_elastic.keras.callbacks import BestModelCheckpoint
from spark_elastic.keras.compression import Compression
from spark_elastic.keras.old_names import accept_old_names
from spark_elastic.keras.operations import allgather, allreduce, broadcast, broadcast_global_variables, reducescatter
from spark_elastic.keras.optimizer import DistributedOptimizer, PartialDistributedOptimizer
from spark_elastic.keras.saving import load_model
from spark_elastic.keras.sync_batch_normalization import SyncBatchNormalization

accept_old_names()

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
