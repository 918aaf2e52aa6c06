"""The files of a saved PyTorch model, and the module in them. Imports nothing of Spark."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from spark_elastic.errors import CheckpointError
from spark_elastic.ml.saved_stage import SavedParts
from spark_elastic.ml.torch import serialization
from spark_elastic.ml.torch.model_function import ModelFunction
from spark_elastic.runs.tensors import from_bytes

ARCHITECTURE = "architecture"
_WEIGHTS = "weights.pt"
_SAFETENSORS = "weights.safetensors"

codec = serialization


def parts_of(module: torch.nn.Module, facts: Mapping[str, Any], made_by: ModelFunction | None) -> SavedParts:
    """Return what to save of a module; `facts` are those of its fit, `made_by` is the function that has made it."""
    weights = serialization.weights_to_bytes(module)
    safe = _safetensors(module)
    beside = {} if safe is None else {_SAFETENSORS: safe}
    return SavedParts(facts, {_WEIGHTS: weights}, {ARCHITECTURE: _architecture(module, made_by)}, beside=beside)


def _architecture(module: torch.nn.Module, made_by: ModelFunction | None) -> Any:
    """Return a hollow module; or the function, unless the module can be loaded without trust."""
    if made_by is None:
        return serialization.hollow(module)
    try:
        made = serialization.hollow(module)
    except Exception:  # functions make modules that cannot be pickled
        return made_by
    return made_by if serialization.dumps({ARCHITECTURE: made}) is None else made


def present(facts: Mapping[str, Any]) -> dict[str, Any]:
    """Return those of the saved objects that this process has already: none."""
    return {}


def native_of(facts: Mapping[str, Any], files: Mapping[str, bytes], objects: Mapping[str, Any]) -> torch.nn.Module:
    """Return the saved module, on the CPU, in eval mode. Raises `CheckpointError` if it is damaged."""
    if _WEIGHTS not in files or ARCHITECTURE not in objects:
        raise CheckpointError("the metadata of the saved model is damaged: it names no weights or no architecture")
    given = objects[ARCHITECTURE]
    try:
        weights = from_bytes(files[_WEIGHTS])
        return serialization.fill(given() if isinstance(given, ModelFunction) else given, weights).eval()
    except CheckpointError as error:
        error.message = f"{_WEIGHTS}: {error.message}"
        raise


def _safetensors(module: torch.nn.Module) -> bytes | None:
    """Return the `state_dict` as a file of safetensors; None without that package, or if not all of it is tensors."""
    try:
        from safetensors.torch import save
    except ImportError:
        return None
    state = module.state_dict()
    if not all(type(each) is torch.Tensor and each.layout is torch.strided for each in state.values()):
        return None
    # copies of tied weights: the file would have only one of their names
    seen: set[int] = set()
    tensors = {}
    for name, each in state.items():
        plain = each.detach().cpu().contiguous()
        tensors[name] = plain.clone() if plain.untyped_storage().data_ptr() in seen else plain
        seen.add(plain.untyped_storage().data_ptr())
    try:
        return bytes(save(tensors))
    except (KeyError, RuntimeError, ValueError):  # a dtype that the format has not
        return None
