"""What finished workers and finished loops returned."""

from __future__ import annotations

import pytest

from spark_elastic.driver.results import JobResults, LoopResults
from spark_elastic.errors import ResultError
from spark_elastic.membership.launcher import LaunchEnd
from spark_elastic.membership.reasons import LossCause, LossKind, reported
from spark_elastic.membership.states import AgentOutcome
from spark_elastic.wire.messages import LoopResult

KILLED = reported("executor 3 was killed")


def arrived(of: dict[int, bytes], lost: dict[int, LossCause]) -> JobResults:
    """Workers 5, 6, 7 of slots 0, 1, 2 had finished, with ranks in that order."""
    out = JobResults()
    out.expect((5, 6, 7), {0: 5, 1: 6, 2: 7})
    for slot, result in of.items():
        out.slot_ended(LaunchEnd(slot, reported("returned"), AgentOutcome(5 + slot, result, "returned")))
    for slot, cause in lost.items():
        out.slot_ended(LaunchEnd(slot, cause))
    return out


def test_results_come_by_rank():
    assert arrived({2: b"c", 0: b"a", 1: b"b"}, {}).in_rank_order() == [b"a", b"b", b"c"]


def test_lost_result_is_an_error_and_not_a_shorter_list():
    with pytest.raises(ResultError, match="the results of ranks 0, 2 were lost on their way: executor 3 was killed"):
        arrived({1: b"b"}, {0: KILLED, 2: KILLED}).in_rank_order()


def test_results_that_are_all_lost_are_an_error():
    with pytest.raises(ResultError, match="none of their results arrived: its slot did not end in time"):
        arrived({}, {}).in_rank_order()


def test_result_that_spark_refused_for_its_size_is_reported_with_the_remedy():
    refused = LossCause(LossKind.RESULT_TOO_BIG, detail="a result is too big for Spark; raise the limit")
    with pytest.raises(ResultError, match="2 of 3 results did not arrive: a result is too big for Spark; raise"):
        arrived({1: b"b"}, {0: refused, 2: KILLED}).in_rank_order()


def test_newcomer_that_skips_loops_gets_their_results_also_late_ones():
    loops = LoopResults()
    first, second, third = (LoopResult(number, "", b"r%d" % number) for number in (1, 2, 3))
    assert loops.offered(first) == []
    assert loops.for_newcomer(8, 1) == []
    assert loops.for_newcomer(9, 3) == [first]
    assert loops.offered(second) == [9]
    assert loops.offered(third) == []
    loops.joined([9])
    assert loops.offered(second) == []


def test_size_of_loop_results_is_limited():
    loops = LoopResults()
    loops.offered(LoopResult(1, "", bytes(40 << 20)))
    loops.offered(LoopResult(2, "", bytes(40 << 20)))
    (one, two) = loops.for_newcomer(4, 3)
    assert (one.problem, two.payload) == ("", b"")
    assert "larger than 64 MiB together" in two.problem
