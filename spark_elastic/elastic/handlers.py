"""Handlers copy, restore and synchronise the values of a state, by type.

Each value has two parts. The *light part* is plain data that is cheap to copy at every mark, such as a learning
rate or a position in the dataset. The *tensors* are copied at commits only. Their layout, a list of `TensorSpec`, tells
which tensors a copy holds, and which ones a member has to create that has none of them yet.
"""

from __future__ import annotations

import hashlib
import pickle
import secrets
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from types import FunctionType, ModuleType
from typing import Any, NamedTuple, Protocol, TypeVar, runtime_checkable

import torch

from spark_elastic import clock
from spark_elastic.collective.calls import agree
from spark_elastic.collective.digest import digest
from spark_elastic.collective.objects import broadcast_object, broadcast_tensors
from spark_elastic.collective.operators import Max
from spark_elastic.collective.process import process
from spark_elastic.collective.process_sets import ProcessSet, global_process_set
from spark_elastic.elastic.plain_values import (
    SLOW_COPY_S,
    PlainAttributes,
    check_names,
    check_same_names,
    independent_copy,
    is_atom,
    unpicklable_named,
)
from spark_elastic.errors import StateNotMovableError, UsageError

H = TypeVar("H", bound="StateHandler")


class TensorSpec(NamedTuple):
    """One tensor of a layout; `key` is its name within the value."""

    key: Any
    shape: tuple[int, ...]
    dtype: torch.dtype
    on_cpu: bool  # although the parameter that it belongs to is on a GPU


