"""Handlers copy, restore and synchronise the values of a state, by type.

Each value has two parts. The *light part* is plain data that is cheap to copy at every mark, such as a learning
rate or a position in the dataset. The *tensors* are copied at commits only. Their layout, a list of `TensorSpec`, tells
which tensors a copy holds, and which ones a member has to create that has none of them yet.
"""

from __future__ import annotations

import hashlib
import pickle
import secrets
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple, Protocol, TypeVar, runtime_checkable

import numpy as np
import torch

from spark_elastic.collective import peer_memory
from spark_elastic.collective.calls import agree, as_bytes
from spark_elastic.collective.gloo import GlooGroup
from spark_elastic.collective.objects import broadcast_object, broadcast_tensors
from spark_elastic.collective.process import process
from spark_elastic.collective.process_sets import ProcessSet, global_process_set
from spark_elastic.collective.reduction import Max
from spark_elastic.elastic.plain_values import PlainAttributes, independent_copy
from spark_elastic.errors import StateNotMovableError

H = TypeVar("H", bound="StateHandler")


class TensorSpec(NamedTuple):
    """One tensor of a layout.

    Attributes:
        key: The name of the tensor within the value.
        shape: The tensor's shape.
        dtype: The tensor's type.
        on_cpu: True if the tensor is on the CPU even when the parameter that it belongs to is not.
    """

    key: Any
    shape: tuple[int, ...]
    dtype: torch.dtype
    on_cpu: bool


Layout = list[TensorSpec]
Descriptions = dict[str, tuple[Sequence[Hashable], list[bytes]]]
"""For each value, by its name: the identities of its tensors, and a digest of each tensor."""


