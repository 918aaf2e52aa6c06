"""The benchmark of the control plane works: a few simulated peers, a real driver."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def benchmark():
    folder = str(ROOT / "benchmarks")
    sys.path.insert(0, folder)
    try:
        yield importlib.import_module("control_plane")
    finally:
        sys.path.remove(folder)


def test_simulated_peers_are_assembled_and_regroup_after_each_loss(benchmark):
    run = benchmark.measure(12, 6, 0.1, 5)
    assert run["size"] == 12
    assert len(run["losses"]) == 6
    assert all(loss["s"] > 0 and loss["driver_cpu_s"] > 0 for loss in run["losses"])
    # two connections of each survivor: a cut, the world and the addresses of its members
    assert all(6 * 1000 < loss["bytes"] < 11 * 6000 for loss in run["losses"])
    assert run["refused"] == 0


def test_every_event_of_the_machine_is_measured(benchmark):
    costs = benchmark.machine_costs(24)
    assert len(costs) > 12
    assert min(costs.values()) > 0


def test_exponent_is_fitted_from_thirty_workers_on(benchmark):
    assert benchmark.exponent([(10, 1e6), (30, 90.0), (100, 1000.0), (300, 9000.0)]) == pytest.approx(2.0, abs=0.03)
    assert benchmark.exponent([(10, 1.0), (30, 2.0)]) is None