Layout = list[TensorSpec]
Description = tuple[Sequence[Hashable], list[bytes]]
"""The identities of the tensors of a value, and a digest of each of them."""


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

    def light_at_mark(self) -> Any:
        """Return a copy of what may have changed of the light part before the next step; the light part by default."""
        return self.light()

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
            self._copies = [torch.empty_like(each, memory_format=torch.preserve_format) for each in tensors]
            self._layout = layout
        copy_all(self._copies, tensors)

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
    """All values of a state: those for which `handler_for` returns a handler, and plain Python values."""

    def __init__(
        self, owner: Any, handler_for: Callable[[Any], StateHandler | None], values: Mapping[str, Any]
    ) -> None:
        self.owner = owner
        self.by_name: dict[str, StateHandler] = {}
        self._handler_for = handler_for
        plain = []
        check_names(owner, values)
        for name, value in values.items():
            setattr(owner, name, value)
            handler = handler_for(value)
            if handler is None:
                self._check_plain(name, value)
                plain.append(name)
            else:
                self.by_name[name] = handler
        self.plain = PlainAttributes(owner, plain)

    def add(self, name: str, value: Any, in_loop: bool) -> bool:
        """Keep an attribute that is about to be set, or raise UsageError; return True if it has a handler now."""
        if is_atom(value) and name in self.plain.names:
            return False
        new = self.plain.is_new(name)
        if not new and name not in self.plain.names:
            return False
        handler = self._handler_for(value)
        if handler is not None and (new or handler.observed):
            if in_loop:
                raise UsageError(
                    f"{name} cannot be given to the state within the loop, because a newcomer would not have this "
                    f"{type(value).__name__}: give it to the state as a keyword argument"
                )
            if not new:
                self.plain.remove(name)
            self.by_name[name] = handler
            return True
        if new:
            self._check_plain(name, value)
            self.plain.add(name, value)
        return False

    def _check_plain(self, name: str, value: Any) -> None:
        """Raise UsageError if a value has models or optimizers in it, of which the state would keep copies."""
        for item in _within(value):
            handler = self._handler_for(item)
            if (handler is not None and handler.observed) or isinstance(item, torch.optim.lr_scheduler.LRScheduler):
                raise UsageError(
                    f"{name} of the state is a {type(value).__name__} with a {type(item).__name__}, which would be "
                    "replaced by a copy after a loss; give each model, optimizer and scheduler in it to the state as "
                    "a keyword argument of its own, or give its class state_dict and load_state_dict"
                )

    def of_type(self, kind: type[H]) -> dict[str, H]:
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
        """Return copies of the light parts, as marks keep them, and of all plain values."""
        light = {}
        for name, handler in self.by_name.items():
            began = clock.monotonic()
            light[name] = handler.light_at_mark()
            seconds = clock.monotonic() - began
            if seconds > SLOW_COPY_S and not self.plain.said_slow:
                self.plain.say_slow(name, handler.value, seconds)
        return light, self.plain.copies()

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
        return [
            name
            for name, each in self.by_name.items()
            if name in own or (not each.observed and (type(each).restore is not StateHandler.restore or each.layout()))
        ]

    @property
    def has_unbuilt(self) -> bool:
        """True if a value is built later and has no tensors until then."""
        return any(handler.awaits_build() for handler in self.by_name.values())

    def sync(self, root: int, extra: Any, *, staged: bool) -> Any:
        """Take over the values of the member of rank `root`, and return its `extra`; see `take_over`."""
        own = self.with_own_sync
        handlers = {name: handler for name, handler in self.by_name.items() if name not in own}
        with unpicklable_named(lambda: self.plain.copies() | {n: each.light() for n, each in handlers.items()}):
            values, extra = take_over(handlers, root, (self.plain.copies(), extra), staged)
        for name in own:
            self.by_name[name].sync()
        self.plain.assign(values)
        return extra

    def copy_from(self, kept: Handlers) -> None:
        """Take over the values of another state; raise StateNotMovableError if a handler overrides `sync`."""
        own = self.with_own_sync
        if own:
            raise StateNotMovableError(kind=type(self.by_name[own[0]]).__qualname__)
        self.plain.copy_from(kept.plain)
        pairs = [(handler, kept.by_name[name]) for name, handler in self.by_name.items() if name in kept.by_name]
        for handler, other in pairs:
            layout = other.layout()
            handler.prepare(layout, other.metadata())
            handler.fill(layout, other.tensors(layout))
        for handler, other in pairs:
            handler.set_light(other.light())

    def values(self) -> dict[str, Any]:
        """Return all values, for a checkpoint. Raise UsageError if a handler overrides `sync`."""
        if own := self.with_own_sync:
            kind = type(self.by_name[own[0]]).__qualname__
            raise UsageError(
                f"{own[0]} of the state has a handler ({kind}) with a sync of its own, so it cannot be written to a "
                "checkpoint; let the handler define light and set_light (and layout and tensors), or leave out "
                "checkpoint_dir"
            )
        present = {name: handler.present() for name, handler in self.by_name.items()}
        light = {
            name: {"layout": present[name][0], "light": handler.light(), "metadata": handler.metadata()}
            for name, handler in self.by_name.items()
        }
        tensors = {name: own for name, (_, own) in present.items()}
        return {"light": {**self.plain.copies(), **light}, "tensors": tensors}

    def set_values(self, values: Any) -> None:
        """Set what `values` has returned; raise ValueError if it has other names, UsageError if tensors do not fit."""
        light, tensors = dict(values["light"]), values.get("tensors", {})
        check_same_names([*self.plain.names, *self.by_name], light)
        parts = {name: light.pop(name) for name in self.by_name}
        for name, handler in self.by_name.items():
            layout = [TensorSpec(*piece) for piece in parts[name]["layout"]]
            handler.prepare(layout, parts[name]["metadata"])
            handler.fill(layout, tensors[name])
        for name, handler in self.by_name.items():
            handler.set_light(parts[name]["light"])
        self.plain.assign(light)

    def agree_that_equal(self) -> bool:
        """Return True, on every member alike, if all members hold the same values."""
        if self.with_own_sync:
            return False
        try:
            everything = pickle.dumps((describe(self.by_name), self.light_values(), self.has_unbuilt))
            values = hashlib.blake2b(everything, digest_size=16).hexdigest()
        except Exception:  # what cannot be pickled is never equal; if it cannot be sent, that is an error later
            values = secrets.token_hex(16)
        return agree(process.group(), "elastic loop", detail=values)


