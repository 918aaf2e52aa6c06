"""`make test-matrix`: its oldest row is what the package promises, and its checks exist."""

from __future__ import annotations

import importlib.util
import re
import sys
from types import ModuleType

import pytest

from tests.pages import ROOT


@pytest.fixture(scope="module")
def matrix() -> ModuleType:
    sys.path.insert(0, str(ROOT / "scripts"))  # as when it is run
    spec = importlib.util.spec_from_file_location("version_matrix", ROOT / "scripts" / "test_matrix.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # where dataclasses looks for the names of its annotations
    spec.loader.exec_module(module)
    sys.path.remove(str(ROOT / "scripts"))
    return module


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
