"""PyTorch objects as bytes and back: tensors, modules without their weights, and settings that need no trust.

Everything is a file of `torch.save`, read by its restricted loader (`weights_only=True`), which runs no code that the
file names. `dumps`, `loads` and `pickled` are the `Codec` of estimators and models; `loads` also accepts the classes of
`torch.nn`, `torch.optim` and this package's callbacks.
"""

from __future__ import annotations

import importlib
import io
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from spark_elastic.collective.digest import digest
from spark_elastic.errors import CheckpointError, InvalidSettingsError
from spark_elastic.ml.torch.fidelity import differences, tensors_of
from spark_elastic.runs import trust
from spark_elastic.runs.tensors import detached, from_bytes, to_bytes
from spark_elastic.wire import pickling

_BUFFERS = "spark_elastic.buffers"  # the entry of a state's `_metadata` with buffers of persistent=False, by name
_FROZEN = "spark_elastic.frozen"  # the entry with the digests of the frozen parameters that a state leaves out, by name
_NONE: Mapping[str, str] = {}


def frozen_digests(module: torch.nn.Module) -> dict[str, str]:
    """Return a digest of each parameter that is not trained, by its name in the `state_dict`.

    It is "" for layers that PEFT keeps beside their trained copies (`modules_to_save`), such as a head drawn at random.
    """
    paths = {path for path, _ in module.named_modules()}
    wrappers = [path for path in paths if {f"{path}.original_module", f"{path}.modules_to_save"} <= paths]
    unused = tuple(f"{path}.original_module." for path in wrappers)
    return {
        name: "" if name.startswith(unused) else digest(each).hex()
        for name, each in module.state_dict(keep_vars=True).items()
        # those of other classes, such as quantized ones, may have contents that no digest sees
        if type(each) is torch.nn.Parameter
        and not each.requires_grad
        and not each.is_meta
        and each.layout is torch.strided
    }


def _is_as(tensor: torch.Tensor, known: str) -> bool:
    return not known or digest(tensor).hex() == known


def changed_names(module: torch.nn.Module, frozen: Mapping[str, str]) -> set[str]:
    """Return the names of parameters whose digests are no longer those of `frozen_digests`."""
    given = module.state_dict()
    return {name for name, known in frozen.items() if name not in given or not _is_as(given[name], known)}


def refuse_differing(differing: Sequence[str]) -> None:
    """Raise InvalidSettingsError if there are names of frozen parameters that are not as they were given."""
    if differing:
        more = f" and {len(differing) - 3} more" if len(differing) > 3 else ""
        raise InvalidSettingsError(
            "frozen weights (requires_grad=False) are not those that the training began with: "
            f"{', '.join(differing[:3])}{more}. They are neither sent by workers nor part of checkpoints, so they must "
            "be the same each time: a function that makes the model has to load them, or to draw them with a seed, and "
            "a run is resumed with those that it began with"
        )


def state_of(
    module: torch.nn.Module, where: str = "the model", copy: bool = True, frozen: Mapping[str, str] = _NONE
) -> OrderedDict[str, Any]:
    """Copy a module's `state_dict` with `detached`, and the buffers that it leaves out into its `_metadata`.

    Parameters that still have the digests `frozen` are left out; their digests are in the `_metadata`.
    """
    given = module.state_dict()
    changed = changed_names(module, frozen)
    left = {name: known for name, known in frozen.items() if name not in changed}
    state: Any = detached(OrderedDict((name, each) for name, each in given.items() if name not in left), where, copy)
    others = {name: each for name, each in module.named_buffers() if name not in given}
    extra = {_BUFFERS: detached(others, where, copy)} if others else {}
    state._metadata = {**getattr(given, "_metadata", {}), **extra, **({_FROZEN: left} if left else {})}
    return state  # type: ignore[no-any-return]


def load_state(module: torch.nn.Module, state: Mapping[str, Any]) -> None:
    """Load what `state_of` has returned, or a `state_dict`; raise RuntimeError if it does not fit.

    Raises InvalidSettingsError if frozen parameters that the state leaves out have other values in the module.
    """
    metadata = getattr(state, "_metadata", {})
    if left := metadata.get(_FROZEN):
        given = module.state_dict()
        refuse_differing(sorted(changed_names(module, left)))
        merged: Any = OrderedDict({**state, **{name: given[name] for name in left}})
        merged._metadata = metadata
        state = merged
    module.load_state_dict(state)
    for name, value in metadata.get(_BUFFERS, {}).items():
        path, _, key = name.rpartition(".")
        part = module.get_submodule(path)
        own = part._buffers.get(key)
        part._buffers[key] = value if own is None or own.shape != value.shape else own.copy_(value)


def weights_to_bytes(module: torch.nn.Module, frozen: Mapping[str, str] = _NONE) -> bytes:
    """Return `state_of` the module as a file for `from_bytes`; the file is a `state_dict` for torch."""
    state: Any = state_of(module, copy=False, frozen=frozen)
    for tensors in (state, state._metadata.get(_BUFFERS, {})):
        tensors.update({name: _compact(each) for name, each in tensors.items() if isinstance(each, torch.Tensor)})
    return to_bytes(state, sum(each.nbytes for each in state.values() if isinstance(each, torch.Tensor)))


