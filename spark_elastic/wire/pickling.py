"""Pickle calls, models and settings for other processes, with what torch's own pickles leave out.

A plain pickle drops the hooks of tensors and optimizers and most attributes of optimizers, gives each tensor a storage
of its own, and refuses parametrized modules. `dumps` keeps all of these; `pickle.loads` reads its pickles wherever this
package is installed.
"""

from __future__ import annotations

import copyreg
import io
import sys
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import cloudpickle


def dumps(value: Any, instead: Callable[[Any], Any] | None = None) -> bytes:
    """Return a pickle of a value. Classes and functions in it that cannot be imported elsewhere travel by value.

    `instead` returns how to reduce an object, as `__reduce__` does, or NotImplemented.
    """
    file = io.BytesIO()
    _Pickler(file, instead).dump(value)
    return file.getvalue()


def round_trip(value: Any, instead: Callable[[Any], Any] | None = None) -> Any:
    """Return a copy made by pickling, as it would arrive in another process; `instead` is as of `dumps`."""
    return cloudpickle.loads(dumps(value, instead))


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc, unused-ignore]
    def __init__(self, file: Any, instead: Callable[[Any], Any] | None) -> None:
        super().__init__(file)
        self._instead = instead

    def reducer_override(self, value: Any) -> Any:
        reduced = NotImplemented if self._instead is None else self._instead(value)
        if reduced is NotImplemented and "torch" in sys.modules:
            reduced = _reduced(value)
        return super().reducer_override(value) if reduced is NotImplemented else reduced


def _reduced(value: Any) -> Any:
    """Return how to reduce an object of torch whose own way loses something; NotImplemented for all others."""
    import torch

    if isinstance(value, torch.storage.TypedStorage):  # one for each tensor; the untyped storage within is shared
        return _typed_storage, (value._untyped_storage, value.dtype)
    if isinstance(value, torch.UntypedStorage):
        return _untyped_storage, _typed_storage(value, torch.uint8).__reduce__()[1]
    if isinstance(value, torch.Tensor):
        hooks = value._backward_hooks, value._post_accumulate_grad_hooks
        if not any(hooks) or not value.is_leaf:
            return NotImplemented
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="backward hook")
            make, arguments, *_ = _own_reduction(value)
            return _numbered(make, arguments, hooks, _set_tensor_hooks)
    if isinstance(value, torch.optim.Optimizer):
        if type(value).__getstate__ is not torch.optim.Optimizer.__getstate__:
            return NotImplemented
        # learning rate schedulers patch `step` to count its calls; those of the other process do without
        state = {name: each for name, each in vars(value).items() if name != "step"}
        return _numbered(copyreg.__newobj__, (type(value),), state)  # type: ignore[attr-defined]
    if isinstance(value, torch.nn.Module):
        if torch.nn.utils.parametrize.is_parametrized(value):
            kind = torch.nn.utils.parametrize.type_before_parametrizations(value)
            return _numbered(copyreg.__newobj__, (kind,), vars(value), _parametrize)  # type: ignore[attr-defined]
        if any(each for name, each in vars(value).items() if name.endswith("_hooks")):
            make, arguments, *rest = _own_reduction(value)
            return (*_numbered(make, arguments)[:2], *rest)
    return NotImplemented


def _own_reduction(value: Any) -> Any:
    return value.__reduce_ex__(cloudpickle.DEFAULT_PROTOCOL)


def _numbered(make: Any, arguments: tuple[Any, ...], state: Any = None, set_state: Any = None) -> tuple[Any, ...]:
    """Return a reduction that also keeps new hooks from taking the numbers, and so the places, of those that arrive."""
    from torch.utils.hooks import RemovableHandle

    return _made, (RemovableHandle.next_id, make, arguments), state, None, None, set_state


def _made(next_id: int, make: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
    from torch.utils.hooks import RemovableHandle

    RemovableHandle.next_id = max(RemovableHandle.next_id, next_id)
    return make(*arguments)


def _typed_storage(untyped: Any, dtype: Any) -> Any:
    import torch

    return torch.storage.TypedStorage(  # type: ignore[no-untyped-call]
        wrap_storage=untyped, dtype=dtype, _internal=True
    )


def _untyped_storage(file: bytes) -> Any:
    import torch

    return torch.storage._load_from_bytes(file)._untyped_storage  # type: ignore[no-untyped-call]


def _set_tensor_hooks(tensor: Any, hooks: tuple[Any, Any]) -> None:
    tensor._backward_hooks, tensor._post_accumulate_grad_hooks = hooks


def _parametrize(module: Any, state: Mapping[str, Any]) -> None:
    """Give a module its state and the class and properties that torch's `register_parametrization` made."""
    from torch.nn.utils import parametrize

    module.__setstate__(dict(state))
    parametrize._inject_new_class(module)
    for name in module.parametrizations:
        parametrize._inject_property(module, name)
