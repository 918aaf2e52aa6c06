"""Collectives on tensors of a GPU that go through this host's memory: what Gloo and shared memory can take."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


class HostWork:
    """A collective on copies. `bring_back` is called once `inner` is done.

    inner: what was launched on the copies.
    """

    def __init__(self, inner: Any, bring_back: Callable[[], None]) -> None:
        self.inner = inner
        self.bring_back = bring_back

    def is_completed(self) -> bool:
        return bool(self.inner.is_completed())


def is_elsewhere(*tensors: torch.Tensor) -> bool:
    return any(tensor.device.type != "cpu" for tensor in tensors)


def launch(collective: Callable[..., Any], result: torch.Tensor, *inputs: torch.Tensor) -> HostWork:
    """Call `collective` with copies of the tensors, the result's first; its copy becomes `result` in the end."""
    copies = [_copy(tensor) for tensor in (result, *inputs)]
    work = collective(*copies)
    return HostWork(work, lambda: _copy_back(result, copies[0]))


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().to("cpu", copy=True)


def _copy_back(result: torch.Tensor, copy: torch.Tensor) -> None:
    result.copy_(copy)
