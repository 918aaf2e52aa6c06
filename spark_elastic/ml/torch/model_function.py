"""A model that is given as a function: for modules that cannot be pickled, and those whose widths follow from the rows.

Workers, the driver's trial step and the executors of `transform` call the function, and load the weights into what it
returns. So the module itself never travels.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from spark_elastic.ml import model_function
from spark_elastic.ml.model_function import Shapes, call


@dataclass(frozen=True)
class ModelFunction:
    """The function of the setting `model`, with the arguments of its calls.

    Attributes:
        shapes: Of the inputs.
        seed: Seed of random numbers during a call, so that each call gives the same weights.
    """

    function: Callable[..., torch.nn.Module]
    shapes: Shapes = ()
    seed: int = 0

    def __call__(self) -> torch.nn.Module:
        """Return a new module, as `made` does, with random numbers seeded meanwhile."""
        with seeded(self.seed):
            return self.made()

    def made(self) -> torch.nn.Module:
        """Return a new module. Raise InvalidSettingsError if the function raises, or returns something else."""
        made: torch.nn.Module = call(self.function, self.shapes, torch.nn.Module, "torch.nn.Module")
        if isinstance(made, torch.fx.GraphModule):  # one of torch.export refuses train() and eval()
            vars(made).pop("train", None)
            vars(made).pop("eval", None)
        return made


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Seed torch's random numbers on the CPU, Python's and numpy's within the block, and put them back after it."""
    with model_function.seeded(seed):
        before = torch.random.get_rng_state()
        torch.default_generator.manual_seed(seed)
        try:
            yield
        finally:
            torch.random.set_rng_state(before)
