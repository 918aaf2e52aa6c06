"""Data-parallel PyTorch with the names that Horovod users know: ``import spark_elastic.torch as hvd``."""

from __future__ import annotations

from spark_elastic.collective import operations as _collectives
from spark_elastic.collective import surface
from spark_elastic.collective.calls import poll, synchronize
from spark_elastic.collective.operations import *  # noqa: F403
from spark_elastic.collective.operators import Compression
from spark_elastic.collective.surface import *  # noqa: F403
from spark_elastic.torch import elastic, operations
from spark_elastic.torch.operations import *  # noqa: F403
from spark_elastic.torch.optimizer import DistributedOptimizer
from spark_elastic.torch.sync_batch_norm import SyncBatchNorm

__all__ = ["Compression", "DistributedOptimizer", "SyncBatchNorm", "elastic", "poll", "synchronize"]
__all__ += surface.__all__
__all__ += _collectives.__all__
__all__ += operations.__all__
