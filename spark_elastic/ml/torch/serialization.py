"""A module without its weights, and a module's weights without it: what a saved model consists of."""

from __future__ import annotations

import copy
import io
import numbers
from collections import Counter, OrderedDict
from collections.abc import Mapping
from typing import Any

import torch

from spark_elastic.errors import CheckpointError
from spark_elastic.ml import trust

# Tensors and plain values as bytes, and back: what files of torch can hold that cannot run code when they are read.


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


def hollow(module: torch.nn.Module) -> torch.nn.Module:
    """A copy whose weights are all zero and take no room: one number each, whatever their shape."""
    weights = [each for each in module.state_dict(keep_vars=True).values() if isinstance(each, torch.Tensor)]
    return copy.deepcopy(module, {id(weight): _hollow_tensor(weight) for weight in weights})


def fill(module: torch.nn.Module, weights: dict[str, Any]) -> torch.nn.Module:
    """Give a module these weights; it may be hollow. Tensors stay the same objects: layers may refer to them twice.

    Raises: CheckpointError: they belong to another architecture.
    """
    for tensor in module.state_dict(keep_vars=True).values():
        if isinstance(tensor, torch.Tensor) and tensor.numel() > 1 and 0 in tensor.stride():
            tensor.data = torch.empty(tensor.shape, dtype=tensor.dtype)
    try:
        module.load_state_dict(weights)
    except RuntimeError as error:
        raise CheckpointError(f"the saved weights do not fit {type(module).__name__}: {error}") from error
    return module


def dumps(module: torch.nn.Module) -> bytes:
    """The module's `state_dict`, on the CPU, as a file of torch.save."""
    file = io.BytesIO()
    weights = module.state_dict()
    torch.save({k: v.cpu() if isinstance(v, torch.Tensor) else v for k, v in weights.items()}, file)
    return file.getvalue()


def loads(file: bytes) -> dict[str, Any]:
    """Raises: CheckpointError: damaged, more than tensors, or this version of torch could be made to run code."""
    trust.TORCH.check(torch.__version__)
    try:
        weights: dict[str, Any] = torch.load(io.BytesIO(file), weights_only=True, map_location="cpu")
    except Exception as error:
        raise CheckpointError(f"the saved weights cannot be loaded: {str(error).partition(chr(10))[0]}") from error
    return weights


def _hollow_tensor(tensor: torch.Tensor) -> torch.Tensor:
    zero = torch.zeros((), dtype=tensor.dtype).expand(tensor.shape)
    if isinstance(tensor, torch.nn.Parameter):
        return torch.nn.Parameter(zero, requires_grad=tensor.requires_grad)
    return zero
