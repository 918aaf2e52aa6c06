"""Replay each script in `scenarios/` and compare the machine's answers with those in the script.

After an intended change: `python -m tests.unit.membership.test_scenarios` rewrites the answers; review the difference.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.unit.membership.script import replay

SCENARIOS = sorted((Path(__file__).parent / "scenarios").glob("*.txt"))


@pytest.mark.parametrize("path", SCENARIOS, ids=lambda path: path.stem)
def test_scenario(path: Path) -> None:
    assert replay(path.read_text()) == path.read_text()


if __name__ == "__main__":
    for scenario in SCENARIOS:
        scenario.write_text(replay(scenario.read_text()))
