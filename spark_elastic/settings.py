"""Settings of an elastic job: frozen, in seconds, validated once at the door."""

from __future__ import annotations

import numbers
import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from spark_elastic.errors import InvalidSettingsError

DEVICE_SETTING = "SPARK_ELASTIC_DEVICE"
"""The environment variable that tells workers what `run(device=...)` asked for."""
LONGEST_S = 1e8
"""Three years. Without a bound, "never" would be infinity, and no socket and no thread can wait that long."""


@dataclass(frozen=True, slots=True)
class ElasticSettings:
    """How many workers, and how long anything may wait.

    Raises:
        InvalidSettingsError: with the offending values and what to change.
    """

    num_proc: int
    """Workers that the first world waits for."""
    min_num_proc: int
    """Below this the job waits, and fails after `elastic_timeout_s`."""
    max_num_proc: int
    """Never more workers than this; it is also the demand shown to dynamic allocation."""
    start_timeout_s: float = 600.0
    """How long the first world may take to gather `min_num_proc` ready workers."""
    elastic_timeout_s: float = 600.0
    """How long a job that fell below `min_num_proc` keeps its survivors' state and waits."""
    start_grace_s: float = 10.0
    """With `min_num_proc` ready, how long the first world still waits for `num_proc`."""
    heartbeat_timeout_s: float = 30.0
    """Silence after which an agent or a worker counts as lost. Deaths are seen in milliseconds without it."""
    stall_timeout_s: float = 600.0
    """How long a live worker may keep the others waiting, in a collective or on the way to the next world; then it is
    removed."""
    reset_limit: int | None = None
    """Worlds after the first that may be built; None: no limit."""
    cooldown_range_s: tuple[float, float] | None = (0.5, 60.0)
    """First and longest pause before a failed place is used again; None: no pause."""
    boot_failure_limit: int = 3
    """Worker processes in a row that may exit before any ever joined; then the job fails."""

    crash_limit: int | None = 3
    """Worlds in a row that may lose a crashed process before one more step is applied; then the job fails. None: no
    limit."""

    def __post_init__(self) -> None:
        for name in ("num_proc", "min_num_proc", "max_num_proc", "boot_failure_limit"):
            self._become(name, whole_number(name, getattr(self, name), at_least=1))
        if self.reset_limit is not None:
            self._become("reset_limit", whole_number("reset_limit", self.reset_limit, at_least=0))
        if self.crash_limit is not None:
            self._become("crash_limit", whole_number("crash_limit", self.crash_limit, at_least=1))
        for name in ("start_timeout_s", "elastic_timeout_s", "heartbeat_timeout_s", "stall_timeout_s"):
            self._become(name, _seconds(name, getattr(self, name), or_zero=False))
        self._become("start_grace_s", _seconds("start_grace_s", self.start_grace_s, or_zero=True))
        if self.cooldown_range_s is not None:
            self._become("cooldown_range_s", _cooldown_range(self.cooldown_range_s))

        if self.num_proc > self.max_num_proc:
            raise InvalidSettingsError(f"num_proc={self.num_proc} is larger than max_num_proc={self.max_num_proc}")
        if self.min_num_proc > self.num_proc:
            raise InvalidSettingsError(f"min_num_proc={self.min_num_proc} is larger than num_proc={self.num_proc}")

    def _become(self, name: str, value: object) -> None:
        """Put a checked value in its plain type: NumPy's numbers are welcome at the door, not behind it."""
        object.__setattr__(self, name, value)

    @property
    def driver_silence_s(self) -> float:
        """How long agents and workers go on although nothing is heard of a driver whose connection is open."""
        return max(self.elastic_timeout_s, self.heartbeat_timeout_s)

    @property
    def heartbeat_interval_s(self) -> float:
        """How often a worker or agent says it is alive: five chances within the timeout, at most every 2 s."""
        return min(self.heartbeat_timeout_s / 5, 2.0)


def whole_number(name: str, value: Any, at_least: int) -> int:
    """`value` as an int.

    Raises:
        InvalidSettingsError: it is none (True and 2.0 are none either), or too small.
    """
    try:
        if isinstance(value, bool):
            raise TypeError
        number = operator.index(value)
    except TypeError:
        raise InvalidSettingsError(f"{name} must be a whole number, not {value!r} ({type(value).__name__})") from None
    if number < at_least:
        raise InvalidSettingsError(f"{name} must be at least {at_least}, not {number}")
    return number


def _seconds(name: str, value: Any, or_zero: bool) -> float:
    what = name.removesuffix("_s")
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise InvalidSettingsError(f"{what} must be a number of seconds, not {value!r} ({type(value).__name__})")
    seconds = float(value)
    if not (0 < seconds <= LONGEST_S or (or_zero and seconds == 0)):
        sign = "not negative" if or_zero else "positive"
        raise InvalidSettingsError(
            f"{what} must be a {sign} number of seconds and at most {LONGEST_S:.0f} (three years), not {value}"
        )
    return seconds


def _cooldown_range(value: Any) -> tuple[float, float]:
    if not isinstance(value, Sequence) or isinstance(value, str) or len(value) != 2:
        raise InvalidSettingsError(f"cooldown_range must be (shortest, longest) seconds or None, not {value!r}")
    low, high = (_seconds("cooldown_range", each, or_zero=False) for each in value)
    if low > high:
        raise InvalidSettingsError(f"cooldown_range must be (shortest, longest) seconds, not {(low, high)}")
    return low, high
