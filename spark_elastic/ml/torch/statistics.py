"""Batch statistics in a training: of all workers' rows, so that the number of workers does not matter."""

from __future__ import annotations

import torch

from spark_elastic.torch.sync_batch_norm import SyncBatchNorm


def synchronise(model: torch.nn.Module) -> None:
    """Make the batch normalisation layers take the statistics of all workers' rows, in place.

    A batch that has one value per channel over all workers is normalised by the running statistics, as it is by
    `single_rows` where a worker is alone.
    """
    SyncBatchNorm.convert_sync_batchnorm(model)
    for layer in model.modules():
        if isinstance(layer, SyncBatchNorm):
            layer.single_value_is_normalised = True
