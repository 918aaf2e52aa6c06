"""A model that is given as a function: for modules that cannot be pickled, and those whose widths follow from the rows.

Workers, the driver's trial step and the executors of `transform` call the function, and load the weights into what it
returns. So the module itself never travels.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from spark_elastic.errors import InvalidSettingsError

FORM = "model=lambda shapes: Net(shapes[0][1])"
"""How errors show the form of the setting."""
Shapes = tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class ModelFunction:
    """The function of the setting `model`, with the arguments of its calls.

    Attributes:
        shapes: The shape of each input as the model gets it. The first axis, the rows of a batch, is -1.
        seed: Seed of torch's random numbers during a call, so that each call gives the same weights.
    """

    function: Callable[..., torch.nn.Module]
    shapes: Shapes = ()
    seed: int = 0

    def __call__(self) -> torch.nn.Module:
        """Return a new module, as `made` does, with torch's random numbers seeded meanwhile."""
        with seeded(self.seed):
            return self.made()

    def made(self) -> torch.nn.Module:
        """Return a new module. Raise InvalidSettingsError if the function raises, or returns something else."""
        name, arguments = name_of(self.function), (list(self.shapes),) if takes_shapes(self.function) else ()
        try:
            made: Any = self.function(*arguments)
        except Exception as error:
            below = error.__traceback__
            raise InvalidSettingsError(
                f"model={name}, which is called {_with(arguments)}, raised {type(error).__name__}: {error}"
            ) from error.with_traceback(below and below.tb_next)  # the frames of the user's function
        if not isinstance(made, torch.nn.Module):
            raise InvalidSettingsError(
                f"model={name} must return a torch.nn.Module; called {_with(arguments)}, it returned {made!r:.200}"
            )
        if isinstance(made, torch.fx.GraphModule):  # one of torch.export refuses train() and eval()
            vars(made).pop("train", None)
            vars(made).pop("eval", None)
        return made


def _with(arguments: tuple[Any, ...]) -> str:
    return f"with the shapes {arguments[0]}" if arguments else "without arguments"


def name_of(function: Any) -> str:
    return str(getattr(function, "__qualname__", None) or type(function).__name__)


def takes_shapes(function: Callable[..., Any]) -> bool:
    """Return whether a function is called with the shapes; raise InvalidSettingsError if it needs more arguments."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # builtins have no signature
        return True
    variable = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    needed = [each for each in parameters if each.default is each.empty and each.kind not in variable]
    if len(needed) > 1 or any(each.kind is each.KEYWORD_ONLY for each in needed):
        name, names = name_of(function), ", ".join(each.name for each in needed)
        raise InvalidSettingsError(
            f"model={name} needs {names}, and is called with the shapes of the inputs, or without arguments; give the "
            f"others yourself: model=lambda shapes: {name}(...)"
        )
    return bool(needed)


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Seed torch's random numbers on the CPU within the block, and put them back after it."""
    before = torch.random.get_rng_state()
    torch.default_generator.manual_seed(seed)
    try:
        yield
    finally:
        torch.random.set_rng_state(before)
