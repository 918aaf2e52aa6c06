"""Settings of an elastic job: frozen, in seconds, validated once at the door."""

from __future__ import annotations

from dataclasses import dataclass

from spark_elastic.errors import InvalidSettingsError


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

    def __post_init__(self) -> None:
        if self.num_proc < 1:
            raise InvalidSettingsError(f"num_proc must be at least 1, not {self.num_proc}")
        if self.min_num_proc < 1:
            raise InvalidSettingsError(f"min_num_proc must be at least 1, not {self.min_num_proc}")
        if self.min_num_proc > self.max_num_proc:
            raise InvalidSettingsError(
                f"min_num_proc={self.min_num_proc} is larger than max_num_proc={self.max_num_proc}"
            )
        if not self.min_num_proc <= self.num_proc <= self.max_num_proc:
            raise InvalidSettingsError(
                f"num_proc={self.num_proc} must lie between min_num_proc={self.min_num_proc} "
                f"and max_num_proc={self.max_num_proc}"
            )
        for name in ("start_timeout_s", "elastic_timeout_s", "heartbeat_timeout_s", "stall_timeout_s"):
            value = getattr(self, name)
            if not value > 0:
                raise InvalidSettingsError(
                    f"{name.removesuffix('_s')} must be a positive number of seconds, not {value}"
                )
        if self.start_grace_s < 0:
            raise InvalidSettingsError(f"start_grace must not be negative, not {self.start_grace_s}")
        if self.reset_limit is not None and self.reset_limit < 0:
            raise InvalidSettingsError(f"reset_limit must be None or at least 0, not {self.reset_limit}")
        if self.boot_failure_limit < 1:
            raise InvalidSettingsError(f"boot_failure_limit must be at least 1, not {self.boot_failure_limit}")
        if self.cooldown_range_s is not None:
            low, high = self.cooldown_range_s
            if not 0 < low <= high:
                raise InvalidSettingsError(
                    f"cooldown_range must be (shortest, longest) seconds, 0 < shortest <= longest, not {(low, high)}"
                )

    @property
    def heartbeat_interval_s(self) -> float:
        """How often a worker or agent says it is alive: five chances within the timeout, at most every 2 s."""
        return min(self.heartbeat_timeout_s / 5, 2.0)
