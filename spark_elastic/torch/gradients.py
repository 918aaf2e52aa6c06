"""Reduce the gradients of one optimizer while backward runs: hooks send each bucket once its gradients are computed."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import InitVar, dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.weak import WeakTensorKeyDictionary

from spark_elastic.collective.calls import Handle, agree, describe_tensor, start_allgather
from spark_elastic.collective.fused import Bucket, is_without_rows, partition, sums_in_backward
from spark_elastic.collective.gloo import GlooGroup
from spark_elastic.collective.negotiation import launch_now
from spark_elastic.collective.process import process
from spark_elastic.collective.process_sets import ProcessSet, global_process_set
from spark_elastic.collective.reduction import Average, Compressor, Max, NoneCompressor, ReduceOp, Sum
from spark_elastic.collective.shared_memory_reducer import SharedWork
from spark_elastic.errors import HorovodInternalError, SparkElasticError, UsageError

_owners = WeakTensorKeyDictionary()
"""A weak reference to the reducer of each parameter's gradient."""


@dataclass(slots=True, eq=False)
class GradientSlot:
    """A parameter of a reducer, and the state of its gradient in the present step."""

    param: torch.nn.Parameter
    left: int
    """The number of backward passes of this step that have still to add to the gradient."""
    bucket: Bucket | None = None
    """The bucket of the gradient; None if the gradient is sparse and gathered."""