def _compact(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor on the CPU; copy it if its storage is larger, because all of that would be written."""
    nbytes = tensor.numel() * tensor.element_size()
    is_whole = tensor.layout is torch.strided and tensor.untyped_storage().nbytes() == nbytes
    return tensor.detach().to("cpu", copy=not is_whole)


def trained_copy(model: Any, weights: bytes) -> torch.nn.Module:
    """Return a copy of a module with the weights of `weights_to_bytes`, on the CPU; raise as `fill` does.

    `model` may be a `ModelFunction` that makes the module.
    """
    # not by `copy.deepcopy`, which refuses tensors that a forward pass has computed
    copied = pickling.round_trip(model)
    made: torch.nn.Module = copied if isinstance(copied, torch.nn.Module) else copied()
    return fill(made.cpu(), from_bytes(weights))


def hollow(module: torch.nn.Module) -> torch.nn.Module:
    """Return a copy whose weights take no memory: each is a single zero that is expanded to the shape."""
    plain = [each for _, each in tensors_of(module) if type(each) in (torch.Tensor, torch.nn.Parameter)]
    own = {id(each): each for each in plain if each.layout == torch.strided and not vars(each)}
    storages = Counter(each.untyped_storage().data_ptr() for each in own.values())
    # those that share their storage with others stay as they are, so that they still share it in the copy
    alone = {key for key, each in own.items() if storages[each.untyped_storage().data_ptr()] == 1}
    weights = alone & {id(each) for each in module.state_dict(keep_vars=True).values()}

    def reduced(value: Any) -> Any:
        if id(value) not in weights:
            return NotImplemented
        is_parameter = isinstance(value, torch.nn.Parameter)
        return _hollow_tensor, (tuple(value.shape), value.dtype, is_parameter, value.requires_grad)

    return pickling.round_trip(module, reduced)  # type: ignore[no-any-return]


def fill(module: torch.nn.Module, weights: dict[str, Any]) -> torch.nn.Module:
    """Load weights into the tensors of a module, which may be hollow; raise CheckpointError if they do not fit."""
    if not isinstance(weights, dict):
        raise CheckpointError(f"the saved weights are a {type(weights).__name__}, not tensors by name")
    left = getattr(weights, "_metadata", {}).get(_FROZEN, {})
    for name, tensor in module.state_dict(keep_vars=True).items():
        if name in left or torch.nn.parameter.is_lazy(tensor) or not isinstance(tensor, torch.Tensor):
            continue  # a lazy tensor is made when its values are loaded
        if tensor.numel() > 1 and 0 in tensor.stride():
            tensor.data = torch.empty(tensor.shape, dtype=tensor.dtype)
    try:
        load_state(module, weights)
    except InvalidSettingsError:
        raise
    except Exception as error:  # of names and shapes, or of a damaged file
        raise CheckpointError(f"the saved weights do not fit {type(module).__name__}: {error}") from error
    return module


def _hollow_tensor(shape: tuple[int, ...], dtype: torch.dtype, is_parameter: bool, requires_grad: bool) -> torch.Tensor:
    zero = torch.zeros((), dtype=dtype).expand(shape)
    return torch.nn.Parameter(zero, requires_grad) if is_parameter else zero


SUFFIX = "pt"
_CLASSES_OF = ("torch.nn.modules.", "torch.optim.", "spark_elastic.ml.callbacks")
_FUNCTIONS_OF = ("torch.nn.functional",)
_PLAIN = {"builtins.dict": dict, "collections.defaultdict": defaultdict}


def dumps(value: Any) -> bytes | None:
    """Return the value as a file that `loads` accepts; None if it needs a pickle."""
    try:
        file = to_bytes(value)
        lost = differences(*(each if isinstance(each, Mapping) else {"": each} for each in (value, loads(file))))
    except Exception:  # the caller pickles what cannot be written, or not be loaded again
        return None
    return None if lost else file


def loads(file: bytes) -> Any:
    """Load what `dumps` has written. Raise CheckpointError if it names something else, is damaged, or torch unsafe."""
    trust.TORCH.check(torch.__version__)
    try:
        needed = [_accepted(path) for path in torch.serialization.get_unsafe_globals_in_checkpoint(io.BytesIO(file))]
    except Exception as error:  # torch and imports raise errors of many classes at damaged bytes
        raise CheckpointError(f"not a file of torch.save: {type(error).__name__}: {error}") from None
    try:
        with torch.serialization.safe_globals([each for each in needed if each is not None]):
            return torch.load(io.BytesIO(file), weights_only=True, map_location="cpu")
    except Exception as error:
        why = str(error).partition("\n")[0]
        raise CheckpointError(f"cannot be loaded without trust, by torch {torch.__version__}: {why}") from error


pickled = pickling.dumps  # return a pickle of a value; loading it needs trust


def _accepted(path: str) -> Any:
    """Return the class or function at this path if it is accepted here; None leaves it to torch's own list."""
    module, _, name = path.rpartition(".")
    if path in _PLAIN:
        return _PLAIN[path]
    if not f"{module}.".startswith((*_CLASSES_OF, *_FUNCTIONS_OF)):
        return None
    found = getattr(importlib.import_module(module), name, None)
    home = f"{getattr(found, '__module__', '')}."
    if isinstance(found, type) and home.startswith(_CLASSES_OF):
        return found
    return found if callable(found) and module in _FUNCTIONS_OF and home.startswith(_FUNCTIONS_OF) else None
