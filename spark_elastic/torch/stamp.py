"""The stamp of a reduction, by which members notice that they are at other steps, or other backwards of a step."""

from __future__ import annotations

import torch

from spark_elastic.errors import MismatchError

_STAMPS = 4
WIDTH = 1 + _STAMPS
"""The number of elements that are sent with each reduction."""
_UNITS = torch.eye(WIDTH, device="cpu")
_TO_SEND = [[_UNITS[0] * update + _UNITS[1 + at] for at in range(_STAMPS)] for update in (0, 1)]


class Stamp:
    """The number of steps since the members agreed, and of reductions since the last step.

    A member sends a 1 at its stamp's position, so that the others are 0 in the sum unless a member is elsewhere. A
    sum in bfloat16 may be rounded, but what is not 0 stays so. Another element says whether the driver has announced a
    coming world to this member.
    """

    def __init__(self) -> None:
        self.steps = 0
        self.reductions = 0

    def __str__(self) -> str:
        return f"backward {self.reductions + 1} of step {self.steps + 1} in this world"

    @property
    def _position(self) -> int:
        return self.steps % 2 * 2 + self.reductions % 2

    def to_send(self, update: bool) -> torch.Tensor:
        """Return the elements to sum over the members, shape (WIDTH,)."""
        return _TO_SEND[update][self._position]

    def read(self, sums: torch.Tensor) -> bool:
        """Return True if the driver has announced a coming world to a member; raise MismatchError at unequal steps."""
        update, *counts = sums.tolist()
        counts[self._position] = 0
        if any(counts):
            raise MismatchError(
                f"the workers are at different steps: this one reduces the gradients of {self}, another one those of "
                "another backward or step. Each worker must call backward() equally often before each step(), and "
                "hvd.join() when it has no more batches"
            )
        return bool(update)

    def stepped(self) -> None:
        self.steps, self.reductions = self.steps + 1, 0
