"""Keep PyTorch's compiler out of workers until the program compiles something.

The first optimizer of a process imports `torch._dynamo`, with sympy and several hundred other modules, only to tell the
compiler not to trace the optimizer's methods. That takes about as long as `import torch` itself. While the compiler is
not imported, nothing can be traced, so those methods may as well be called as they are.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

_COMPILER = "torch._dynamo"
_CACHE = "__dynamo_disable"
"""The attribute in which PyTorch keeps the version of a function that the compiler does not trace."""
_STEP_NAMES = {"torch", "torch._dynamo", "_dynamo", "graph_break", "cast", "Optimizer", "defaults"} | {
    "is_grad_enabled",
    "set_grad_enabled",
}
"""The names in the wrapper of `step` as it is known here. One that uses others is left alone."""


def import_compiler_on_use() -> None:
    """Let `torch.optim` work without the compiler until it is imported; unknown optimizers import it."""
    if compiler_is_imported():
        return
    import torch

    for method in vars(torch.optim.Optimizer).values():
        code = getattr(method, "__code__", None)
        if hasattr(method, "__wrapped__") and code is not None and _CACHE in code.co_consts:
            _call_directly(method)
    for optimizer in vars(torch.optim).values():
        step = vars(optimizer).get("step") if isinstance(optimizer, type) else None
        names = set(getattr(getattr(step, "__code__", None), "co_names", ()))
        if hasattr(step, "__wrapped__") and _COMPILER in names and names <= _STEP_NAMES:
            optimizer.step = _step_of(step)


def compiler_is_imported() -> bool:
    """Return True if the compiler can trace functions. While it is being imported it cannot."""
    return hasattr(sys.modules.get(_COMPILER), "disable")


def _call_directly(method: Any) -> None:
    function = method.__wrapped__

    def call(*args: Any, **kwargs: Any) -> Any:
        if not compiler_is_imported():
            return function(*args, **kwargs)
        vars(function).pop(_CACHE, None)  # PyTorch then asks the compiler for it
        return method(*args, **kwargs)

    setattr(function, _CACHE, call)


def _step_of(original: Any) -> Callable[..., Any]:
    import torch

    plain = original.__wrapped__

    @functools.wraps(plain)
    def step(self: Any, *args: Any, **kwargs: Any) -> Any:
        if compiler_is_imported():
            return original(self, *args, **kwargs)
        before = torch.is_grad_enabled()
        try:
            torch.set_grad_enabled(self.defaults["differentiable"])
            return plain(self, *args, **kwargs)
        finally:
            torch.set_grad_enabled(before)

    return step
