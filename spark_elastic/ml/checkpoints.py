"""Durable checkpoints: written in the background, complete or not there at all."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from spark_elastic.data.store import Store


@dataclass(frozen=True, slots=True)
class CheckpointFacts:
    """What is known of a complete checkpoint without loading it."""

    name: str
    step: int
    epoch: int
    position: int
    value: float | None = None


class Checkpoints:
    """The checkpoints of a run, in a folder of a store."""

    def __init__(self, store: Store) -> None:
        self.store = store

    def complete(self) -> list[CheckpointFacts]:
        """Those that can be loaded, oldest first."""
        raise NotImplementedError

    def latest(self) -> CheckpointFacts | None:
        """The newest that can be loaded; `TorchTraining.resume_from` is its name."""
        raise NotImplementedError

    def best(self) -> CheckpointFacts | None:
        raise NotImplementedError

    def load(self, name: str) -> dict[str, Any]:
        """Raises: CheckpointError: missing, cut off or damaged."""
        raise NotImplementedError
