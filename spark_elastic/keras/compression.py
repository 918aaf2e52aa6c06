"""The compressors of gradients that a `DistributedOptimizer` sends."""

from spark_elastic.collective.reduction import Compression

__all__ = ["Compression"]
