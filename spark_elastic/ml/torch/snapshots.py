"""Tensors and plain values as bytes, and back: what files of torch can hold that cannot run code when they are read."""

from __future__ import annotations

import io
import numbers
from collections import Counter, OrderedDict
from collections.abc import Mapping
from typing import Any

import torch

from spark_elastic.errors import CheckpointError
from spark_elastic.ml import trust


def to_bytes(value: Any) -> bytes:
    """By `torch.save`; for `from_bytes`, or `torch.load(weights_only=True)`."""
    out = io.BytesIO()
    torch.save(value, out)
    return out.getvalue()


def from_bytes(data: bytes) -> Any:
    """Raises: CheckpointError: not tensors and plain values, or this version of torch could be made to run code."""
    trust.TORCH.check(torch.__version__)
    try:
        return torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
    except Exception as error:
        raise CheckpointError(f"not what torch.save has written of tensors and plain values: {error}") from error


def detached(value: Any, where: str, copy: bool = True) -> Any:
    """A copy on the CPU that later steps do not reach, of types that loading cannot run code with.

    copy: False: only look whether it can be done; what is returned shares the tensors.

    Raises: CheckpointError: there is something else in it; `where` says in what.
    """
    if isinstance(value, torch.Tensor):
        return value.detach().to("cpu", copy=True) if copy else value
    if value is None or type(value) in (bool, int, float, str):
        return value
    if isinstance(value, numbers.Integral):
        return int(value)
    if isinstance(value, numbers.Real):
        return float(value)
    if isinstance(value, OrderedDict):
        return OrderedDict((key, detached(one, f"{where}.{key}", copy)) for key, one in value.items())
    if isinstance(value, Counter):  # of learning rate milestones
        return Counter({key: int(one) for key, one in value.items()})
    if isinstance(value, Mapping):
        return {key: detached(one, f"{where}.{key}", copy) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        copies = [detached(one, f"{where}[{at}]", copy) for at, one in enumerate(value)]
        return tuple(copies) if isinstance(value, tuple) else copies
    raise CheckpointError(
        f"{where} is of {type(value).__module__}.{type(value).__qualname__}, which a checkpoint cannot hold: only "
        "tensors and plain values can be read back without running code"
    )