@dataclass(eq=False, kw_only=True)
class BackwardReducer:
    """Averages or sums the gradients of `params` over the members; `finish` completes the reduction of a step.

    All members send the buckets in one order, each bucket as soon as backward has computed all gradients in it and in
    the buckets before it. Gradients are scaled while they are copied into the bucket, and `param.grad` becomes the view
    of the bucket that receives the result. A parameter of which no member has a gradient keeps none: an optimizer would
    move it by momentum and weight decay, given zeros. The last bucket has one more element, a flag: the driver has
    announced a coming world to this member.

    The first step in each world begins with a small extra reduction, in which the members agree on the parameters with
    sparse gradients: a member without a gradient for such a parameter cannot know that it is sparse. Members of an
    earlier world have seen gradients already. If some were never seen, the members send no bucket before the end of
    backward, and agree once more, by what they have computed. With several optimizers they agree at the end of backward
    alone, because a member that computes nothing in a step comes to them in another order.

    The fields that are not explained here are arguments of `DistributedOptimizer`.
    """

    params: InitVar[Sequence[torch.nn.Parameter]]
    names: dict[int, str]
    """The parameters' names for messages, by id."""
    compression: type[Compressor]
    passes: int
    """The number of backward passes in a step."""
    op: ReduceOp
    predivide: float
    """Divisor of gradients before the sum; after it, sums are divided by size / predivide."""
    groups: int | Sequence[Sequence[torch.nn.Parameter]] | None
    sparse_as_dense: bool
    process_set: ProcessSet

    def __post_init__(self, params: Sequence[torch.nn.Parameter]) -> None:
        self.launched = 0
        """The number of buckets sent in the present step; 0 before backward and after the end of the reduction."""
        self._slots: list[GradientSlot] = []
        self._order: dict[int, int] = {}
        """The place of each parameter, also of frozen ones, among those of the optimizer, by id."""
        self._frozen: list[torch.nn.Parameter] = []
        """The parameters that did not require a gradient when they were added. They have a hook while they do."""
        self._hooks: dict[int, Any] = {}
        self._replaced = False
        """Another reducer has taken over parameters of this one."""
        self._sparse: set[int] = set()
        self._unseen: list[GradientSlot] = []
        """Parameters of which no member has shown a gradient yet. They count as dense until then."""
        self._made_dense: set[int] = set()
        """The parameters with sparse gradients that are reduced as dense ones and then converted back."""
        self._sparse_in_buckets: set[int] = set()
        """The parameters of which a sparse gradient was sent as a dense one, because no member had shown one before."""
        self._buckets: list[Bucket] = []
        self._made_for: Any = None
        """The division of the parameters and the number of scalars that `_buckets` were made for."""
        self._kept: tuple[Any, list[Bucket]] = (None, [])
        """Buckets that are not in use, for the next world, and what they were made for."""
        self._works: list[dist.Work] = []
        self._group: GlooGroup | None = None
        self._active = False
        self._agreed_on: GlooGroup | None = None
        """The group whose members have agreed; see `_agree`."""
        self._failure: SparkElasticError | None = None
        self._scalars: torch.Tensor | None = None
        self._scalars_width = 0
        self.on_reduced: list[Callable[[], None]] = []
        """Functions to call when the reduction of a step is complete."""
        self.add(params)

    def add(self, params: Iterable[torch.nn.Parameter]) -> None:
        """Reduce the gradients of these parameters too from now on, instead of the reducer that did so before."""
        for param in params:
            self._order.setdefault(id(param), len(self._order))
            if param.requires_grad:
                self._observe(param)
            else:
                self._frozen.append(param)
        self._buckets = []
        self._agreed_on = None

    def _observe(self, param: torch.nn.Parameter) -> None:
        slot = GradientSlot(param, self.passes)
        self._slots.append(slot)
        self._unseen.append(slot)
        self._take_over(param)
        self._hooks[id(param)] = param.register_post_accumulate_grad_hook(_hook(weakref.ref(self), slot))

    def follow_unfreezing(self) -> None:
        """Reduce the gradients of parameters that a loop has unfrozen; called between two steps.

        A newcomer learns at once what the others have unfrozen one after the other, so the order of the slots does not
        depend on that.
        """
        changed = [param for param in self._frozen if param.requires_grad != (id(param) in self._hooks)]
        if not changed or self.accumulating:
            return
        for param in changed:
            if param.requires_grad:
                self._observe(param)
            else:  # it was frozen again
                self._hooks.pop(id(param)).remove()
                _owners.pop(param, None)
                self._slots = [slot for slot in self._slots if slot.param is not param]
                self._unseen = [slot for slot in self._unseen if slot.param is not param]
        self._slots.sort(key=lambda slot: self._order[id(slot.param)])
        self._buckets = []
        self._agreed_on = None

    def _take_over(self, param: torch.nn.Parameter) -> None:
        known = _owners.get(param)
        owner = known() if known is not None else None
        if owner is not None and owner is not self and (hook := owner._hooks.pop(id(param), None)) is not None:
            hook.remove()
            owner._replaced = True
        _owners[param] = weakref.ref(self)

    def detach(self) -> None:
        """Remove the hooks from the parameters, so that another optimizer can reduce them, and free the buckets."""
        for hook in self._hooks.values():
            hook.remove()
        self._hooks = {}
        self._buckets, self._kept, self._group = [], (None, []), None
        for slot in self._slots:
            slot.bucket = None

    def set_passes(self, passes: int) -> None:
        self.passes = passes
        for slot in self._slots:
            slot.left = passes

    def attach_scalars(self, numbers: torch.Tensor) -> None:
        """Sum `numbers` over the members with the gradients of this step, in place, see `DistributedOptimizerMixin`.

        They are sent in the last bucket, in its type; if that type is less precise than float32, or there is no bucket,
        they are reduced separately.
        """
        self._scalars = numbers
        if numbers.numel() != self._scalars_width:
            self._scalars_width = numbers.numel()
            self._group = None  # the next step makes new buckets

    @property
    def accumulating(self) -> bool:
        """True between the first and the last backward pass of a step."""
        return any(slot.left != self.passes for slot in self._slots)

    # --- while backward runs ------------------------------------------------------------------

    def accumulated(self, slot: GradientSlot) -> None:
        """Count a backward pass that has added to the gradient of this parameter; send the buckets that are full."""
        if is_without_rows():
            slot.param.grad = None
        slot.left -= 1
        if slot.left:
            if slot.left < 0:
                raise AssertionError(
                    f"the gradient of {self.names.get(id(slot.param), 'a parameter')} was computed more than "
                    f"backward_passes_per_step={self.passes} times before step(); raise backward_passes_per_step"
                )
            return
        if not self._active:
            self._begin()
        bucket = slot.bucket
        if bucket is None:
            return
        bucket.ready += 1
        if bucket.ready == len(bucket.params):
            self._send_full()

    def _begin(self) -> None:
        """Prepare the buckets for the present world, when the first gradient of a step is complete."""
        self._active = True
        try:
            group = self._present_group()
            if group is not None and group is not self._agreed_on and _is_only_one():
                self._agree(group)
        except SparkElasticError as error:  # raised by `finish`, not through autograd
            self._failure = error
            return
        if group is not self._group or (group is not None and not self._buckets):
            self._plan(group)

    def _present_group(self) -> GlooGroup | None:
        """Return the group to reduce with; None if this process is alone or not in the process set."""
        return self.process_set.group() if self.process_set.included() else None

    def _purpose(self, parts: Sequence[Sequence[torch.Tensor]]) -> Any:
        """Return what the buckets for this division of the parameters depend on."""
        layouts = [[(id(p), p.dtype, p.device, p.shape, p.stride()) for p in part] for part in parts]
        return self._scalars_width if self.compression is NoneCompressor else 0, layouts

    def _new_buckets(self, parts: Sequence[Sequence[torch.Tensor]]) -> list[Bucket]:
        return [self._new_bucket(part, is_last=number == len(parts) - 1) for number, part in enumerate(parts)]

    def _new_bucket(self, part: Sequence[torch.Tensor], is_last: bool) -> Bucket:
        return Bucket(part, self.compression, flagged=is_last, piggyback=self._scalars_width if is_last else 0)

    def _plan(self, group: GlooGroup | None) -> None:
        if self._buckets and not self.launched:  # none of them is being sent
            self._kept = self._made_for, self._buckets
        self._group = group
        self._buckets = []
        for slot in self._slots:
            slot.bucket = None
        if group is None or group is not self._agreed_on:
            return
        by_id = {id(slot.param): slot for slot in self._slots}
        dense = [slot.param for slot in self._slots if id(slot.param) not in self._sparse]
        parts = partition(dense, self.groups)
        (made_for, buckets), self._kept = self._kept, (None, [])
        self._made_for = self._purpose(parts)
        self._buckets = buckets if made_for == self._made_for else self._new_buckets(parts)
        for bucket in self._buckets:
            bucket.ready = 0
            bucket.scale(self.op, self.predivide, group.size)
            for param in bucket.params:
                by_id[id(param)].bucket = bucket

    def _send_full(self) -> None:
        buckets = self._buckets
        if sums_in_backward:
            return
        while self.launched < len(buckets):
            bucket = buckets[self.launched]
            if bucket.ready < len(bucket.params) or self._failure is not None:
                return
            try:
                self._send(bucket)
            except HorovodInternalError as error:
                self._failure = error
                return

    def _send(self, bucket: Bucket) -> None:
        assert self._group is not None
        if bucket.flag is not None:
            bucket.flag.fill_(process.update_pending)
        if bucket.piggyback is not None and self._scalars is not None:
            bucket.piggyback.copy_(self._scalars)
        self.launched += 1
        gradients = [param.grad for param in bucket.params]
        if self._unseen:
            self._sparse_in_buckets.update(id(p) for p in bucket.params if p.grad is not None and p.grad.is_sparse)
        self._works.append(bucket.send(self._group, self.op.gloo, gradients))
        for param, view in zip(bucket.params, bucket.views, strict=True):
            param.grad = view  # also for those without one, until `_reduce` knows that no member has one

    # --- at the end of the step ---------------------------------------------------------------

    def finish(self) -> None:
        """Complete the reduction of the step, so that every `param.grad` is the reduced gradient.

        Raises:
            HorovodInternalError: a peer is gone. The gradients are dropped; nothing else has changed.
            UsageError: a later optimizer reduces parameters of this one, or a parameter was unfrozen too late.
        """
        if self._replaced:
            raise UsageError(
                "a DistributedOptimizer was made later for parameters of this one, and reduces their gradients now; "
                "call step() of that one, or make one DistributedOptimizer for each set of parameters"
            )
        for param in self._frozen:
            if param.requires_grad and param.grad is not None and id(param) not in self._hooks:
                raise UsageError(
                    f"the gradient of {self.names.get(id(param), 'a parameter')} is not reduced: it was frozen until "
                    "the last optimizer.zero_grad(); set requires_grad before optimizer.zero_grad() and loss.backward()"
                )
        try:
            self._finish()
        except BaseException as error:
            self.abandon(group_over=isinstance(error, HorovodInternalError))
            raise
        for reduced in self.on_reduced:
            reduced()

    def _finish(self) -> None:
        if not self._active:
            self._begin()
        if self._failure is not None:
            raise self._failure
        group = self._present_group()
        if group is not self._group:
            raise HorovodInternalError("the world has changed between backward and step")
        if group is None:
            if self._unseen:
                self._see_gradients()
            if self.process_set is global_process_set:
                process.saw_update(process.update_pending)
        else:
            while group is not self._agreed_on:  # once more if others have come here while backward ran
                self._agree(group, computed=True)
            self._reduce(group)
        self._rearm()

    def _agree(self, group: GlooGroup, computed: bool = False) -> None:
        """Compare the settings of all members, and find out which gradients are sparse.

        Args:
            group: the members.
            computed: the gradients of this step are complete, and show which are sparse. Unless they are on all
                members, there is no agreement yet if a gradient has not been seen by any in an earlier step.

        Raises:
            MismatchError: the settings differ.
            HorovodInternalError: a peer is gone.
        """
        shapes = "; ".join(describe_tensor(slot.param) for slot in self._slots)
        settings = f"op={self.op.name}, predivide={self.predivide}, compression={self.compression.__name__}"
        buckets = [len(part) for part in partition([slot.param for slot in self._slots], self.groups)]
        settings += f", sparse_as_dense={self.sparse_as_dense}, parameters by bucket {buckets}"
        if computed:
            self._see_gradients()
        known, unseen = self._sparse | self._made_dense, {id(slot) for slot in self._unseen}
        kinds = [2 if id(slot.param) in known else int(id(slot) not in unseen) for slot in self._slots]
        incomplete = int(not computed)
        if not agree(group, "DistributedOptimizer", f"{settings}: {shapes}", detail=f"{kinds} {incomplete}"):
            of_any = torch.tensor([*kinds, incomplete], dtype=torch.uint8)
            group.wait(group.allreduce(of_any, Max.gloo))
            *kinds, incomplete = of_any.tolist()
        if incomplete and 0 in kinds:
            return
        sparse = {id(slot.param) for slot, kind in zip(self._slots, kinds, strict=True) if kind == 2}
        self._sparse, self._made_dense = (set(), sparse) if self.sparse_as_dense else (sparse, set())
        self._unseen = [slot for slot, kind in zip(self._slots, kinds, strict=True) if kind == 0]
        self._agreed_on = group
        self._plan(group)

    def _see_gradients(self) -> None:
        """Note which of the parameters that had no gradient before have a sparse one."""
        found = {id(slot.param) for slot in self._unseen if slot.param.grad is not None and slot.param.grad.is_sparse}
        (self._made_dense if self.sparse_as_dense else self._sparse).update(found)
        self._unseen = [slot for slot in self._unseen if slot.param.grad is None]

    def _reduce(self, group: GlooGroup) -> None:
        for bucket in self._buckets[self.launched :]:
            self._send(bucket)
        scalars = self._scalars
        alone = None
        if scalars is not None and not (self._buckets and self._buckets[-1].piggyback is not None):
            alone = group.allreduce(scalars, Sum.gloo)
        gathered = [self._gather(slot) for slot in self._slots if id(slot.param) in self._sparse]
        for bucket, work in zip(self._buckets, self._works, strict=True):
            group.wait(work)
            bucket.unpack()
            for index in bucket.given_by_none():
                bucket.params[index].grad = None
            if bucket.piggyback is not None and scalars is not None:
                scalars.copy_(bucket.piggyback)
            if bucket.after != 1.0:
                bucket.flat.mul_(bucket.after)
            if bucket.flag is not None and self.process_set is global_process_set:
                process.saw_update(bool(bucket.flag.item()))
        if alone is not None:
            group.wait(alone)
        for complete in gathered:
            complete()
        appeared = any(slot.param.grad is not None for slot in self._unseen)  # the same on all members
        if appeared:
            (self._made_dense if self.sparse_as_dense else self._sparse).update(self._sparse_in_buckets)
            self.launched = 0
            self._agree(group, computed=True)
            self._sparse_in_buckets.clear()
        for slot in self._slots if appeared or self._made_dense else ():
            grad = slot.param.grad
            if id(slot.param) in self._made_dense | self._sparse and grad is not None and not grad.is_sparse:
                slot.param.grad = grad.to_sparse(1)

    def _gather(self, slot: GradientSlot) -> Callable[[], None]:
        """Start to gather the entries of a sparse gradient; return the function that completes it.

        Entries of several members with the same index are summed. A member without a gradient sends no entries; a
        gradient without entries, which is a gradient nevertheless, is sent as one with the index -1.
        """
        param = slot.param
        grad = param.grad if param.grad is not None else _no_entries(param)
        if not grad.is_sparse:
            grad = grad.to_sparse(1)
        grad = grad.coalesce()
        assert self._group is not None
        divisor = self._group.size if self.op is Average else 1
        places, sent = grad.indices().t().contiguous(), grad.values() / divisor
        if param.grad is not None and not len(places):
            places, sent = places.new_full((1, grad.sparse_dim()), -1), sent.new_zeros((1, *sent.shape[1:]))
        indices, values = (
            Handle(self._group, *launch_now(start_allgather(self._group, part))) for part in (places, sent)
        )

        def complete() -> None:
            at, received = indices.wait(), values.wait()
            if not len(at):
                param.grad = None
                return
            if (at < 0).any():
                at, received = at[at[:, 0] >= 0], received[at[:, 0] >= 0]
            param.grad = torch.sparse_coo_tensor(at.t(), received, param.shape).coalesce()

        return complete

    def _rearm(self) -> None:
        self._active = False
        self._failure = None
        self._scalars = None
        self.launched = 0
        self._works.clear()
        for bucket in self._buckets:
            bucket.ready = 0
        passes = self.passes
        for slot in self._slots:
            slot.left = passes

    def abandon(self, group_over: bool = False) -> None:
        """Drop the gradients of the present step.

        The next step gets new buckets if these may still be written: by Gloo's threads, or in this thread by a group
        that goes on. Results that come through shared memory are written in this thread alone.
        """
        if self.launched:
            buckets, sent = self._buckets, len(self._works)
            unused = group_over and all(isinstance(work, SharedWork) for work in self._works)
            if unused and sent < self.launched:  # this one's send has failed, and left no work to tell how it was sent
                buckets[sent] = self._new_bucket(buckets[sent].params, is_last=sent == len(buckets) - 1)
            self._kept = (self._made_for, buckets) if unused else (None, [])
            self._buckets = []
            self._group = None
        self._works = []
        self._rearm()
        for slot in self._slots:
            slot.param.grad = None


def abandon_steps() -> None:
    """Drop the gradients of the present steps of all reducers in this process."""
    for reducer in _reducers().values():
        reducer.abandon()


def _is_only_one() -> bool:
    """Return True if one reducer has all parameters whose gradients are reduced in this process."""
    return len(_reducers()) == 1


def _reducers() -> dict[int, BackwardReducer]:
    """Return the reducers in this process that have parameters, by id."""
    return {id(reducer): reducer for known in _owners.values() if (reducer := known()) is not None}


def _no_entries(param: torch.Tensor) -> torch.Tensor:
    indices = torch.empty((1, 0), dtype=torch.int64)
    return torch.sparse_coo_tensor(indices, param.new_empty((0, *param.shape[1:])), param.shape)


def _hook(reducer: weakref.ref[BackwardReducer], slot: GradientSlot) -> Callable[[torch.Tensor], None]:
    # weak: the hooks of a discarded optimizer must stop sending
    def hook(_: Any) -> None:
        owner = reducer()
        if owner is not None:
            owner.accumulated(slot)

    return hook
