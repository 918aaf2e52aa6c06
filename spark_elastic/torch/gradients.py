"""Reduce the gradients of an optimizer: when the last backward of a step returns, each `param.grad` is the reduced one.

That is the contract of DistributedDataParallel: what a loop does to gradients between `backward` and `step`, such as
clipping, unscaling or scaling by hand, it does to reduced gradients.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import InitVar, dataclass
from itertools import count
from typing import Any

import torch

from spark_elastic.collective.batch_statistics import is_without_rows, sums_in_backward
from spark_elastic.collective.calls import agree
from spark_elastic.collective.fused import Bucket, partition
from spark_elastic.collective.group import Group
from spark_elastic.collective.operators import Average, CastCompressor, Compressor, NoneCompressor, ReduceOp, Sum
from spark_elastic.collective.process import process
from spark_elastic.collective.process_sets import ProcessSet, global_process_set
from spark_elastic.collective.shared_memory.reducer import SharedWork
from spark_elastic.errors import HorovodInternalError, SparkElasticError, UsageError
from spark_elastic.torch import backward, parameters, stamp
from spark_elastic.torch.agreement import Agreement
from spark_elastic.torch.backward import Backward
from spark_elastic.torch.parameters import GradientSlot
from spark_elastic.torch.sparse import gather_entries
from spark_elastic.torch.stamp import Stamp

_numbers = count(1)


@dataclass(eq=False, kw_only=True)
class BackwardReducer:
    """Averages or sums the gradients of `params` over the members at the end of the last backward of each step.

    All members send the buckets in one order, each bucket as soon as the last backward has computed all gradients in it
    and in the buckets before it. With several optimizers, or after a backward within another one, all are sent at the
    end. Gradients are scaled while they are copied into the bucket, and `param.grad` becomes the view of the bucket
    that receives the result. A parameter of which no member has a gradient keeps none: an optimizer would move it by
    momentum and weight decay, given zeros. The last bucket also has the stamp of the reduction.

    The first reduction in each world, and after a change of what is trained, begins with a small extra reduction in
    which the members agree on the parameters and on those with sparse gradients, see `Agreement`.

    The fields that are not explained here are arguments of `DistributedOptimizer`.
    """

    params: InitVar[Sequence[torch.nn.Parameter]]
    names: dict[int, str]
    """The parameters' names for messages, by id; others are numbered."""
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
        self.number = next(_numbers)
        self.launched = 0
        """The number of buckets sent; 0 before and after each reduction."""
        self.reduced = False
        """The gradients have been reduced since the last step, or since they were reset."""
        self.reductions = 0
        self._left = self.passes
        """The number of backward passes until the next reduction."""
        self.unused = 0
        """The number of backward passes after which no optimizer has stepped, as `GradScaler` leaves out steps."""
        self._newest: Backward | None = None
        """The last backward of the present step."""
        self._stamp = Stamp()
        self._slots: list[GradientSlot] = []
        self._agreement = Agreement(self.number, self._slots, self.names, self.sparse_as_dense)
        self._results: list[torch.Tensor | None] = []
        """The gradients that the last reduction has left, in the order of `_slots`."""
        self.replaced = False
        """Another reducer has taken over parameters of this one."""
        self._buckets: list[Bucket] = []
        self._made_for: Any = None
        """The division of the parameters and the number of scalars that `_buckets` were made for."""
        self._works: list[Any] = []
        self._group: Group | None = None
        self._graph = -1
        """The graph whose end is awaited."""
        self._nested = False
        """A backward ran within another one."""
        self._at_end = True
        """Buckets are sent at the end of the present backward only."""
        self._failure: SparkElasticError | None = None
        self._scalars: torch.Tensor | None = None
        self._sums: torch.Tensor | None = None
        self._scalars_width = 0
        self.before_step: OrderedDict[int, Callable[[], None]] = OrderedDict()
        """Functions to call when the gradients are complete and the optimizer begins to step."""
        for other in parameters.reducers():
            other._agreement.reached = None, 0
        self.add(params)

    def add(self, params: Iterable[torch.nn.Parameter]) -> None:
        """Reduce the gradients of these parameters too from now on, instead of the reducer that did so before."""
        for param in params:
            index = len(self._slots)
            node = parameters.observe(self, param, index, before_each=self.op is Sum)
            self._slots.append(GradientSlot(param, node=node))
            self._agreement.unseen.add(id(param))
            self.names.setdefault(id(param), f"parameter {index}")
        self._agreement.reached = None, 0

    def detach(self) -> None:
        """Remove the hooks from the parameters, so that another optimizer can reduce them, and free the buckets."""
        for slot in self._slots:
            parameters.stop_observing(self, slot.param)
            slot.bucket = None
        self._buckets, self._results, self._made_for, self._group = [], [], None, None

    def attach_scalars(self, numbers: torch.Tensor, sums: torch.Tensor) -> None:
        """Sum `numbers` over the members with the gradients of this step, see `DistributedOptimizerMixin`.

        They are sent in the last bucket; if its type is less precise than float32, or there is none, separately.
        """
        self._scalars, self._sums = numbers, sums
        if numbers.numel() != self._scalars_width:
            self._scalars_width = numbers.numel()
            self._group = None  # the next step makes new buckets

    @property
    def is_in_step(self) -> bool:
        """True from the first backward of a step until an optimizer that took part in the last one steps.

        The step is left out if gradients were reset, or are not finite, with which `GradScaler` makes none.
        """
        return self._left != self.passes or (self._waits and parameters.are_finite(self._slots))

    @property
    def _waits(self) -> bool:
        """True if no optimizer has made a step since the last backward."""
        return self._newest is not None and not self._newest.used

    def computed(self, index: int) -> None:
        """Note that backward has added to the gradient of this parameter; send the buckets that are full."""
        slot = self._slots[index]
        if is_without_rows():
            slot.param.grad = None
        if self._graph != (graph := torch._C._current_graph_task_id()):
            self._enter(graph)
        if slot.computed:  # in another graph of the same backward
            if slot.bucket in self._buckets[: self.launched]:
                raise UsageError(
                    f"backward computed the gradient of {self.names[id(slot.param)]} twice, and its "
                    "sum over the workers had begun after the first time; pass use_reentrant=False to "
                    "torch.utils.checkpoint.checkpoint"
                )
            return
        slot.computed = True
        if slot.bucket is not None:
            slot.bucket.ready += 1
            if not self._at_end and slot.bucket.ready == len(slot.bucket.params):
                self._send_full()

    def _enter(self, graph: int) -> None:
        """Wait for the end of this graph, in which a gradient was computed."""
        if torch.is_grad_enabled():
            raise UsageError(
                "backward(create_graph=True) computes gradients that are part of a graph, which DistributedOptimizer "
                "cannot reduce over the workers; use torch.autograd.grad(..., create_graph=True) and backward() for "
                "the loss that is made of them"
            )
        if self.op is Sum and self._results:  # without `set_aside`, whose hook ends when a parameter is converted
            raise UsageError(parameters.CONVERTED)
        self._graph = graph
        if not backward.await_end(self):
            self._at_end = self._left > 1 or self._nested or self._agreement.is_one_of_many or self._needs_agreement()

    def _needs_agreement(self) -> bool:
        """Return True if the members agree before the next reduction, or a gradient may show itself as sparse."""
        group = self._present_group()
        if group is None or group is not self._group or not self._buckets:
            return True
        return bool(self._agreement.unseen) or not self._agreement.holds(group, self._trained())

    def _trained(self) -> list[GradientSlot]:
        return [slot for slot in self._slots if slot.param.requires_grad]

    def _present_group(self) -> Group | None:
        """Return the group to reduce with; None if this process is alone or not in the process set."""
        return self.process_set.group() if self.process_set.included() else None

    def set_aside(self) -> None:
        """Put reduced gradients aside before a further backward adds to them, which alone is summed then."""
        for slot, grad in zip(self._slots, self._results, strict=False):
            if grad is not None and slot.param.grad is grad:
                slot.before, slot.param.grad = grad.clone(), None
        self._results = []

    def _send_full(self) -> None:
        """Send the next buckets as far as they are full; an error is raised at the end of backward."""
        while self.launched < len(self._buckets) and not sums_in_backward:
            bucket = self._buckets[self.launched]
            if bucket.ready < len(bucket.params) or self._failure is not None:
                return
            try:
                self._send(bucket)
            except HorovodInternalError as error:
                self._failure = error

    def _send(self, bucket: Bucket) -> None:
        assert self._group is not None
        if any((param.dtype, param.device) != (bucket.flat.dtype, bucket.flat.device) for param in bucket.params):
            raise UsageError(parameters.CONVERTED)
        if bucket.flags is not None:
            # a copy to a GPU that blocks would also wait until backward is done there
            bucket.flags.copy_(self._stamp.to_send(process.update_pending), non_blocking=True)
        if bucket.piggyback is not None and self._scalars is not None:
            bucket.piggyback.copy_(self._scalars, non_blocking=True)
        self.launched += 1
        gradients = [param.grad for param in bucket.params]
        self._agreement.note_sent(bucket.params)
        self._works.append(bucket.send(self._group, self.op.gloo, gradients))
        for param, view in zip(bucket.params, bucket.views, strict=True):
            # also for those without one, until `_reduce` knows that no member has one; detached, since a loop may set
            # `param.grad.data`, as `model.to` does
            param.grad = view.detach()

    def backward_nested(self) -> None:
        """Note that a backward has ended within another one, which still runs."""
        self._nested = self._at_end = True

    def backward_failed(self) -> None:
        """Note, when the next backward begins, that the last one has raised an error."""
        if self.launched or any(slot.before is not None for slot in self._slots):
            raise UsageError(
                "the last backward raised an error after its reduction had begun, so its batch cannot be skipped"
            )
        self._count_again()

    def backward_ended(self, ended: Backward) -> None:
        """Count a backward pass; if it was the last one of the step, reduce the gradients, and raise as `complete`."""
        self._left -= 1
        self.unused += self._waits
        self._newest = ended
        if self._left <= 0:
            self.complete()
        else:
            self._count_again()

    def _count_again(self) -> None:
        for slot in self._slots:
            slot.computed = False
        for bucket in self._buckets:
            bucket.ready = 0

    def complete_step(self) -> None:
        """Reduce what is not reduced yet: `backward` reported no gradients of this step, or not from all its passes.

        Raises the errors of `complete`, and UsageError within backward or if reduced gradients were replaced.
        """
        if torch._C._current_graph_task_id() != -1:
            raise UsageError("a DistributedOptimizer cannot step within backward, in a hook; call step() after it")
        replaced = self.reduced and any(map(parameters.has_other, self._slots, self._results))
        if replaced and self.op is Sum:
            raise UsageError(
                "param.grad was replaced after its reduction, and would be summed again; change it in place, or call "
                "optimizer.zero_grad() before setting gradients of this worker"
            )
        if self.number in backward.participants or self._left != self.passes or not self.reduced or replaced:
            self.complete()

    def accept(self) -> None:
        """Count the present gradients as reduced ones, also if they have been replaced."""
        self._results = [slot.param.grad for slot in self._slots]

    def stepped(self) -> None:
        """Begin a new step: the optimizer has used the gradients."""
        if self._newest is not None:
            self._newest.used = True
        self.forget()
        self._stamp.stepped()

    def forget(self) -> None:
        """Count the gradients as not reduced: they were reset."""
        for slot in self._slots:
            slot.before = None
        self.unused += self._waits
        self.reduced, self._newest = False, None
        self._left = self.passes

    def complete(self) -> None:
        """Reduce the gradients, so that every `param.grad` is the reduced gradient.

        Raises:
            HorovodInternalError: a peer is gone. The gradients are dropped; nothing else has changed.
            MismatchError: the members are at different steps, or reduce gradients of different optimizers.
            UsageError: a later optimizer reduces parameters of this one.
        """
        if self.replaced:
            raise UsageError(
                "a DistributedOptimizer was made later for parameters of this one, and reduces their gradients now; "
                "call step() of that one, or make one DistributedOptimizer for each set of parameters"
            )
        try:
            self._complete()
        except BaseException as error:
            self.abandon(group_over=isinstance(error, HorovodInternalError))
            raise

    def _complete(self) -> None:
        if self._failure is not None:
            raise self._failure
        group = self._present_group()
        if self.launched and group is not self._group:
            raise HorovodInternalError("the world has changed during backward")
        if group is None:
            self._agreement.see_gradients()
            self._read_scalars()
            if self.process_set is global_process_set:
                process.saw_update(process.update_pending)
        else:
            if not self.launched:
                parameters.check_frozen(self._slots, self._results)
                if self.op is Sum:
                    self.set_aside()
                trained = self._trained()
                if not self._agreement.holds(group, trained):
                    self._agree(group, trained)
                elif group is not self._group or not self._buckets:
                    self._plan(group)
            if self._agreement.is_one_of_many:
                agree(group, f"gradients of DistributedOptimizer {self._agreement.number}", str(self._stamp))
            self._reduce(group)
        for slot in self._slots:
            if slot.before is not None:
                grad = slot.param.grad
                slot.param.grad = slot.before if grad is None else grad + slot.before
        self._rearm()
        self._results = [] if group is None else [slot.param.grad for slot in self._slots]
        self.reduced = True
        self.reductions += 1
        self._stamp.reductions += 1

    def _agree(self, group: Group, trained: list[GradientSlot]) -> None:
        """Agree with all members on settings and parameters, and divide these into buckets; raise MismatchError."""
        settings = f"op={self.op.name}, predivide={self.predivide}, compression={self.compression.__name__}"
        buckets = [len(part) for part in partition([slot.param for slot in trained], self.groups)]
        settings += f", sparse_as_dense={self.sparse_as_dense}, parameters by bucket {buckets}"
        self._agreement.reach(group, trained, settings)
        self._stamp = Stamp()
        self._plan(group)

    def _plan(self, group: Group) -> None:
        """Divide the trained parameters into buckets."""
        self._group = group
        for slot in self._slots:
            slot.bucket = None
        trained = self._agreement.trained
        by_id = {id(slot.param): slot for slot in trained}
        dense = [slot.param for slot in trained if id(slot.param) not in self._agreement.sparse]
        parts = partition(dense, self.groups)
        layouts = [[(id(p), p.dtype, p.device, p.shape, p.stride()) for p in part] for part in parts]
        made_for = self._scalars_width if self.compression is NoneCompressor else 0, layouts
        if made_for != self._made_for:
            self._buckets = [self._new_bucket(part, part is parts[-1]) for part in parts]
            self._made_for = made_for
        for bucket in self._buckets:
            bucket.ready = 0
            bucket.scale(self.op, self.predivide, group.size)
            for param in bucket.params:
                by_id[id(param)].bucket = bucket

    def _new_bucket(self, part: Sequence[torch.Tensor], is_last: bool) -> Bucket:
        flags, piggyback = (stamp.WIDTH, self._scalars_width) if is_last else (0, 0)
        return Bucket(part, self.compression, flags=flags, piggyback=piggyback)

    def _reduce(self, group: Group) -> None:
        for bucket in self._buckets[self.launched :]:
            self._send(bucket)
        sums, alone = self._sums, None
        if sums is not None and not (self._buckets and self._buckets[-1].piggyback is not None):
            self._read_scalars()
            alone = group.allreduce(sums, Sum.gloo)
        divisor = group.size if self.op is Average else 1
        agreement = self._agreement
        sparse = [slot.param for slot in agreement.trained if id(slot.param) in agreement.sparse]
        gathered = [gather_entries(group, param, divisor) for param in sparse]
        # a user's compressor may wait for the GPU, or raise because of the garbage that an abort leaves
        may_queue = issubclass(self.compression, (NoneCompressor, CastCompressor))
        group.wait_each(self._works, lambda number, queued: self._buckets[number].receive(queued), may_queue)
        for bucket in self._buckets:
            numbers, _, flags = bucket.received
            if bucket.flags is not None:
                update = self._stamp.read(flags)
                if self.process_set is global_process_set:
                    process.saw_update(update)
            for index in bucket.given_by_none():
                bucket.params[index].grad = None
            if bucket.piggyback is not None and sums is not None:
                sums.copy_(numbers)
        if alone is not None:
            group.wait(alone)
        for complete in gathered:
            complete()
        if appeared := agreement.shown():
            self.launched = 0
            self._agree(group, agreement.trained)
        for slot in agreement.trained if appeared or agreement.made_dense else ():
            grad = slot.param.grad
            if id(slot.param) in agreement.made_dense | agreement.sparse and grad is not None and not grad.is_sparse:
                slot.param.grad = grad.to_sparse(1)

    def _read_scalars(self) -> None:
        """Read this member's numbers from the device that they are on, as the only summands."""
        if self._sums is not None and self._scalars is not None:
            self._sums.copy_(self._scalars)

    def _rearm(self) -> None:
        """Prepare for the next backward."""
        self._failure = None
        self._scalars = self._sums = None
        self.launched = 0
        self._left = self.passes
        self._works = []
        self._at_end = True
        backward.participants.pop(self.number, None)
        self._count_again()
        for slot in self._slots:
            slot.before = None

    def abandon(self, group_over: bool = False) -> None:
        """Drop the gradients of the present step.

        The next step gets new buckets if these may still be written: by Gloo's threads, or in this thread by a group
        that is in use. Results that come through shared memory are written in this thread alone.
        """
        if self.launched:
            buckets, sent = self._buckets, len(self._works)
            unused = group_over and all(isinstance(work, SharedWork) for work in self._works)
            if unused and sent < self.launched:  # this one's send has failed, and left no work to tell how it was sent
                buckets[sent] = self._new_bucket(buckets[sent].params, is_last=sent == len(buckets) - 1)
            if not unused:
                self._buckets, self._made_for = [], None
            self._group = None
        self._rearm()
        self.forget()
        for slot in self._slots:
            slot.param.grad = None
