from __future__ import annotations

import pytest

from spark_elastic.membership.states import PHASES, WORKERS, Phase, WorkerState


def test_every_state_has_a_meaning_and_can_be_reached() -> None:
    for table in (PHASES, WORKERS):
        first, *others = table.meaning
        assert {after for _, after in table.transitions} == set(others), table.name
        assert first not in {after for _, after in table.transitions}


def test_the_end_of_a_job_is_final() -> None:
    assert PHASES.leaving(Phase.FINISHED) == PHASES.leaving(Phase.FAILED) == {}
    assert WORKERS.leaving(WorkerState.GONE) == {}


def test_a_transition_that_is_not_in_the_table_is_refused() -> None:
    with pytest.raises(RuntimeError, match="phase: no transition from FINISHED to RUNNING"):
        PHASES.check(Phase.FINISHED, Phase.RUNNING)
