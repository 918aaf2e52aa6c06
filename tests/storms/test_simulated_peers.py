"""A few simulated peers and a real driver: they are assembled, and regroup after each loss."""

from __future__ import annotations

from typing import Any

import pytest


@pytest.fixture
def measure(monkeypatch: pytest.MonkeyPatch) -> Any:
    from tests.pages import ROOT

    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    from benchmarks.control_plane import measure

    return measure


@pytest.mark.nightly
def test_simulated_peers_are_assembled_and_regroup_after_each_loss(measure: Any) -> None:
    run = measure(12, 4, 0.1, 3)
    assert run["size"] == 12
    assert len(run["losses"]) == 4
    assert run["refused"] == 0
