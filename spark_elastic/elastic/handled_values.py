"""How the values of a state are copied, put back and taken over from another member, by type.

Each value has two parts. The *light* part is plain data that is cheap to copy at every resume point: a learning rate,
a position in the data. The *tensors* are copied at commits only. A layout says which tensors there are, so that they
can be asked for elsewhere: in the copy, or on a member that has none of them yet.
"""

from __future__ import annotations

import hashlib
from collections.abc import Hashable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from spark_elastic.collective.calls import as_bytes
from spark_elastic.collective.objects import broadcast_object, broadcast_tensors
from spark_elastic.collective.process_sets import ProcessSet, global_process_set
from spark_elastic.collective.reduction import Max


class Slice(NamedTuple):
    """One tensor of a layout. key: names it within the value. on_cpu: it is not on its parameter's device."""

    key: Any
    shape: tuple[int, ...]
    dtype: torch.dtype
    on_cpu: bool


Layout = list[Slice]
Described = tuple[Sequence[Hashable], list[bytes]]


class StateHandler:
    """One attribute of a `TorchState`. Subclass it, with `light` and `set_light` or with tensors too, and register it.

    A subclass written for Horovod, with `save`, `restore` and `sync` of its own, works as well.
    """

    def __init__(self, value: Any) -> None:
        self.value = value
        self._layout: Layout = []
        self._copies: list[torch.Tensor] = []
        self._light: Any = None

    # --- what a subclass defines --------------------------------------------------------------

    def light(self) -> Any:
        """The plain part: picklable, and not changed by anything that later happens to the value."""
        return None

    def set_light(self, light: Any) -> None:
        """Put a plain part back; it must not be changed by what later happens to the value."""

    def layout(self) -> Layout:
        """The tensors that the value has now."""
        return []

    def tensors(self, layout: Layout) -> list[torch.Tensor]:
        """The value's own tensors of this layout, created where missing; those not in it are dropped.

        Raises: UsageError: the value cannot have these tensors.
        """
        return []

    def present(self) -> tuple[Layout, list[torch.Tensor]]:
        """The tensors that the value has now, with their layout."""
        layout = self.layout()
        return layout, self.tensors(layout)

    elsewhere = False
    """Whether the tensors that `tensors` gives are not the value's own memory; arrivals go through `fill` then."""

    def outline(self) -> Any:
        """Plain data that `prepare` needs elsewhere, of a value that has not the tensors of this one yet."""
        return None

    def prepare(self, layout: Layout, outline: Any) -> None:
        """Another member's tensors of this layout are about to arrive.

        Raises: UsageError: the value cannot have these tensors.
        """

    def fill(self, layout: Layout, tensors: Sequence[torch.Tensor]) -> None:
        """Take over the contents of tensors that have arrived."""
        copy_all(self.tensors(layout), tensors)

    def identities(self, layout: Layout) -> Sequence[Hashable]:
        """What tells the tensors of a layout apart, and is the same for the same tensor on every member."""
        return layout

    def reset(self) -> None:
        """Rank or size have changed."""

    # --- what a state calls -------------------------------------------------------------------

    def set_value(self, value: Any) -> None:
        self.value = value
        self.save()

    def save(self) -> None:
        """Copy the value, into the buffers of the last time where they fit."""
        self._light = self.light()
        layout, tensors = self.present()
        if layout != self._layout or not _same_devices(self._copies, tensors):
            self._copies = [torch.empty_like(tensor, memory_format=torch.preserve_format) for tensor in tensors]
            self._layout = layout
        copy_all(self._copies, tensors)

    def restore(self) -> None:
        """Return to the last `save`."""
        copy_all(self.tensors(self._layout), self._copies)
        self.set_light(self._light)

    def sync(self) -> None:
        """Take over the value of rank 0."""
        take_over({"": self}, 0)


def _same_devices(copies: Sequence[torch.Tensor], tensors: Sequence[torch.Tensor]) -> bool:
    return len(copies) == len(tensors) and all(a.device == b.device for a, b in zip(copies, tensors, strict=True))


