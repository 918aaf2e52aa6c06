"""What a storm has cost: read from the diary of the job's workers and from the driver's events."""

from __future__ import annotations

import glob
import itertools
import statistics
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from tests.integration.spark.diary import Entry

QUIET_STEPS = 50
"""The fewest steps from which the speed without faults is taken."""
STALL_STEPS = 5
"""A gap between two steps of one world is a stall if it is longer than this many usual ones."""
COURSE_POINTS = 600
"""The points of `Verdict.course`."""


@dataclass
class Verdict:
    """What is left of a training after a storm. Times are in seconds.

    Attributes:
        steps: Steps that the training has come to.
        repeated_steps: Steps that workers applied again after an interrupted collective of the loop's own.
        lost_steps: Where a worker went back further than to its last commit, in words.
        goodput: Steps of the storm as a share of those that the speed before it would have given.
        live_goodput: The share of the storm that was not lost in stalls. It is normalised to the workers that live: see
            `live_goodput_of`.
        worst_stall_s: The longest time between one new step and the next.
        stalls_s: The time between two steps around each world that began in the storm.
        problems: What must not be, in words; empty: nothing.
        course: For a plot: seconds since the storm began, steps in the storm so far, and the workers that then train.
    """

    steps: int
    worlds: int
    repeated_steps: int
    lost_steps: list[str]
    goodput: float
    live_goodput: float
    worst_stall_s: float
    stalls_s: list[float]
    problems: list[str]
    course: list[tuple[float, int, int]]

    def document(self) -> dict[str, Any]:
        return asdict(self)


def first_times(applied: Sequence[Entry]) -> list[float]:
    """Return when each step was applied by the first worker, in the order of the steps."""
    first: dict[int, float] = {}
    for entry in applied:
        first[entry["step"]] = min(entry["at"], first.get(entry["step"], entry["at"]))
    return [first[step] for step in sorted(first)]


def repeated_steps(applied: Sequence[Entry], allowed: int) -> tuple[int, list[str]]:
    """Return how many steps were applied again, and in words where a worker went back further than `allowed` steps (0:
    the loop marks each step).
    """
    by_worker: dict[int, list[Entry]] = {}
    for entry in applied:
        by_worker.setdefault(entry["pid"], []).append(entry)
    count, lost = 0, []
    for pid, entries in by_worker.items():
        for one, next in itertools.pairwise(entries):
            back = max(0, one["step"] + 1 - next["step"])
            count += back
            if back > allowed:
                lost.append(
                    f"process {pid} was at step {one['step']} in round {one['round']}, then at step {next['step']} in "
                    f"round {next['round']}"
                )
    return count, lost


def verdict_of(
    applied: Sequence[Entry], allowed: int, worlds: int, began: float, ended: float, problems: list[str]
) -> Verdict:
    """Judge the steps of a storm that lasted from `began` to `ended` (of the monotonic clock)."""
    repeated, lost = repeated_steps(applied, allowed)
    times = first_times(applied)
    quiet = [one for one in times if one < began]
    if len(quiet) < QUIET_STEPS:
        few = f"{len(quiet)} steps before the storm; at least {QUIET_STEPS} tell the speed without faults"
        problems, speed = [*problems, few], float("inf")
    else:
        speed = 1 / statistics.median(after - before for before, after in itertools.pairwise(quiet))
    stormy = [one for one in times if began <= one <= ended]
    gaps = [after - before for before, after in itertools.pairwise(stormy)]
    rounds: dict[int, list[float]] = {}
    for entry in applied:
        rounds.setdefault(entry["round"], []).append(entry["at"])
    bounds = [(min(each), max(each)) for _, each in sorted(rounds.items())]
    stalls = [after[0] - before[1] for before, after in itertools.pairwise(bounds) if began <= after[0] <= ended]
    return Verdict(
        steps=len(times),
        worlds=worlds,
        repeated_steps=repeated,
        lost_steps=lost,
        goodput=round(len(stormy) / (speed * (ended - began)), 4),
        live_goodput=round(live_goodput_of(applied, began, ended), 4),
        worst_stall_s=round(max(gaps, default=0.0), 3),
        stalls_s=[round(max(0.0, each), 4) for each in stalls],
        problems=problems,
        course=course_of(applied, began, ended),
    )


def live_goodput_of(applied: Sequence[Entry], began: float, ended: float) -> float:
    """Return the share of a storm's time that was not lost in stalls; 0 if there was no step.

    A step is usual if it takes the median time of the steps in worlds of its size, so a world that has become smaller
    loses nothing. Of each gap between the last step of one world and the first of the next, all that exceeds a usual
    step is lost, and of each gap within a world that is longer than `STALL_STEPS` usual ones.
    """
    first: dict[int, Entry] = {}
    for entry in sorted(applied, key=lambda entry: entry["at"]):
        if began <= entry["at"] <= ended:
            first.setdefault(entry["step"], entry)
    steps = list(first.values())
    if not steps:
        return 0.0
    gaps = [(one["at"] - before["at"], before, one) for before, one in itertools.pairwise(steps)]
    by_size: dict[int, list[float]] = {}
    for gap, before, one in gaps:
        if before["round"] == one["round"]:
            by_size.setdefault(one["size"], []).append(gap)
    usual = {size: statistics.median(each) for size, each in by_size.items()}
    lost = ended - steps[-1]["at"] + steps[0]["at"] - began
    for gap, before, one in gaps:
        step = usual.get(one["size"], 0.0)
        if before["round"] != one["round"] or gap > STALL_STEPS * step:
            lost += max(0.0, gap - step)
    return 1 - lost / (ended - began)


def course_of(applied: Sequence[Entry], began: float, ended: float) -> list[tuple[float, int, int]]:
    """Return `Verdict.course` at up to `COURSE_POINTS` moments; those without a step are left out."""
    interval_s = (ended - began) / COURSE_POINTS
    course: list[tuple[float, int, int]] = []
    seen: set[int] = {entry["step"] for entry in applied if entry["at"] < began}
    before = len(seen)
    stormy = sorted((entry for entry in applied if began <= entry["at"] <= ended), key=lambda entry: entry["at"])
    for number, entries in itertools.groupby(stormy, key=lambda entry: int((entry["at"] - began) / interval_s)):
        steps = list(entries)
        seen.update(entry["step"] for entry in steps)
        newest = max(entry["round"] for entry in steps)
        size = next(entry["size"] for entry in steps if entry["round"] == newest)
        course.append((round((number + 1) * interval_s, 2), len(seen) - before, size))
    return course


def shared_files() -> set[str]:
    """Return this package's files in shared memory and in the folder for temporary files."""
    return {
        *glob.glob("/dev/shm/*spark_elastic*"),
        *glob.glob(f"{tempfile.gettempdir()}/spark_elastic*"),
        *glob.glob(f"{tempfile.gettempdir()}/spark-elastic*"),
    }
