"""How settings are declared, and the settings of a job's size and timeouts.

To add a setting of `run`, declare it in `ScalingSettings`, with a field of the same name in `ElasticSettings`, through
which the driver and the membership machine read it; or in `jobs.settings.RunSettings` if only `jobs` reads it. The
signatures of `run` and `run_async`, the validation, the command line, the `run_options` of the estimators and the table
in the docs follow from the declaration.
"""

from __future__ import annotations

import dataclasses
import functools
import numbers
import operator
import re
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from spark_elastic.errors import InvalidSettingsError

DEVICE_SETTING = "SPARK_ELASTIC_DEVICE"  # the environment variable through which workers get `run(device=...)`
TRACKED_RUN = "SPARK_ELASTIC_MLFLOW_RUN"  # by this environment variable a worker knows the driver's MLflow run
LONGEST_S = 1e8  # three years: no socket and no thread can wait for an infinite time

Check = Callable[[str, Any], Any]  # (name, value) -> the value in its plain type, or InvalidSettingsError

# --- declaring settings ---------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Setting:
    """The declaration of a setting: `name: Annotated[type, Setting(...)] = default`, in a subclass of `Settings`."""

    doc: str
    check: Check = lambda _name, value: value  # of a value that is not None; of None too if the type does not allow it
    unit: str = ""
    on_command_line: bool = False
    horovod_name: str = ""  # Horovod's name of this argument: accepted by `run` with a warning, and by the command line


@dataclass(frozen=True, slots=True)
class Declaration:
    """A setting with its name, type and default, as read from a class."""

    name: str
    type: Any
    default: Any  # `dataclasses.MISSING` if the setting must be given
    setting: Setting

    @property
    def flags(self) -> tuple[str, ...]:
        """Its options of the command line; empty if it has none."""
        if not self.setting.on_command_line:
            return ()
        other = self.setting.horovod_name.replace("_", "-")
        return (
            *([f"--{other}" if len(other) > 2 else f"-{other}"] if other else []),
            f"--{self.name.replace('_', '-')}",
        )


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Base of dataclasses whose fields are settings. Validates them when an object is made."""

    def __post_init__(self) -> None:
        for each in declarations(type(self)):
            value = getattr(self, each.name)
            if value is not None or type(None) not in typing.get_args(each.type):
                # the dataclass is frozen, but the checked value replaces the given one: a plain int one of NumPy
                object.__setattr__(self, each.name, each.setting.check(each.name, value))


def declarations(cls: type[Settings]) -> tuple[Declaration, ...]:
    """Return the settings of a class, in the order of its constructor."""
    annotations = typing.get_type_hints(cls, include_extras=True)
    found = []
    for field in sorted(dataclasses.fields(cls), key=lambda field: bool(field.kw_only)):
        type_, setting = typing.get_args(annotations[field.name])
        found.append(Declaration(field.name, type_, field.default, setting))
    return tuple(found)


def count(doc: str, at_least: int, unit: str = "workers", horovod_name: str = "") -> Setting:
    """Declare a whole number."""
    return Setting(doc, functools.partial(whole_number, at_least=at_least), unit, True, horovod_name)


def seconds(doc: str) -> Setting:
    """Declare a positive number of seconds."""
    return Setting(doc, _seconds, "seconds", True)


def wrong(name: str, wanted: str, value: Any, hint: str = "") -> InvalidSettingsError:
    """Return the error for a value that is not what is wanted; the hint begins with "; "."""
    return InvalidSettingsError(f"{name} must be {wanted}, not {value!r:.200} ({type(value).__name__}){hint}")


def accepting(
    wanted: str, accepts: Callable[[Any], Any], plain: Callable[[Any], Any] = lambda value: value, hint: str = ""
) -> Check:
    """Return a check that accepts some values and makes them plain; `wanted` describes them in the error."""

    def check(name: str, value: Any) -> Any:
        if not accepts(value):
            raise wrong(name, wanted, value, hint)
        return plain(value)

    return check


boolean: Callable[[str, bool], bool] = accepting(
    "True or False", lambda value: type(value).__name__ in ("bool", "bool_"), bool
)  # numpy's too
identifier: Callable[[str, str], str] = accepting(
    "letters, digits, '_', '-', '=' and '.', not beginning with '.'",
    lambda value: isinstance(value, str) and re.fullmatch(r"[\w=-][\w.=-]*", value),
    str,
)
dictionary: Callable[[str, Mapping[str, Any]], dict[str, Any]] = accepting(
    "a dict with names as keys",
    lambda value: isinstance(value, Mapping) and all(isinstance(key, str) and key for key in value),
    dict,
)


def meant_device(value: object) -> str | None:
    """Return torch's name for a device that has another name elsewhere, or is written in capitals; None if unknown."""
    found = re.fullmatch(r"(auto|cpu)|(?:gpu|cuda|nvidia)(?::?(\d+))?", str(value).strip().lower())
    return None if found is None else found[1] or ("cuda" if found[2] is None else f"cuda:{found[2]}")