def copy_all(targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
    """Copy each source into its target, without recording it for autograd."""
    if targets:
        with torch.no_grad():
            torch._foreach_copy_([t.detach() for t in targets], [s.detach() for s in sources])


def take_over(
    handlers: Mapping[str, StateHandler],
    root: int,
    extra: Any = None,
    staged: bool = False,
    process_set: ProcessSet = global_process_set,
    known: Mapping[str, Described] | None = None,
) -> Any:
    """Make every member's values those of `root`: what there is in one broadcast, then the tensors in few large ones.

    extra: another picklable object; the root's is returned. staged: receive everything before any value is changed, so
    that a root that dies half-way leaves this member's own values whole. known: the tensors are probably equal: this is
    what `described` says of them, and only those that differ somewhere are brought. It includes `staged`.

    Raises:
        HorovodInternalError: a peer is gone.
        UsageError: the values of this member cannot hold the root's.
    """
    group = process_set.group()
    if group is None:
        return extra
    am_root = group.rank == process_set.set_rank_of(root)
    offer = None
    if am_root:
        offer = ({name: (h.layout(), h.light(), h.outline()) for name, h in handlers.items()}, known, extra)
    values, theirs, extra = broadcast_object(offer, root, process_set=process_set)
    layouts = {name: layout for name, (layout, _, _) in values.items()}
    wanted = None
    if known is not None:
        wanted = _differing(layouts, known, theirs)
        if wanted.numel():
            group.wait(group.allreduce(wanted, Max.gloo))
    chosen = _chosen(handlers, layouts, wanted)
    if am_root:
        own = {name: handlers[name].tensors(layouts[name]) for name, numbers in chosen.items() if numbers}
        broadcast_tensors([tensors[n] for name, tensors in own.items() for n in chosen[name]], root, process_set)
        return extra
    arriving: dict[str, list[torch.Tensor]] = {}
    for name, (layout, _, outline) in values.items():
        handler = handlers[name]
        handler.prepare(layout, outline)
        if staged or known is not None or handler.elsewhere:
            arriving[name] = [torch.empty(layout[n].shape, dtype=layout[n].dtype) for n in chosen[name]]
        else:
            arriving[name] = handler.tensors(layout)
    broadcast_tensors([tensor for tensors in arriving.values() for tensor in tensors], root, process_set)
    for name, layout in layouts.items():
        handler = handlers[name]
        if len(chosen[name]) < len(layout):
            if chosen[name]:
                own_tensors = handler.tensors(layout)
                copy_all([own_tensors[n] for n in chosen[name]], arriving[name])
        elif staged or known is not None or handler.elsewhere:
            handler.fill(layout, arriving[name])
    for name, (_, light, _) in values.items():
        handlers[name].set_light(light)
    return extra


def take_up(handlers: Mapping[str, tuple[StateHandler, StateHandler]]) -> None:
    """Make the first value of each pair that of the second, in this process.

    Raises: UsageError: the first cannot hold the second's.
    """
    for handler, kept in handlers.values():
        layout = kept.layout()
        handler.prepare(layout, kept.outline())
        handler.fill(layout, kept.tensors(layout))
    for handler, kept in handlers.values():
        handler.set_light(kept.light())


def described(handlers: Mapping[str, StateHandler]) -> dict[str, Described]:
    """What tells the tensors of each value apart, and a digest of each."""
    out = {}
    for name, handler in handlers.items():
        layout, tensors = handler.present()
        out[name] = handler.identities(layout), [digest(tensor) for tensor in tensors]
    return out


def _differing(
    layouts: Mapping[str, Layout], mine: Mapping[str, Described], theirs: Mapping[str, Described]
) -> torch.Tensor:
    """Return a byte for each tensor of the root, in order: 1 where this member's is another one."""
    out: list[bool] = []
    for name in layouts:
        own, other = dict(zip(*mine[name], strict=True)), dict(zip(*theirs[name], strict=True))
        same_tensors = own.keys() == other.keys()
        out += [not same_tensors or own[key] != other[key] for key in other]
    return torch.tensor(out, dtype=torch.uint8)


def _chosen(
    handlers: Mapping[str, StateHandler], layouts: Mapping[str, Layout], wanted: torch.Tensor | None
) -> dict[str, list[int]]:
    """Return the numbers of the tensors to bring, by name; of a value whose tensors arrive elsewhere, all or none."""
    out = {}
    start = 0
    for name, layout in layouts.items():
        numbers = list(range(len(layout)))
        if wanted is not None:
            marked = wanted[start : start + len(layout)].tolist()
            if not (handlers[name].elsewhere and any(marked)):
                numbers = [number for number in numbers if marked[number]]
        out[name] = numbers
        start += len(layout)
    return out


_WIDTHS = (8191, 8209)
"""Both prime: what one sum cannot tell apart, values moved by a multiple of its width, the other can."""


def digest(tensor: torch.Tensor) -> bytes:
    """Return a short digest of a tensor's contents: equal for equal bytes, different for all that training changes.

    Integer sums over the columns of the bytes, laid out in rows of two lengths, run at the speed of memory, several
    times that of a broadcast; a cryptographic hash of everything would not. Sums do not depend on their order, so
    machines of different kinds agree.
    """
    flat = as_bytes(tensor.detach().contiguous())
    words = flat.numel() // 8
    if words < _WIDTHS[1]:
        return hashlib.blake2b(_bytes_of(flat), digest_size=16).digest()
    if flat.storage_offset() % 8:
        flat = flat.clone()
    whole = flat[: words * 8].view(torch.int64)
    out = hashlib.blake2b(_bytes_of(flat[words * 8 :]), digest_size=16)
    for width in _WIDTHS:
        rows = words // width
        out.update(_bytes_of(whole[: rows * width].view(rows, width).sum(0)))
        out.update(_bytes_of(whole[rows * width :]))
    return out.digest()


def _bytes_of(flat: torch.Tensor) -> memoryview:
    return memoryview(flat.cpu().numpy())  # type: ignore[arg-type]
