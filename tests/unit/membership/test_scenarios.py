"""Each script in `scenarios/` still gets the answers written down in it.

After a wanted change: `python -m tests.unit.membership.test_scenarios` writes the answers anew; read the difference.
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
