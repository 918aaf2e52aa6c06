"""Batch normalisation of one row."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.nn.modules.batchnorm import _BatchNorm

from spark_elastic.torch.sync_batch_norm import SyncBatchNorm

# Batch statistics in a training: of all workers' rows, so that the number of workers does not matter.


def synchronise(model: torch.nn.Module) -> None:
    """Make the batch normalisation layers take the statistics of all workers' rows, in place.

    A batch that has one value per channel over all workers is normalised by the running statistics, as it is by
    `single_rows` where a worker is alone.
    """
    SyncBatchNorm.convert_sync_batchnorm(model)
    for layer in model.modules():
        if isinstance(layer, SyncBatchNorm):
            layer.single_value_is_normalised = True


@contextmanager
def normalised_alone(model: torch.nn.Module, rows: int) -> Iterator[None]:
    """While this lasts, layers that would have one value per channel take their running statistics, and keep them.

    One value has no variance, for which torch raises; and whether a worker's share of a batch is a single row follows
    from the number of workers, which may be another by then.
    """
    norms = [each for each in model.modules() if rows == 1 and isinstance(each, _BatchNorm) and each.training]
    norms = [each for each in norms if not (isinstance(each, SyncBatchNorm) and each.takes_part)]
    handles = [each.register_forward_pre_hook(_choose) for each in norms if each.running_mean is not None]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
        for each in norms:
            each.training = True


def _choose(norm: torch.nn.Module, args: tuple[Any, ...]) -> None:
    values = args[0]
    norm.training = values.numel() > values.shape[1]
