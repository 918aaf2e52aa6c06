"""The job of one seed, and what happens to it."""

from __future__ import annotations

from dataclasses import dataclass

from spark_elastic.settings import ElasticSettings


@dataclass(frozen=True)
class Plan:
    """The job of one seed, and its failures."""

    settings: ElasticSettings
    steps: int
    commit_every: int
    turns: float
    """The share of collectives that change the state without a step."""
    loops: int
    """Elastic loops, one after the other, of `steps` each."""
    plain: bool
    no_init: bool
    """A plain function that never asks for a world."""
    come_back: float
    """The probability that a lost executor is replaced."""
    hosts: int
    cores: int
    faults: tuple[tuple[float, str], ...]
    raises_at: int | None
    boot_crash: float
    boot_hang: float
    end_s: float
    """The longest that a worker works alone, before and after each collective that follows the loop."""
    collectives_at_the_end: int
    deaths_at_the_end: tuple[float, ...]
    """When workers are killed, in seconds after the last loop has first returned."""
    unlucky: float
    """The probability that a worker is killed right after the driver decided something about it."""
    poison_at: int | None = None
    """The step in which a process crashes, each time."""
    poison_host: str | None = None
    """The host on which it crashes; None: any."""
    poison_exit: int = -11
    unequal: bool = False
    """Rank 0 of each world of several makes one step less than the others."""
    restarts: bool = False
    """A plain function whose workers all start again with each world: `restart="world"`."""
    limit_s: float = 5000.0
