"""The end of the outermost backward, at which optimizers reduce their gradients.

Autograd calls functions at the end of a graph, if they were added while that graph runs. A backward within another one,
as reentrant checkpointing runs it, has a graph of its own, whose end is not the end of the outermost backward.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch


class Backward:
    """A backward that has ended."""

    used = False
    """An optimizer that took part has made a step since."""


participants: dict[int, weakref.ref[Any]] = {}
"""The reducers with a gradient in the backward that runs, or that failed last, by number, which is their order."""
_awaited: weakref.WeakSet[Callable[..., None]] = weakref.WeakSet()
"""The functions that autograd holds in order to call them at the end of a graph. It drops them if backward fails."""


def await_end(reducer: Any) -> bool:
    """Let a reducer know of the end of the backward that runs; it calls this in a hook, once a graph.

    Returns True if the reducer takes part in this backward already, through another graph.
    """
    if not _awaited:
        for left in _present():
            left.backward_failed()
        participants.clear()
    known = reducer.number in participants
    participants[reducer.number] = weakref.ref(reducer)
    _add_to_graph()
    return known


def _present() -> list[Any]:
    found = [participants[number]() for number in sorted(participants)]
    return [reducer for reducer in found if reducer is not None]


def _add_to_graph() -> None:
    """Let autograd call a function at the end of the graph that runs.

    The function is called in no node if the graph is of the outermost backward, and otherwise in the node that has
    called the inner backward. There it can only wait on: autograd adds functions only to the graph that runs, so one of
    the node's next nodes adds one to the outer graph.
    """

    def ended() -> None:
        node: Any = torch._C._current_autograd_node()
        present = _present()
        if node is None:
            participants.clear()
            _awaited.clear()
            backward = Backward()
            for reducer in present:
                reducer.backward_ended(backward)
            return
        for reducer in present:
            reducer.backward_nested()
        handles: list[Any] = []

        def outer_goes_on(*_: Any) -> None:
            while handles:
                handles.pop().remove()
            _add_to_graph()

        handles += [after.register_prehook(outer_goes_on) for after, _ in node.next_functions if after is not None]
        _awaited.add(outer_goes_on)

    _awaited.add(ended)
    torch.autograd.Variable._execution_engine.queue_callback(ended)
