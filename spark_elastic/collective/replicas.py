"""Check that the workers' models are equal, before they train apart."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, MutableMapping, Sequence
from typing import Any

import torch
from torch.utils.weak import WeakIdKeyDictionary

from spark_elastic.collective.digest import digest
from spark_elastic.collective.group import Group
from spark_elastic.collective.operators import Max
from spark_elastic.errors import MismatchError

_BROADCAST = (
    "Call hvd.broadcast_parameters(model.state_dict(), root_rank=0) before the first step, as DistributedDataParallel "
    "does by itself, or give the model to the state of an elastic loop"
)
_BROADCAST_VARIABLES = (
    "Call hvd.broadcast_variables(model.variables, root_rank=0) before the second step, add "
    "hvd.callbacks.BroadcastGlobalVariablesCallback(0) to the callbacks of model.fit, or build the model and "
    "give it to the state of an elastic loop"
)
_COMPARISONS = 2
"""Of variables, before the first two steps; see `VariableComparison`."""


def check_equal(group: Group, tensors: Mapping[str, torch.Tensor], remedy: str = _BROADCAST) -> None:
    """Compare digests of tensors with those of the other members; ranks that have joined do not count.

    Args:
        group: the members; all of them call this.
        tensors: the tensors by name, in the same order on all members.
        remedy: what to do if some differ, a sentence for the error.

    Raises:
        MismatchError: it names the first tensor that differs, on all members.
    """
    digests = torch.tensor(
        [int.from_bytes(digest(tensor.detach())[:7], "little") for tensor in tensors.values()],
        dtype=torch.int64,
        device="cpu",
    )
    extremes = torch.cat([digests, -digests])
    group.wait(group.allreduce(extremes, Max.gloo))
    same = (extremes[: len(digests)] == -extremes[len(digests) :]).tolist()
    differ = [name for name, is_same in zip(tensors, same, strict=True) if not is_same]
    if differ:
        raise MismatchError(
            f"{differ[0]} has other values on some workers than on others ({len(differ)} of {len(tensors)} parameters "
            f"differ), so each would train a model of its own. {remedy}"
        )


def by_unique_name(named: Iterable[tuple[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Return the tensors by name; a name that has come before gets the tensor's number."""
    tensors: dict[str, torch.Tensor] = {}
    for name, tensor in named:
        tensors[f"{name} ({len(tensors)})" if name in tensors else name] = tensor
    return tensors


class VariableComparison:
    """Compares variables of TensorFlow or Keras before the first step that trains them.

    Variables that differ there are compared again before the next step: programs for Horovod broadcast them after the
    first, which builds the model or its optimizer. `named` returns the variables with their names, in the same order on
    all members.
    """

    broadcast_follows = False
    """A callback of `fit` will broadcast the variables when a batch has built the model; set for the whole process."""
    _left: MutableMapping[Any, int] = WeakIdKeyDictionary()
    """How often each variable may still have to be compared."""

    def __init__(
        self, named: Callable[[], Sequence[tuple[str, Any]]], values_of: Callable[[Any], torch.Tensor]
    ) -> None:
        self._named = named
        self._values_of = values_of

    @property
    def left(self) -> int:
        """The number of comparisons that may be necessary; 0 once the variables were found equal."""
        return max((self._left.get(variable, _COMPARISONS) for _, variable in self._named()), default=0)

    def compare(self, group: Group, left: int) -> int:
        """Compare the variables on all members; return how many comparisons are left now.

        `left`: the largest number left of any member. Raises MismatchError if variables differ in the last comparison.
        """
        named = self._named()
        tensors = [(name, self._values_of(variable)) for name, variable in named]
        try:
            check_equal(group, by_unique_name(tensors), _BROADCAST_VARIABLES)
            left = 0
        except MismatchError:
            if left == 1 and not self.broadcast_follows:
                raise
            left = 1
        for _, variable in named:
            self._left[variable] = left
        return left
