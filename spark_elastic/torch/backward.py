"""The end of the outermost backward, at which optimizers reduce their gradients.

Autograd calls functions at the end of a graph, if they were added while that graph runs. A backward within another one,
as reentrant checkpointing runs it, has a graph of its own, whose end is not the end of the outermost backward.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, Protocol

import torch


class Backward:
    """A backward that has ended.

    Attributes:
        used: An optimizer that took part has made a step since.
    """

    used = False


class Participant(Protocol):
    """An object that is told of the backward passes in which it computes a gradient."""

    number: int
    """Participants are called in the order of their numbers."""

    def backward_ended(self, backward: Backward) -> None:
        """The outermost backward has ended. An error is raised to the caller of backward."""

    def backward_nested(self) -> None:
        """A backward has ended within another one, which still runs."""

    def backward_failed(self) -> None:
        """The last backward has not ended, because it raised an error; called when the next one begins."""


_participants: dict[int, weakref.ref[Any]] = {}
"""The participants of the backward that runs, or that failed last, by number."""
_awaited: weakref.WeakSet[Callable[..., None]] = weakref.WeakSet()
"""The functions that autograd holds in order to call them at the end of a graph. It drops them if backward fails."""


def await_end(participant: Participant) -> bool:
    """Let `participant` know of the end of the backward that runs; call it in a hook, once in each graph.

    Returns:
        True if the participant takes part in this backward already, through another graph.
    """
    if not _awaited:
        for left in _present():
            left.backward_failed()
        _participants.clear()
    known = participant.number in _participants
    _participants[participant.number] = weakref.ref(participant)
    _add_to_graph()
    return known


def has_not_ended_for(participant: Participant) -> bool:
    """Return True if a backward of this participant was noticed, and its end was not."""
    return participant.number in _participants


def forget(participant: Participant) -> None:
    _participants.pop(participant.number, None)


def _present() -> list[Participant]:
    found = [_participants[number]() for number in sorted(_participants)]
    return [participant for participant in found if participant is not None]


def _add_to_graph() -> None:
    """Let autograd call a function at the end of the graph that runs.

    The function is called in no node if the graph is of the outermost backward, and otherwise in the node that has
    called the inner backward. There it can only wait on: autograd adds functions only to the graph that runs, so one of
    the node's next nodes adds one to the outer graph.
    """

    def ended() -> None:
        node: Any = torch._C._current_autograd_node()
        participants = _present()
        if node is None:
            _participants.clear()
            _awaited.clear()
            backward = Backward()
            for participant in participants:
                participant.backward_ended(backward)
            return
        for participant in participants:
            participant.backward_nested()
        handles: list[Any] = []

        def outer_goes_on(*_: Any) -> None:
            while handles:
                handles.pop().remove()
            _add_to_graph()

        handles += [after.register_prehook(outer_goes_on) for after, _ in node.next_functions if after is not None]
        _awaited.add(outer_goes_on)

    _awaited.add(ended)
    torch.autograd.Variable._execution_engine.queue_callback(ended)
