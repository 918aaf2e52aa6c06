"""The faults of a storm are those of its seed, and its judge sees what must not be."""

from __future__ import annotations

import os
from typing import Any

import pytest

from tests.storms import chaos_faults as faults
from tests.storms import chaos_judge as judge


def steps(pid: int, numbers: list[int], *, round: int = 1, at: float = 0.0, size: int = 2) -> list[dict[str, Any]]:
    """A step each tenth of a second."""
    entry = {"pid": pid, "round": round, "size": size}
    return [{**entry, "step": number, "at": at + 0.1 * i} for i, number in enumerate(numbers)]


def test_a_fault_depends_on_seed_and_number_alone() -> None:
    kinds = faults.kinds_on("standalone")
    one = [faults.fault_of(7, number, kinds, 0.5) for number in range(1, 50)]
    assert one[40] == faults.fault_of(7, 41, kinds, 0.5)
    assert one != [faults.fault_of(8, number, kinds, 0.5) for number in range(1, 50)]
    assert all(0 <= fault.gap_s <= 2.0 for fault in one)


def test_every_kind_of_fault_is_drawn_where_it_can_be_done() -> None:
    for site in ("processes", "standalone", "namespaces"):
        kinds = faults.kinds_on(site)
        drawn = {faults.fault_of(1, number, kinds, 0.5).kind for number in range(1, 600)}
        assert drawn == {name for name, kind in faults.FAULTS.items() if site in kind.on and kind.possible()}
    assert "kill executor" not in faults.kinds_on("processes")
    assert "link down long" not in faults.kinds_on("standalone")


def test_steps_that_a_survivor_applies_again_are_seen() -> None:
    applied = [*steps(1, [1, 2, 3, 4]), *steps(1, [4, 5], round=2, at=1.0), *steps(2, [1, 2, 3])]
    assert judge.repeated_steps(applied, allowed=1) == (1, [])
    assert judge.repeated_steps(applied, allowed=0) == (
        1,
        ["process 1 was at step 4 in round 1, then at step 4 in round 2"],
    )


def test_steps_that_only_dead_workers_had_applied_are_not_lost() -> None:
    applied = [*steps(1, [1, 2, 3, 4]), *steps(2, [1, 2, 3]), *steps(2, [4, 5], round=2, at=1.0)]
    assert judge.repeated_steps(applied, allowed=0) == (0, [])


def test_goodput_is_the_share_of_the_steps_that_the_speed_before_would_have_given() -> None:
    quiet = steps(1, list(range(60)))
    stormy = steps(1, list(range(60, 110)), round=2, at=10.0)
    verdict = judge.verdict_of([*quiet, *stormy], 0, 2, 6.5, 16.5, [])
    assert verdict.goodput == pytest.approx(0.5)
    assert verdict.stalls_s == [pytest.approx(4.1)]
    assert verdict.steps == 110
    assert verdict.lost_steps == []


def test_live_goodput_counts_the_stalls_alone() -> None:
    stormy = [
        *steps(1, list(range(10)), at=0.0, size=3),
        *steps(1, list(range(10, 30)), round=2, at=2.0, size=2),  # 1.1 s after the last step, of which 0.1 s is usual
        {"pid": 1, "step": 30, "round": 2, "size": 2, "at": 4.9},  # 1.0 s, of which 0.1 s is usual
    ]
    assert judge.live_goodput_of(stormy, 0.0, 5.0) == pytest.approx(1 - (1.0 + 0.9 + 0.1) / 5.0)
    assert judge.live_goodput_of([], 0.0, 5.0) == 0.0


def test_course_tells_the_steps_of_the_storm_and_the_size_of_its_newest_world() -> None:
    quiet = steps(1, list(range(60)))
    stormy = [*steps(1, [60, 61], round=2, at=6.5, size=3), *steps(1, [61, 62], round=3, at=12.5, size=1)]
    course = judge.course_of([*quiet, *stormy], 6.45, 16.45)
    assert course[0][1:] == (1, 3)
    assert course[-1][1:] == (3, 1)
    assert all(0 < at <= 10 for at, _, _ in course)
    assert len(course) == 4  # moments without a step are left out


def test_too_few_steps_before_the_storm_are_a_problem_beside_the_others() -> None:
    verdict = judge.verdict_of(steps(1, list(range(10))), 0, 1, 5.0, 6.0, ["it hangs"])
    assert verdict.problems == [
        "it hangs",
        "10 steps before the storm; at least 50 tell the speed without faults",
    ]
    assert verdict.goodput == 0.0


class Reads:
    """A diary that has one more entry with each reading."""

    def __init__(self, *entries: dict[str, Any]) -> None:
        self._later = list(entries)
        self.entries: list[dict[str, Any]] = []

    def read(self) -> list[dict[str, Any]]:
        self.entries += self._later[:1]
        del self._later[:1]
        return self.entries


def test_a_newcomer_that_begins_to_train_as_it_is_chosen_is_not_struck() -> None:
    me = os.getpid()
    up, applied = {"pid": me, "what": "up"}, {"pid": me, "what": "applied"}
    site = faults.Site(Reads(up), 4.0)
    assert site.claim_newcomer({me}) is None
    assert site.claim_newcomer(set()) == me
    assert site.is_struck(me)
    site = faults.Site(Reads(up, applied), 4.0)
    assert site.claim_newcomer(set()) is None
    assert not site.is_struck(me)


def test_a_newcomer_is_claimed_by_one_fault_only() -> None:
    me = os.getpid()
    site = faults.Site(Reads({"pid": me, "what": "up"}, {"pid": 1, "what": "other"}), 4.0)
    site.diary.read()
    assert site.claim_newcomer(set()) == me
    assert site.claim_newcomer(set()) is None
