"""The framework-independent part of virtual workers: one shard of a batch, and what the bits of a result depend on."""

from __future__ import annotations

import logging
import platform
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from spark_elastic.collective.objects import allgather_object
from spark_elastic.errors import UsageError

Environment = dict[str, str]


class VirtualShard:
    """The part of a batch that one virtual worker computes.

    Attributes:
        index: The number of the virtual worker.
        start: The position of its first row in the batch.
        stop: The position behind its last row.
        numbers: The shard's summands, a row of a float64 matrix.
    """

    def __init__(self, index: int, start: int, stop: int, names: Mapping[str, int], numbers: Any) -> None:
        self.index, self.start, self.stop = index, start, stop
        self.numbers = numbers
        self._names = names

    @property
    def rows(self) -> slice:
        """The slice of the batch that has this shard's rows."""
        return slice(self.start, self.stop)

    def __len__(self) -> int:
        return self.stop - self.start

    def add(self, name: str, value: Any) -> None:
        """Add a number, or a tensor with one, to the sum of that name over all shards of the virtual workers."""
        if name not in self._names:
            raise UsageError(
                f"{name!r} is not one of the sums of these virtual workers ({', '.join(self._names) or 'none'}); name "
                "it in virtual_workers(..., sums=[...]), which is the same on all workers"
            )
        self.numbers[self._names[name]] += float(value.detach() if hasattr(value, "detach") else value)


class EnvironmentCheck:
    """Warns, once for each difference, where the bits of a result may differ because environments do.

    Args:
        environment: What the bits depend on besides the program and its data, in this process.
        log: The logger of the warnings.
    """

    def __init__(self, environment: Environment, log: logging.Logger) -> None:
        self.environment = environment
        self._log = log
        self._warned: set[str] = set()

    def compare_members(self) -> None:
        """Compare the environments of all members; a collective."""
        everyone = allgather_object(self.environment)
        for rank, other in enumerate(everyone):
            if self._is_new(different := differences(everyone[0], other, was="there it is")):
                self._log.warning(
                    "the result may depend on which worker computes which shard: rank %d differs from rank 0: %s. Use "
                    "machines and versions that are alike",
                    rank,
                    different,
                )

    def compare(self, then: Mapping[str, str]) -> None:
        """Compare with the environment in which the training was begun."""
        if self._is_new(different := differences(then, self.environment)):
            self._log.warning(
                "from here on, the result may differ in some bits from that of an uninterrupted training: %s", different
            )

    def _is_new(self, different: str) -> bool:
        new = bool(different) and different not in self._warned
        self._warned.add(different)
        return new


def check_same_training(state: Mapping[str, Any], count: int, seed: int) -> None:
    """Raise UsageError if the training that is continued had other virtual workers, or another seed."""
    for name, now in (("count", count), ("seed", seed)):
        if state[name] != now:
            raise UsageError(
                f"the training was begun with {name}={state[name]} of its virtual workers, and {name} is {now} "
                "now, which gives another result; use the same"
            )


def processor() -> str:
    """Return the name of this host's processor."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())


def differences(then: Mapping[str, str], now: Mapping[str, str], was: str = "was") -> str:
    """Return in words what differs between two environments, with `was` before the first one's; "" if nothing does."""
    names = [name for name in {**then, **now} if then.get(name) != now.get(name)]
    return ", ".join(f"{name} is {now.get(name, 'not set')}, and {was} {then.get(name, 'not set')}" for name in names)
