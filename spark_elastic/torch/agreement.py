"""The agreement of the members about the parameters whose gradients they reduce: which are trained, and sparse."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from spark_elastic.collective.calls import agree, describe_tensor
from spark_elastic.collective.group import Group
from spark_elastic.collective.operators import Max
from spark_elastic.collective.replicas import check_equal
from spark_elastic.torch import parameters
from spark_elastic.torch.parameters import GradientSlot


class Agreement:
    """The members' agreement about the parameters of one optimizer, which has this number here, and these slots.

    A member without a gradient for a parameter cannot know that it is sparse: it counts as dense until one shows it.
    """

    def __init__(self, number: int, slots: list[GradientSlot], names: dict[int, str], sparse_as_dense: bool) -> None:
        self._own_number, self._slots, self._names = number, slots, names
        self._sparse_as_dense = sparse_as_dense
        self.reached: tuple[Group | None, int] = None, 0
        """The group whose members have agreed, and the number of joins that they had completed; None: agree again."""
        self._is_new = True
        """The parameters were not compared with the other members'."""
        self.number = number
        """The number of the optimizer that the members have agreed on."""
        self.is_one_of_many = False
        """A member has several reducers, so each reduction is announced."""
        self.trained: list[GradientSlot] = []
        """The slots of the parameters that required a gradient when the members agreed."""
        self.sparse: set[int] = set()
        self.made_dense: set[int] = set()
        """The parameters with sparse gradients that are reduced as dense ones and then converted back."""
        self.unseen: set[int] = set()
        """Parameters of which no member has shown a gradient yet."""
        self._sparse_in_buckets: set[int] = set()
        """The parameters of which a sparse gradient was sent as a dense one, because no member had shown one before."""

    def holds(self, group: Group, trained: Sequence[GradientSlot]) -> bool:
        """Return True if the members of the group have agreed that these are trained."""
        return self.reached == (group, group.log.joins) and self.trained == trained

    def reach(self, group: Group, trained: list[GradientSlot], settings: str) -> None:
        """Compare settings and parameters of all members, and find out which gradients are sparse; or MismatchError."""
        self.trained = trained
        shapes = "; ".join(describe_tensor(slot.param) for slot in trained)
        self.see_gradients()
        known = self.sparse | self.made_dense
        kinds = [2 if id(slot.param) in known else int(id(slot.param) not in self.unseen) for slot in trained]
        several, number, is_new = int(len(parameters.reducers()) > 1), self._own_number, int(self._is_new)
        detail = [*kinds, several, number, is_new]
        if not agree(group, "DistributedOptimizer", f"{settings}: {shapes}", detail=str(detail)):
            of_any = torch.tensor(detail, dtype=torch.int32, device="cpu")
            group.wait(group.allreduce(of_any, Max.gloo))
            *kinds, several, number, is_new = of_any.tolist()
        if is_new:
            check_equal(group, {self._names[id(slot.param)]: slot.param for slot in self._slots})
            self._is_new = False
        sparse = {id(slot.param) for slot, kind in zip(trained, kinds, strict=True) if kind == 2}
        self.sparse, self.made_dense = (set(), sparse) if self._sparse_as_dense else (sparse, set())
        seen = {id(slot.param) for slot, kind in zip(trained, kinds, strict=True) if kind}
        self.unseen = {id(slot.param) for slot in self._slots} - seen
        self.is_one_of_many, self.number = bool(several), number
        self.reached = group, group.log.joins

    def see_gradients(self) -> None:
        """Note which of the parameters that had no gradient before have a sparse one."""
        grads = {id(slot.param): slot.param.grad for slot in self._slots if id(slot.param) in self.unseen}
        found = {key for key, grad in grads.items() if grad is not None and grad.is_sparse}
        (self.made_dense if self._sparse_as_dense else self.sparse).update(found)
        self.unseen -= {key for key, grad in grads.items() if grad is not None}

    def note_sent(self, params: Sequence[torch.Tensor]) -> None:
        """Note the sparse gradients among those that are sent as dense ones."""
        if self.unseen:
            self._sparse_in_buckets.update(id(p) for p in params if p.grad is not None and p.grad.is_sparse)

    def shown(self) -> bool:
        """Return True, on all members alike, if a member has shown the first gradient of a parameter."""
        appeared = any(slot.param.grad is not None for slot in self.trained if id(slot.param) in self.unseen)
        if appeared:
            (self.made_dense if self._sparse_as_dense else self.sparse).update(self._sparse_in_buckets)
            self._sparse_in_buckets.clear()
        return appeared