def _within(value: Any, depth: int = 3) -> Iterator[Any]:
    """Yield the parts of a collection, or the attributes of an object, and those within them, but no plain values."""
    if isinstance(value, dict):
        parts: Iterable[Any] = value.values()
    elif isinstance(value, (list, tuple)):
        parts = value
    else:
        parts = [] if isinstance(value, (type, ModuleType, FunctionType)) else getattr(value, "__dict__", {}).values()
    for part in parts:
        if not is_atom(part):
            yield part
            if depth > 1 and not isinstance(part, (torch.Tensor, torch.nn.Module)):
                yield from _within(part, depth - 1)


def copy_all(targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
    """Copy each source into its target, without recording it for autograd."""
    if targets:
        with torch.no_grad():
            torch._foreach_copy_([t.detach() for t in targets], [s.detach() for s in sources])


def describe(handlers: Mapping[str, StateHandler]) -> dict[str, Description]:
    """Return a description of the tensors of each value."""
    out: dict[str, Description] = {}
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
) -> Any:
    """Set the values of all members to those of `root`: compare digests, then broadcast the tensors that differ.

    Returns the root's `extra`, any picklable object. `handlers` has the same names on every member. With `staged`,
    everything is received before any value is changed, so that this member's own values stay intact if the root is lost
    on the way. Raises HorovodInternalError if a peer is gone, and UsageError if the values of this member cannot hold
    the root's.
    """
    group = process_set.group()
    if group is None:
        return extra
    mine, offer = describe(handlers), None
    am_root = group.rank == process_set.set_rank_of(root)
    if am_root:
        offer = {name: (each.layout(), each.light(), each.metadata()) for name, each in handlers.items()}, mine, extra
    values, theirs, extra = broadcast_object(offer, root, process_set=process_set)
    differing = {name: _differing(mine[name], theirs[name]) for name in values}
    flags = torch.tensor([flag for name in values for flag in differing[name]], dtype=torch.uint8, device="cpu")
    if flags.numel():
        group.wait(group.allreduce(flags, Max.gloo))
    arriving: dict[str, list[torch.Tensor]] = {}
    for name, (layout, _, metadata) in values.items():
        if not am_root:
            handlers[name].prepare(layout, metadata)
        arriving[name] = _targets(handlers[name], layout, differing[name], staged)
    everything = [tensor for name in values for tensor in arriving[name]]
    broadcast_tensors([tensor for tensor, flag in zip(everything, flags, strict=True) if flag], root, process_set)
    if am_root:
        return extra
    for name, (layout, _, _) in values.items():
        if (staged or handlers[name].staged) and mine[name] != theirs[name]:
            handlers[name].fill(layout, arriving[name])
    for name, (_, light, _) in values.items():
        handlers[name].set_light(light)
    return extra


def _differing(mine: Description, theirs: Description) -> list[bool]:
    """Return, for each tensor of the root, True if this member has no equal one, or has not the same tensors."""
    own, other = dict(zip(*mine, strict=True)), dict(zip(*theirs, strict=True))
    same_tensors = own.keys() == other.keys()
    return [not same_tensors or own[key] != other[key] for key in other]


def _targets(handler: StateHandler, layout: Layout, differing: Sequence[bool], staged: bool) -> list[torch.Tensor]:
    """Return the tensors that receive the root's: new ones for those that differ, if they are copied later."""
    fresh = staged or handler.staged
    own = [] if fresh and all(differing) else handler.tensors(layout)
    return [
        torch.empty(piece.shape, dtype=piece.dtype, device="cpu") if fresh and differs else own[number]
        for number, (piece, differs) in enumerate(zip(layout, differing, strict=True))
    ]
