import importlib.util
import json
import sys
from pathlib import Path

import pytest

PATH = Path(__file__).parents[2] / "benchmarks" / "_harness.py"


@pytest.fixture(scope="module")
def harness():
    spec = importlib.util.spec_from_file_location("harness", PATH)
    module = importlib.util.module_from_spec(spec)

    sys.modules["harness"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    yield module
    del sys.modules["harness"]


@pytest.mark.parametrize(
    ("count", "share", "expected"), [(100, 0.99, 99), (101, 0.99, 100), (50, 0.99, 50), (10, 0.9, 9), (1, 0.5, 1)]
)
def test_a_percentile_is_never_kinder_than_what_was_measured(harness, count, share, expected):
    assert harness.percentile(list(range(count, 0, -1)), share) == expected


def test_a_target_is_reached_only_if_every_bound_holds(harness):
    values = [100, 120, 600]
    assert harness.Series("x", values, "ms", target_p50=150).reached() is True
    assert harness.Series("x", values, "ms", target_p50=150, target_p99=500).reached() is False
    assert harness.Series("x", values, "ms").reached() is None


def test_a_report_has_the_figures_the_machine_and_the_raw_values(harness, tmp_path, capsys):
    args = harness.parser("about").parse_args(["--results", str(tmp_path)])
    path = harness.report("probe", args, harness.Series("3 -> 2", [1.0, 2.0], "ms", target_p50=5), raw={"x": [1]})
    written = json.loads(path.read_text())
    assert (written["series"][0]["p50"], written["series"][0]["max"], written["raw"]) == (1.5, 2.0, {"x": [1]})
    assert written["machine"]["cores"] >= 1
    assert "| 3 -> 2 | 2 |" in capsys.readouterr().out