def whole_number(name: str, value: Any, at_least: int) -> int:
    """Return `value` as an int. Raise InvalidSettingsError if it is no whole number (True, 2.0), or too small."""
    try:
        if isinstance(value, bool):
            raise TypeError
        number = operator.index(value)
    except TypeError:
        raise wrong(name, "a whole number", value) from None
    if number < at_least:
        raise InvalidSettingsError(f"{name} must be at least {at_least}, not {number}")
    return number


def _seconds(name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise wrong(name, "a number of seconds", value)
    if not 0 < float(value) <= LONGEST_S:
        most = f"at most {LONGEST_S:.0f} (three years)"
        raise InvalidSettingsError(f"{name} must be a positive number of seconds and {most}, not {value}")
    return float(value)


def _restart(name: str, value: Any) -> str:
    if value != "world":
        raise wrong(name, "'world' (all workers start again after a loss, as with torchrun) or None", value)
    return "world"


def _range_of_seconds(name: str, value: Any) -> tuple[float, float]:
    if not isinstance(value, Sequence) or isinstance(value, str) or len(value) != 2:
        raise InvalidSettingsError(f"{name} must be (shortest, longest) seconds or None, not {value!r}")
    low, high = (_seconds(name, each) for each in value)
    if low > high:
        raise InvalidSettingsError(f"{name} must be (shortest, longest) seconds, not {(low, high)}; exchange the two")
    return low, high


# --- how many workers, and how long to wait for them ----------------------------------------------


@dataclass(frozen=True, kw_only=True)
class ScalingSettings(Settings):
    """How many workers a job has, and how long it waits for them.

    Raises:
        InvalidSettingsError: A value is invalid, or two contradict each other.
    """

    num_proc: Annotated[
        int | None,
        count(
            "workers to start with. Default: the task slots of the cluster; under dynamic allocation from those of its "
            "minExecutors to those of its maxExecutors.",
            1,
            horovod_name="np",
        ),
    ] = None
    min_num_proc: Annotated[
        int | None,
        count(
            "with fewer workers than this the job waits up to `elastic_timeout`, then fails. Default: `num_proc`.",
            1,
            horovod_name="min_np",
        ),
    ] = None
    max_num_proc: Annotated[
        int | None,
        count(
            "the most workers to use; it is also the demand shown to dynamic allocation. Default: `num_proc`.",
            1,
            horovod_name="max_np",
        ),
    ] = None
    start_timeout: Annotated[float, seconds("seconds that the first `min_num_proc` workers may take to be ready.")] = (
        600.0
    )
    elastic_timeout: Annotated[
        float, seconds("seconds that the job waits for workers when it has too few, keeping the state.")
    ] = 600.0
    reset_limit: Annotated[
        int | None, count("number of times that the world may be rebuilt. Default: no limit.", 0, "worlds")
    ] = None
    crash_limit: Annotated[
        int | None,
        count(
            "number of worlds in a row that may lose a crashed process before one more step is applied; then the job "
            "fails instead of starting it again. None: no limit.",
            1,
            "worlds",
        ),
    ] = 3
    cooldown_range: Annotated[
        tuple[float, float] | None,
        Setting(
            "shortest and longest pause, in seconds, before a slot that failed is used again. None (on the command "
            "line, 0 0): no pause.",
            _range_of_seconds,
            "seconds",
            True,
            "blacklist_cooldown_range",
        ),
    ] = (0.5, 60.0)
    heartbeat_timeout: Annotated[
        float,
        seconds(
            "seconds of silence after which a worker counts as hung or cut off. The death of a process is noticed "
            "without it, in milliseconds."
        ),
    ] = 30.0
    stall_timeout: Annotated[
        float,
        seconds(
            "seconds that a live worker may keep the others waiting, in a collective or on the way to the next world, "
            "before it is removed; raise it if one rank works alone for longer (a long evaluation, a slow checkpoint)."
        ),
    ] = 600.0
    restart: Annotated[
        Literal["world"] | None,
        Setting(
            '"world": a program for torchrun. Workers get its environment, and after a loss all start again as new '
            "processes (command line: `--torchrun`). Default: those that are left keep their processes.",
            _restart,
        ),
    ] = None
    restart_interval: Annotated[
        float | None,
        seconds(
            "with `restart`: seconds that a world trains before all start again to take newcomers in. Default: they "
            "wait for a loss."
        ),
    ] = None

    def __post_init__(self) -> None:
        super().__post_init__()
        order = ("num_proc", "max_num_proc"), ("min_num_proc", "num_proc"), ("min_num_proc", "max_num_proc")
        for small, large in order:
            low, high = getattr(self, small), getattr(self, large)
            if low is not None and high is not None and low > high:
                raise InvalidSettingsError(f"{small}={low} is larger than {large}={high}")
        if self.restart_interval is not None and self.restart is None:
            raise InvalidSettingsError(
                f"restart_interval={self.restart_interval:g} without restart='world': other workers take newcomers in "
                "without starting again; leave it out"
            )

    def resolve(self, bounds: Callable[[], tuple[int, int]]) -> ElasticSettings:
        """Return the settings of the driver; `bounds` is called if the number of workers is not given.

        It returns the fewest and those to start with.
        """
        low, start, high = self.min_num_proc, self.num_proc, self.max_num_proc
        if start is None and low is not None and low == high:
            start = low
        if start is None:
            least, slots = bounds()
            start = max(slots if high is None else min(slots, high), low or 1)
            low = min(least, start) if low is None else low
        given = {
            f"{each.name}_s" if each.setting.unit == "seconds" else each.name: getattr(self, each.name)
            for each in declarations(ScalingSettings)
        }
        given["num_proc"] = start
        given["min_num_proc"] = start if low is None else low
        given["max_num_proc"] = start if high is None else high
        return ElasticSettings(**given)


@dataclass(frozen=True, slots=True)
class ElasticSettings:
    """`ScalingSettings` with resolved numbers, as the driver and the machine read them. Seconds end in `_s`."""

    num_proc: int  # workers that the first world waits for
    min_num_proc: int
    max_num_proc: int
    start_timeout_s: float = ScalingSettings.start_timeout
    elastic_timeout_s: float = ScalingSettings.elastic_timeout
    start_grace_s: float = 10.0  # how long the first world waits for `num_proc` workers once `min_num_proc` are ready
    heartbeat_timeout_s: float = ScalingSettings.heartbeat_timeout
    stall_timeout_s: float = ScalingSettings.stall_timeout
    reset_limit: int | None = ScalingSettings.reset_limit
    cooldown_range_s: tuple[float, float] | None = ScalingSettings.cooldown_range
    boot_failure_limit: int = 3  # processes in a row that may exit before any worker ever joined; then the job fails
    crash_limit: int | None = ScalingSettings.crash_limit
    restart: str | None = ScalingSettings.restart
    restart_interval_s: float | None = ScalingSettings.restart_interval

    @property
    def restarts_world(self) -> bool:
        """True if all workers start again, as new processes, when their world changes."""
        return self.restart == "world"

    @property
    def driver_silence_s(self) -> float:
        """How long agents and workers continue without a message from the driver while its connection is open."""
        return max(self.elastic_timeout_s, self.heartbeat_timeout_s)

    @property
    def heartbeat_interval_s(self) -> float:
        """Seconds between two heartbeats of a worker or agent.

        Five within the timeout, at most 2 s apart; in jobs of more than 300 workers further apart, so that the driver
        gets no more than 150 a second from workers, and as many from agents, while five within the timeout allow it.
        """
        return min(self.heartbeat_timeout_s / 5, max(2.0, self.max_num_proc / 150))
