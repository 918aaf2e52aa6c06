from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from spark_elastic.core.states import PHASES, WORKERS, Phase, WorkerState

DOCS = Path(__file__).parents[3] / "docs"


def test_the_generated_parts_of_the_protocol_page_are_up_to_date() -> None:
    spec = importlib.util.spec_from_file_location("docs_generate", DOCS / "generate.py")
    assert spec is not None
    assert spec.loader is not None
    generate = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(generate)
    page = (DOCS / "protocol.md").read_text()
    assert generate.generated(page) == page, "run: python docs/generate.py"
    for part in generate.Part:
        assert f"<!-- generated: {part.value} -->" in page


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
