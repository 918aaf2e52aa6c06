"""`make test-matrix`: its rows, what is installed for them, and what is recorded. The rows themselves take minutes."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest

from tests.integration.processes import wait_until
from tests.pages import ROOT

CONSTRAINTS = (
    "torch==2.13.0\npyspark==4.3.0; python_version >= '3.11'\nnumpy>=2,<3\nnumpy==2.4.6\npandas==2.3.3  # why\n"
)


@pytest.fixture(scope="module")
def matrix() -> ModuleType:
    spec = importlib.util.spec_from_file_location("version_matrix", ROOT / "scripts" / "test_matrix.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # where dataclasses looks for the names of its annotations
    spec.loader.exec_module(module)
    return module


def test_row_changes_the_pins_that_it_names_and_keeps_the_others(matrix: ModuleType) -> None:
    row = matrix.Row("about", pins={"pyspark": "3.5.0", "numpy": None})
    made = matrix.constraints_of(row, CONSTRAINTS, "2.13.0+cpu").splitlines()
    assert made == ["pandas==2.3.3  # why", "pyspark==3.5.0", "torch==2.13.0+cpu"]


def test_pins_of_newer_pythons_do_not_hold_for_an_older_one(matrix: ModuleType) -> None:
    text = 'numpy==2.4.6; python_version >= "3.11"\nkeras==3.15.1\n'
    assert matrix.default_pins(text, "3.12") == {"numpy": "2.4.6", "keras": "3.15.1"}
    assert matrix.default_pins(text, "3.10") == {"keras": "3.15.1"}


def test_torch_is_only_taken_as_a_cpu_build(matrix: ModuleType) -> None:
    rows = matrix.ROWS.values()
    assert {matrix.torch_of(row, (ROOT / "constraints.txt").read_text()).rpartition("+")[2] for row in rows} == {"cpu"}
    assert "torch" not in matrix.constraints_of(matrix.Row("about"), CONSTRAINTS, None)


def test_oldest_row_has_the_lower_bounds_of_the_metadata(matrix: ModuleType) -> None:
    metadata = (ROOT / "pyproject.toml").read_text()
    bounds: dict[str, str] = {}
    for name, version in re.findall(r'"([a-z]+)>=([\d.]+)', metadata):
        bounds.setdefault(name, version)
    for name in ("torch", "pyspark", "numpy", "pandas", "pyarrow", "cloudpickle", "tqdm", "keras", "tensorflow"):
        pinned = matrix.OLDEST["tensorflow-cpu" if name == "tensorflow" else name]
        assert f"{pinned}.".startswith(f"{bounds[name]}."), (name, pinned, bounds[name])


def test_tests_and_programs_of_the_checks_exist(matrix: ModuleType) -> None:
    for check in matrix.CHECKS.values():
        for test in check.tests:
            path, _, name = test.partition("::")
            assert (ROOT / path).exists(), test
            assert not name or f"def {name}(" in (ROOT / path).read_text(), test
        assert all((ROOT / program).exists() for program in check.program[:1])
        assert bool(check.tests) != bool(check.program)


def test_check_that_lacks_a_package_or_a_newer_spark_is_not_run(matrix: ModuleType) -> None:
    check = matrix.Check("about", tests=("x",), needs=("torch", "grpcio"), oldest_spark=(4, 0))
    assert matrix.why_not(check, {"pyspark": "3.5.9"}, False) == "no torch, grpcio"
    assert matrix.why_not(check, {"pyspark": "3.5.9", "grpcio": "1"}, True) == "needs a newer Spark"
    assert matrix.why_not(check, {"pyspark": "4.0.1", "grpcio": "1", "torch": "2"}, False) == ""


def check_of(matrix: ModuleType, tmp_path: Path, code: str):
    program = tmp_path / "program.py"
    program.write_text(code)
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "python").symlink_to(sys.executable)
    return matrix.Check("about", program=(str(program),)), matrix.Environment(tmp_path), tmp_path / "log"


def test_failed_check_is_told_from_one_that_passed_and_leaves_no_folder(matrix: ModuleType, tmp_path: Path) -> None:
    code = "import os, sys; print(os.environ['TMPDIR']); sys.exit('no such thing')"
    check, environment, log = check_of(matrix, tmp_path, code)
    assert not matrix.run_check(check, environment, log)
    said = log.read_text().split("\n")
    assert sorted(said)[-1] == "no such thing" or "no such thing" in said
    (folder,) = [line for line in said if "matrix-" in line]
    assert not Path(folder).exists()


def test_processes_that_a_check_leaves_behind_are_ended(matrix: ModuleType, tmp_path: Path) -> None:
    code = "import subprocess, sys; print(subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)']).pid)"
    check, environment, log = check_of(matrix, tmp_path, code)
    assert matrix.run_check(check, environment, log)
    left = int(log.read_text())
    wait_until(lambda: not is_running(left), 10.0, "the process that was left behind has ended")


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_recorded_outcomes_replace_their_own_and_keep_the_others(matrix: ModuleType, tmp_path: Path) -> None:
    path = tmp_path / "versions.json"
    known = {"python": "3.11.7", "versions": {"pyspark": "4.0.5"}, "remarks": []}
    matrix.record(path, "spark40", known, "data", "failed")
    matrix.record(path, "spark35", known, "keras", "no keras")
    matrix.record(path, "spark40", known, "torch", "passed")
    matrix.record(path, "spark40", known, "data", "passed")
    rows = json.loads(path.read_text())["rows"]
    assert list(rows) == ["spark35", "spark40"]
    assert rows["spark40"]["checks"] == {"torch": "passed", "data": "passed"}
    assert rows["spark35"]["checks"] == {"keras": "no keras"}


def test_outcomes_of_other_versions_do_not_stay(matrix: ModuleType, tmp_path: Path) -> None:
    path = tmp_path / "versions.json"
    known = {"python": "3.11.7", "versions": {"pyspark": "4.0.4"}, "remarks": []}
    matrix.record(path, "spark40", known, "data", "passed")
    matrix.record(path, "spark40", {**known, "versions": {"pyspark": "4.0.5"}}, "torch", "passed")
    assert json.loads(path.read_text())["rows"]["spark40"]["checks"] == {"torch": "passed"}


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["spark34"], "no row is named spark34; there are spark35, "),
        (["--only", "speed"], "no check is named speed; there are imports, "),
        (["--python", "3.12"], "--python 3.12 is not of the form 3.12=/path"),
    ],
)
def test_wrong_words_are_refused_before_anything_is_installed(
    matrix: ModuleType, words: list[str], said: str, tmp_path: Path
) -> None:
    with pytest.raises(matrix.MatrixError, match=re.escape(said)):
        matrix.main([*words, "--cache", str(tmp_path / "cache")])
    assert not (tmp_path / "cache").exists()


def test_python_that_is_not_there_is_named(matrix: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    matrix.ROWS["none"] = dataclasses.replace(matrix.ROWS["spark43"], python="3.99")
    try:
        assert matrix.main(["none", "--cache", str(tmp_path)]) == 1
    finally:
        del matrix.ROWS["none"]
    assert "no Python 3.99 was found; name one: --python 3.99=/path/to/python3.99" in capsys.readouterr().out
