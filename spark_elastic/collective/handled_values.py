"""How the values of a state are copied, put back and taken over from another member, by type.

Each value has two parts. The *light* part is plain data that is cheap to copy at every resume point: a learning rate,
a position in the data. The *tensors* are copied at commits only. A layout says which tensors there are, so that they
can be asked for elsewhere: in the copy, or on a member that has none of them yet.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch

from spark_elastic.collective.objects import broadcast_object, broadcast_tensors
from spark_elastic.collective.process_sets import ProcessSet, global_process_set


class Slice(NamedTuple):
    """One tensor of a layout. key: names it within the value. on_cpu: it is not on its parameter's device."""

    key: Any
    shape: tuple[int, ...]
    dtype: torch.dtype
    on_cpu: bool


Layout = list[Slice]


class StateHandler:
    """One attribute of a `TorchState`. Subclass it, with `light` and `set_light` or with tensors too, and register it.

    A subclass written for Horovod, with `save`, `restore` and `sync` of its own, works as well.
    """

    def __init__(self, value: Any) -> None:
        self.value = value
        self._layout: Layout = []
        self._copies: list[torch.Tensor] = []
        self._light: Any = None
        self._unfinished = False

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

    def reset(self) -> None:
        """Rank or size have changed."""

    # --- what a state calls -------------------------------------------------------------------

    def set_value(self, value: Any) -> None:
        self.value = value
        self.save()

    def save(self) -> None:
        """Copy the value, into the buffers of the last time where they fit."""
        self.begin_save()
        self.finish_save()

    def begin_save(self) -> None:
        """Copy what can change before the optimizer's next step; `finish_save` copies the rest until then."""
        self._light = self.light()
        self._unfinished = True

    def finish_save(self) -> None:
        """Copy the tensors that `begin_save` has left out."""
        if not self._unfinished:
            return
        self._unfinished = False
        layout = self.layout()
        tensors = self.tensors(layout)
        if layout != self._layout or not _same_devices(self._copies, tensors):
            self._copies = [torch.empty_like(tensor, memory_format=torch.preserve_format) for tensor in tensors]
            self._layout = layout
        copy_all(self._copies, tensors)

    def restore(self) -> None:
        """Return to the last `save`."""
        self.finish_save()
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
) -> Any:
    """Make every member's values those of `root`: what there is in one broadcast, then the tensors in few large ones.

    extra: another picklable object; the root's is returned. staged: receive everything before any value is changed, so
    that a root that dies half-way leaves this member's own values whole.

    Raises:
        HorovodInternalError: a peer is gone.
        UsageError: the values of this member cannot hold the root's.
    """
    group = process_set.group()
    if group is None:
        return extra
    am_root = group.rank == root
    offer = None
    if am_root:
        offer = ({name: (h.layout(), h.light(), h.outline()) for name, h in handlers.items()}, extra)
    values, extra = broadcast_object(offer, root, process_set=process_set)
    if am_root:
        own = [tensor for name, (layout, _, _) in values.items() for tensor in handlers[name].tensors(layout)]
        broadcast_tensors(own, root, process_set)
        return extra
    arriving: dict[str, list[torch.Tensor]] = {}
    for name, (layout, _, outline) in values.items():
        handler = handlers[name]
        handler.prepare(layout, outline)
        aside = staged or handler.elsewhere
        arriving[name] = (
            [torch.empty(piece.shape, dtype=piece.dtype) for piece in layout] if aside else handler.tensors(layout)
        )
    broadcast_tensors([tensor for tensors in arriving.values() for tensor in tensors], root, process_set)
    for name, (layout, _, _) in values.items():
        if staged or handlers[name].elsewhere:
            handlers[name].fill(layout, arriving[name])
    for name, (_, light, _) in values.items():
        handlers[name].set_light(light)
    return extra
