"""Compare users' loops whose collectives fail at random with undisturbed runs, in one process.

    python -m tests.simulation.user_loops FIRST LAST

Prints the first of these seeds whose loop ended differently, if there is one. The loops are those of the random kills,
in a world of one: a failed collective is all that a survivor sees of a death, and no other member can supply a correct
state.
"""

from __future__ import annotations

import operator
import random
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

from tests.integration.local.random_kills import loop_of, train

RATE = 0.04
"""Share of collectives that fail."""


@contextmanager
def failing(seed: object, rate: float = RATE, targets: list[tuple[Any, str]] | None = None) -> Iterator[None]:
    """Make functions fail at random, before them or after them; by default torch's reductions, broadcasts and sums."""
    import spark_elastic.torch as hvd
    from spark_elastic.errors import HorovodInternalError
    from spark_elastic.torch.gradients import BackwardReducer

    rng = random.Random(f"failures {seed}")

    def wrapped(plain: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            drawn = rng.random()
            if drawn < rate / 2:
                raise HorovodInternalError("a simulated peer is gone")
            result = plain(*args, **kwargs)
            if drawn < rate:  # the others have the result
                raise HorovodInternalError("a simulated peer is gone")
            return result

        return call

    targets = targets or [(BackwardReducer, "_complete"), (hvd, "broadcast_object"), (hvd, "allreduce")]
    plain = [getattr(owner, name) for owner, name in targets]
    for (owner, name), function in zip(targets, plain, strict=True):
        setattr(owner, name, wrapped(function))
    try:
        yield
    finally:
        for (owner, name), function in zip(targets, plain, strict=True):
            setattr(owner, name, function)


def search(
    loop_of: Callable[[int], Any],
    train: Callable[[int], Any],
    disturbed: Callable[[int], AbstractContextManager[None]],
    same: Callable[[Any, Any], bool] = operator.eq,
) -> None:
    """Print how the first loop of the given seeds ended that failures made end differently; otherwise ""."""
    import torch

    from spark_elastic.collective.process import process
    from spark_elastic.elastic.finish import loops

    def differs(seed: int) -> str:
        outcomes = []
        for failures in (nullcontext(), disturbed(seed)):
            loops.__init__(process)  # as in a process of its own
            with failures:
                outcomes.append(train(seed))
        calm, stormy = outcomes
        return "" if same(calm, stormy) else f"seed {seed}: {stormy} and not {calm}, {loop_of(seed)}"

    torch.set_num_threads(1)  # of so small a model, more only wait for one another
    first, last = map(int, sys.argv[1:])
    print(next(filter(None, map(differs, range(first, last + 1))), ""))


if __name__ == "__main__":
    search(loop_of, lambda seed: train(seed, None, 0.0), failing)
