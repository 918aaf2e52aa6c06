"""Batch normalisation over all workers' rows, and of a single row."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.nn.modules.batchnorm import _BatchNorm

from spark_elastic.torch.sync_batch_norm import SyncBatchNorm


def synchronise(model: torch.nn.Module) -> None:
    """Make batch normalisation use the statistics of all workers' rows, in place.

    A batch with one value per channel over all workers is normalised by the running statistics, as `single_row_norm`
    does for a worker that is alone.
    """
    SyncBatchNorm.convert_sync_batchnorm(model)
    for layer in model.modules():
        if isinstance(layer, SyncBatchNorm):
            layer.single_value_is_normalised = True


@contextmanager
def single_row_norm(model: torch.nn.Module, rows: int) -> Iterator[None]:
    """Let batch normalisation use its running statistics for one value per channel, without updating them.

    One value has no variance, so torch raises. A worker's share of a batch can be a single row in one world and several
    rows in another, and the training must not fail in either.
    """
    norms = [each for each in model.modules() if rows == 1 and isinstance(each, _BatchNorm) and each.training]
    norms = [each for each in norms if not (isinstance(each, SyncBatchNorm) and each.takes_part)]
    handles = [each.register_forward_pre_hook(_choose_mode) for each in norms if each.running_mean is not None]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
        for each in norms:
            each.training = True


def _choose_mode(norm: torch.nn.Module, args: tuple[Any, ...]) -> None:
    values = args[0]
    norm.training = values.numel() > values.shape[1]