class StateHandler:
    """Base of handlers, of one value each. Define `light` and `set_light`; for a value with tensors, also the others.

    A subclass written for Horovod, with `save`, `restore` and `sync` of its own, works as well.
    """

    def __init__(self, value: Any) -> None:
        self.value = value
        self._layout: Layout = []
        self._copies: list[torch.Tensor] = []
        self._light: Any = None

    # --- defined by subclasses ------------------------------------------------------------------

    def light(self) -> Any:
        """Return a copy of the light part: picklable, and independent of later changes of the value."""
        return None

    def set_light(self, light: Any) -> None:
        """Set the light part to a copy of `light`, which later changes of the value must not change."""

    def layout(self) -> Layout:
        """Return the tensors that the value has now."""
        return []

    def tensors(self, layout: Layout) -> list[torch.Tensor]:
        """Return the value's own tensors, in the order of a layout: create missing ones, and drop all others.

        Raises:
            UsageError: The value cannot have these tensors.
        """
        return []

    def present(self) -> tuple[Layout, list[torch.Tensor]]:
        """Return the tensors that the value has now, with their layout."""
        layout = self.layout()
        return layout, self.tensors(layout)

    observed = False
    """True if `OptimizerSteps` notices changes of the tensors, or copies them at marks; else a loss always returns to
    the last commit."""
    staged = False
    """True if `tensors` returns copies, so that received tensors have to be written by `fill`."""

    def metadata(self) -> Any:
        """Return plain data from which `prepare` can build the value on a member where it has no tensors."""
        return None

    def prepare(self, layout: Layout, metadata: Any) -> None:
        """Prepare to receive another member's tensors.

        Raises:
            UsageError: The value cannot have tensors of this layout.
        """

    def fill(self, layout: Layout, tensors: Sequence[torch.Tensor]) -> None:
        """Copy received tensors into the value's own."""
        copy_all(self.tensors(layout), tensors)

    def identities(self, layout: Layout) -> Sequence[Hashable]:
        """Return a key for each tensor of a layout, unique within it and the same on every member."""
        return layout

    def awaits_build(self) -> bool:
        """Return True if the value is built later and has no tensors until then."""
        return False

    def reset(self) -> None:
        """Adapt to a new rank or size."""

    # --- called by a state ----------------------------------------------------------------------

    def set_value(self, value: Any) -> None:
        self.value = value
        self.save()

    def save(self) -> None:
        """Copy the value, into the buffers of the last copy where they fit."""
        self._light = self.light()
        layout, tensors = self.present()
        if layout != self._layout or [copy.device for copy in self._copies] != [each.device for each in tensors]:
            self._copies = [self._new_like(tensor) for tensor in tensors]
            self._layout = layout
        copy_all(self._copies, tensors)

    def _new_like(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a tensor for a copy of this one, with any values."""
        return torch.empty_like(tensor, memory_format=torch.preserve_format)

    def restore(self) -> None:
        """Return to the last `save`."""
        copy_all(self.tensors(self._layout), self._copies)
        self.set_light(self._light)

    def sync(self) -> None:
        """Take over the value of rank 0."""
        take_over({"": self}, 0)


@runtime_checkable
class HasStateDict(Protocol):
    """Any object with these two methods: a scheduler, gradient scaler, metric or callback."""

    def state_dict(self) -> Any: ...
    def load_state_dict(self, state_dict: Any) -> Any: ...


class StateDictHandler(StateHandler):
    """An object with `state_dict` and `load_state_dict`, which has a light part only."""

    def light(self) -> Any:
        return independent_copy(self.value.state_dict())

    def set_light(self, light: Any) -> None:
        self.value.load_state_dict(independent_copy(light))


class Handlers:
    """All values of a state, which are its attributes: some with a handler each, the others plain Python values.

    Args:
        owner: The state.
        handler_for: A function that returns the handler of a value, or None for a plain value.
        values: The values by name.
    """

    def __init__(
        self, owner: Any, handler_for: Callable[[Any], StateHandler | None], values: Mapping[str, Any]
    ) -> None:
        self.owner = owner
        self.by_name: dict[str, StateHandler] = {}
        self._handler_for = handler_for
        plain = []
        for name, value in values.items():
            setattr(owner, name, value)
            handler = handler_for(value)
            if handler is None:
                plain.append(name)
            else:
                self.by_name[name] = handler
        self.plain = PlainAttributes(owner, plain)

    def of(self, kind: type[H]) -> dict[str, H]:
        """Return the handlers of this class, by name."""
        return {name: handler for name, handler in self.by_name.items() if isinstance(handler, kind)}

    def adopt(self, name: str, value: Any) -> None:
        """Set an attribute that was a plain value to `value`, with a handler; do nothing if `value` has no handler."""
        handler = self._handler_for(value)
        if handler is not None:
            self.plain.remove(name)
            self.by_name[name] = handler
            object.__setattr__(self.owner, name, value)
            handler.save()

    # --- copies ---------------------------------------------------------------------------------

    def save(self) -> None:
        for handler in self.by_name.values():
            handler.save()
        self.plain.save()

    def restore(self) -> None:
        for handler in self.by_name.values():
            handler.restore()
        self.plain.restore()

    def light_values(self) -> Any:
        """Return copies of all light parts and of all plain values."""
        return {name: handler.light() for name, handler in self.by_name.items()}, self.plain.copies()

    def assign_light_values(self, values: Any) -> None:
        light, plain = values
        for name, part in light.items():
            self.by_name[name].set_light(part)
        self.plain.assign(plain)

    # --- other members --------------------------------------------------------------------------

    @property
    def with_own_sync(self) -> list[str]:
        """The names of values whose handlers override `sync`, as handlers written for Horovod do."""
        return [name for name, handler in self.by_name.items() if type(handler).sync is not StateHandler.sync]

    @property
    def unobserved(self) -> list[str]:
        """The names of values whose tensors may change unnoticed between two marks."""
        own = self.with_own_sync
        return [name for name, each in self.by_name.items() if name in own or (not each.observed and each.layout())]

    @property
    def unbuilt(self) -> bool:
        """True if a value is built later and has no tensors until then."""
        return any(handler.awaits_build() for handler in self.by_name.values())

    def sync(
        self,
        root: int,
        extra: Any,
        *,
        staged: bool,
        known: Descriptions | None = None,
        holds: bool | None = None,
    ) -> Any:
        """Take over the values of the member of rank `root`, and return its `extra`; see `take_over`."""
        own = self.with_own_sync
        handlers = {name: handler for name, handler in self.by_name.items() if name not in own}
        values, extra = take_over(handlers, root, (self.plain.copies(), extra), staged, known=known, holds=holds)
        for name in own:
            self.by_name[name].sync()
        self.plain.assign(values)
        return extra

    def take_up(self, kept: Handlers) -> None:
        """Take over the values of `kept`, which are of another state in this process.

        Raises:
            StateNotMovableError: A handler overrides `sync`.
            UsageError: A value cannot have the tensors of its counterpart.
        """
        own = self.with_own_sync
        if own:
            raise StateNotMovableError(kind=type(self.by_name[own[0]]).__qualname__)
        self.plain.take_up(kept.plain)
        pairs = [(handler, kept.by_name[name]) for name, handler in self.by_name.items() if name in kept.by_name]
        for handler, other in pairs:
            layout = other.layout()
            handler.prepare(layout, other.metadata())
            handler.fill(layout, other.tensors(layout))
        for handler, other in pairs:
            handler.set_light(other.light())

    def describe(self) -> Descriptions:
        """Return a description of the tensors of each value whose handler does not override `sync`."""
        own = self.with_own_sync
        return describe({name: handler for name, handler in self.by_name.items() if name not in own})

    def agree_that_equal(self, known: Descriptions) -> bool:
        """Return True if all members hold the same values; `known`: the result of `describe` on this member."""
        if self.with_own_sync:
            return False
        try:
            everything = pickle.dumps((known, self.light_values(), self.unbuilt))
            values = hashlib.blake2b(everything, digest_size=16).hexdigest()
        except (
            Exception
        ):  # values that cannot be pickled are never equal; if they cannot be sent, that is an error later
            values = secrets.token_hex(16)
        return agree(process.group(), "elastic loop", detail=values)


def copy_all(targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
    """Copy each source into its target, without recording it for autograd."""
    if targets:
        with torch.no_grad():
            torch._foreach_copy_([t.detach() for t in targets], [s.detach() for s in sources])


def describe(handlers: Mapping[str, StateHandler]) -> Descriptions:
    """Return a description of the tensors of each value."""
    out: Descriptions = {}
    for name, handler in handlers.items():
        layout, tensors = handler.present()
        out[name] = handler.identities(layout), [digest(tensor) for tensor in tensors]
    return out


def take_over(
    handlers: Mapping[str, StateHandler],
    root: int,
    extra: Any = None,
    staged: bool = False,
    process_set: ProcessSet = global_process_set,
    known: Descriptions | None = None,
    holds: bool | None = None,
) -> Any:
    """Set the values of all members to those of `root`: broadcast all metadata at once, then the tensors in few parts.

    Args:
        handlers: The values by name, the same names on every member.
        root: Rank of the member whose values are taken over.
        extra: Another picklable object.
        staged: Receive everything before any value is changed, so that this member's own values stay intact if the root
            is lost on the way.
        process_set: The members.
        known: The descriptions of this member's tensors, if most tensors are probably equal on all members: only those
            that differ on some member are sent. Implies `staged`.
        holds: At the beginning of a world, instead of `known`: True if this member probably holds the root's values. It
            compares its tensors with the root's. Those that hold other values read the root's memory meanwhile, if they
            are on its host. None: every member receives all tensors.

    Returns:
        The root's `extra`.

    Raises:
        HorovodInternalError: A peer is gone.
        UsageError: The values of this member cannot hold the root's.
    """
    group = process_set.group()
    if group is None:
        return extra
    am_root = group.rank == process_set.set_rank_of(root)
    holders = [known is not None] * group.size
    direct = False
    if holds is not None:
        holders = _holders(group, holds or am_root)
        direct = _can_read(holders, root, handlers)
        if not direct:  # everything has to be sent, so that no comparison can save anything
            holders = [rank == root for rank in range(group.size)]
    mine = handlers if am_root else {}
    layouts = {name: handler.layout() for name, handler in mine.items()}
    shared = [tensor for name, handler in mine.items() if direct for tensor in handler.tensors(layouts[name])]
    with peer_memory.offered(shared) if am_root and direct else nullcontext() as memory:
        offer = None
        if am_root:
            offer = ({name: (layouts[name], h.light(), h.metadata()) for name, h in mine.items()}, known, extra, memory)
        values, theirs, extra, memory = broadcast_object(offer, root, process_set=process_set)
        layouts = {name: layout for name, (layout, _, _) in values.items()}
        holding, compared = holders[group.rank], holds is not None and sum(holders) > 1
        wanted = torch.zeros(sum(map(len, layouts.values())), dtype=torch.uint8)
        arriving: dict[str, list[torch.Tensor]] = {}
        if not am_root:
            for name, (layout, _, metadata) in values.items():
                handlers[name].prepare(layout, metadata)
                if not holding:
                    arriving[name] = _targets(handlers[name], layout, staged)
        if not holding:
            wanted.fill_(1)
            if memory is not None:
                targets = [tensor for name in layouts for tensor in arriving[name]]
                copied = peer_memory.read(memory, targets, group.check_alive)
                wanted = torch.tensor([not each for each in copied], dtype=torch.uint8)
        elif compared:
            known = describe(handlers)
        if compared:
            theirs = broadcast_object(known, root, process_set=process_set)
        if holding and not am_root:
            assert known is not None
            wanted = _differing(layouts, known, theirs)
        selective = known is not None or holds is not None
        if selective and wanted.numel():
            group.wait(group.allreduce(wanted, Max.gloo))  # after this, no member reads the root's memory
    chosen = _chosen(handlers, layouts, wanted if selective else None)
    if am_root:
        own = {name: handlers[name].tensors(layouts[name]) for name, numbers in chosen.items() if numbers}
        broadcast_tensors([tensors[n] for name, tensors in own.items() for n in chosen[name]], root, process_set)
        return extra
    for name, layout in layouts.items():
        if holding:
            fresh = {n: torch.empty(layout[n].shape, dtype=layout[n].dtype) for n in chosen[name]}
            arriving[name] = [fresh.get(n, _NOTHING) for n in range(len(layout))]
    broadcast_tensors([arriving[name][n] for name in layouts for n in chosen[name]], root, process_set)
    for name, layout in layouts.items():
        handler = handlers[name]
        if len(chosen[name]) < len(layout) and holding:
            if chosen[name]:
                own_tensors = handler.tensors(layout)
                copy_all([own_tensors[n] for n in chosen[name]], [arriving[name][n] for n in chosen[name]])
        elif holding or staged or handler.staged:
            handler.fill(layout, arriving[name])
    for name, (_, light, _) in values.items():
        handlers[name].set_light(light)
    return extra


_NOTHING = torch.empty(0)


def _holders(group: GlooGroup, holds: bool) -> list[bool]:
    """Return which members, by rank, probably hold the root's values; all members call this together."""
    flags = torch.zeros(group.size, dtype=torch.uint8)
    flags[group.rank] = holds
    group.wait(group.allreduce(flags, Max.gloo))
    return [bool(flag) for flag in flags.tolist()]


def _targets(handler: StateHandler, layout: Layout, staged: bool) -> list[torch.Tensor]:
    """Return the tensors that receive the root's: the value's own ones, or new ones if those are copied later."""
    if staged or handler.staged:
        return [torch.empty(piece.shape, dtype=piece.dtype) for piece in layout]
    return handler.tensors(layout)


def _can_read(holders: Sequence[bool], root: int, handlers: Mapping[str, StateHandler]) -> bool:
    """Return True if all members that do not hold the root's values may read them from its memory, on its host."""
    assert process.assignment is not None
    members = process.assignment.world.members
    hosts = {members[rank].place.host for rank, holds in enumerate(holders) if not holds}
    # the tensors of a `staged` handler are copies
    return hosts <= {members[root].place.host} and not any(handler.staged for handler in handlers.values())


def _differing(layouts: Mapping[str, Layout], mine: Descriptions, theirs: Descriptions) -> torch.Tensor:
    """Return a byte for each tensor of the root, in order: 1 if this member's tensor differs from it."""
    out: list[bool] = []
    for name in layouts:
        own, other = dict(zip(*mine[name], strict=True)), dict(zip(*theirs[name], strict=True))
        same_tensors = own.keys() == other.keys()
        out += [not same_tensors or own[key] != other[key] for key in other]
    return torch.tensor(out, dtype=torch.uint8)


def _chosen(
    handlers: Mapping[str, StateHandler], layouts: Mapping[str, Layout], wanted: torch.Tensor | None
) -> dict[str, list[int]]:
    """Return the indices of the tensors to send, by the name of the value; all or none if its handler is `staged`."""
    out = {}
    start = 0
    for name, layout in layouts.items():
        numbers = list(range(len(layout)))
        if wanted is not None:
            marked = wanted[start : start + len(layout)].tolist()
            if not (handlers[name].staged and any(marked)):
                numbers = [number for number in numbers if marked[number]]
        out[name] = numbers
        start += len(layout)
    return out


_WIDTHS = (8191, 8209)
"""Both are prime: if values change places at a distance that is a multiple of one width, its sums do not show that, but
the sums of the other width do."""
_ROWS_AT_ONCE = 16
"""1 MB, which fits into the cache of a core."""


def digest(tensor: torch.Tensor) -> bytes:
    """Return a short digest of a tensor's contents: equal for equal bytes, different after any change by training.

    The bytes are arranged in rows of two different lengths, whose columns are summed as integers. That is several times
    as fast as a broadcast, unlike a cryptographic hash, and gives the same digest on all kinds of machines.
    """
    flat = as_bytes(tensor.detach().contiguous())
    words = flat.numel() // 8
    if words < _WIDTHS[1]:
        return hashlib.blake2b(_bytes_of(flat), digest_size=16).digest()
    if flat.storage_offset() % 8:
        flat = flat.clone()
    whole = flat[: words * 8].view(torch.int64)
    out = hashlib.blake2b(_bytes_of(flat[words * 8 :]), digest_size=16)
    for width, total in zip(_WIDTHS, _column_sums(whole), strict=True):
        out.update(_bytes_of(total))
        out.update(_bytes_of(whole[words // width * width :]))
    return out.digest()


def _column_sums(words: torch.Tensor) -> list[torch.Tensor]:
    """Return the sums of the columns of `words`, in rows of each of the `_WIDTHS`; an incomplete last row is left out.

    numpy adds rows in half of torch's time; the second width finds them in the cache.
    """
    count = words.numel()
    if words.device.type != "cpu":
        return [words[: count // width * width].view(-1, width).sum(0) for width in _WIDTHS]
    array = words.numpy()
    sums = [np.zeros(width, np.int64) for width in _WIDTHS]
    for first in range(0, count // min(_WIDTHS), _ROWS_AT_ONCE):
        for width, total in zip(_WIDTHS, sums, strict=True):
            end = min(first + _ROWS_AT_ONCE, count // width)
            total += np.add.reduce(array[first * width : end * width].reshape(-1, width), axis=0)
    return [torch.from_numpy(total) for total in sums]


def _bytes_of(flat: torch.Tensor) -> memoryview:
    return memoryview(flat.cpu().numpy())  # type: ignore[arg-type]
