"""Tensors and plain values as bytes and back, with nothing among them that could run code."""

from __future__ import annotations

import io
import numbers
from collections import Counter, OrderedDict
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from spark_elastic.errors import CheckpointError
from spark_elastic.runs import trust

_PLAIN = (bool, int, float, str, bytes, complex, torch.dtype)


def to_bytes(value: Any, nbytes: int = 0) -> bytes:
    """Return tensors and plain values as a file of `torch.save`; `nbytes`, their size, saves growing the buffer."""
    file = io.BytesIO()
    if nbytes:  # a buffer that grows takes up to twice its size
        file.seek(nbytes + (nbytes >> 6) + (64 << 10))
        file.write(b"\0")
        file.seek(0)
    torch.save(value, file)
    file.truncate()
    return file.getvalue()


def from_bytes(data: bytes) -> Any:
    """Load what `to_bytes` has written. Raise CheckpointError if it is something else, or torch is not safe."""
    trust.TORCH.check(torch.__version__)
    try:
        return torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
    except Exception as error:
        why = str(error).partition("\n")[0]
        raise CheckpointError(f"not what torch.save has written of tensors and plain values: {why}") from error


def detached(value: Any, where: str, copy: bool = True) -> Any:
    """Copy tensors and plain values, in dicts and lists, to the CPU, so that later steps do not change them.

    With copy=False, the value is checked only, and shares its tensors. Raise CheckpointError, which names the value as
    `where`, if it holds something that cannot be loaded without running code.
    """
    if isinstance(value, torch.Tensor):
        return value.detach().to("cpu", copy=True) if copy else value
    if value is None or type(value) in _PLAIN:
        return value
    if isinstance(value, np.generic) and value.dtype.kind in "bc":
        return value.item()
    if isinstance(value, numbers.Integral):
        return int(value)
    if isinstance(value, numbers.Real):
        return float(value)
    if isinstance(value, OrderedDict):
        return OrderedDict((key, detached(one, f"{where}.{key}", copy)) for key, one in value.items())
    if isinstance(value, Counter):  # milestones of a learning rate scheduler
        return Counter({key: int(one) for key, one in value.items()})
    if isinstance(value, Mapping):
        return {key: detached(one, f"{where}.{key}", copy) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        copies = [detached(one, f"{where}[{at}]", copy) for at, one in enumerate(value)]
        return tuple(copies) if isinstance(value, tuple) else copies
    raise not_plain(value, where)


def check_exact(value: Any, where: str) -> None:
    """Raise CheckpointError if `detached` would make another type of a part of the value than Python's for NumPy's."""
    kind = type(value)
    if kind in (dict, OrderedDict):
        for key, one in value.items():
            check_exact(one, f"{where}.{key}")
    elif kind in (list, tuple):
        for at, one in enumerate(value):
            check_exact(one, f"{where}[{at}]")
    elif kind is np.ndarray:
        if value.dtype.kind not in "biuf" or not value.dtype.isnative or value.dtype.itemsize > 8:
            raise not_plain(value, where)
    elif isinstance(value, np.generic) and value.dtype.kind in "biufc":
        return
    elif value is not None and kind not in (*_PLAIN, torch.Tensor, torch.Size, Counter):
        raise not_plain(value, where)


def not_plain(value: Any, where: str) -> CheckpointError:
    """Return the error for a value that a checkpoint cannot hold."""
    return CheckpointError(
        f"{where} is of {type(value).__module__}.{type(value).__qualname__}, which a checkpoint cannot hold: only "
        "tensors and plain values can be read back without running code"
    )
