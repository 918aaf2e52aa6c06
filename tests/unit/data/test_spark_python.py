"""The check of the Python that Spark is to start on this machine."""

from __future__ import annotations

import importlib
import itertools
import json
import pickle
import sys
import threading
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import cloudpickle
import pytest

from spark_elastic.data import spark_python
from spark_elastic.data.spark_python import _check_program, check_modules, choose_python, modules_in
from spark_elastic.errors import ExecutorPythonError, NotPicklableError


def program(folder: Path, *commands: str) -> str:
    path = folder / "python"
    path.write_text("#!/bin/sh\n" + "\n".join(commands))
    path.chmod(0o755)
    return str(path)


def test_a_python_that_prints_a_banner_is_accepted(tmp_path: Path) -> None:
    _check_program(program(tmp_path, "echo welcome to this cluster", f'exec {sys.executable} "$@"'))


def test_a_bare_python_with_a_banner_is_refused_with_its_own_path_and_version(tmp_path: Path) -> None:
    bare = program(tmp_path, "echo welcome", f'exec {sys.executable} -S "$@"')
    with pytest.raises(ExecutorPythonError, match=r"python\S* \(3\.\d+\.\d+\).*it has no "):
        _check_program(bare)


def test_a_program_that_is_no_python_is_named(tmp_path: Path) -> None:
    with pytest.raises(ExecutorPythonError, match="it cannot be run"):
        _check_program(program(tmp_path, "exit 3"))


# --- the choice in local mode -----------------------------------------------------------------------

numbers = itertools.count()


@dataclass
class Context:
    """A SparkContext of a local master, as far as the choice looks at it."""

    pythonExec: str
    _conf: dict[str, str] = field(default_factory=dict)
    master: str = "local[2]"
    applicationId: str = field(default_factory=lambda: f"local-{next(numbers)}")


@pytest.fixture
def bare(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Let PATH begin with a python3 that has no packages."""
    path = Path(program(tmp_path, f'exec {sys.executable} -S "$@"')).rename(tmp_path / "python3")
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.delenv("PYSPARK_PYTHON", raising=False)
    return str(path)


def test_a_setting_that_pyspark_ignores_is_not_taken_for_a_choice(bare: str) -> None:
    context = Context("python3", {"spark.pyspark.python": sys.executable})
    choose_python(context)
    assert context.pythonExec == sys.executable


def test_a_variable_that_is_set_after_the_session_started_is_no_choice(
    bare: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYSPARK_PYTHON", bare)
    context = Context("python3")
    choose_python(context)
    assert context.pythonExec == sys.executable


def test_the_python_that_the_variable_chose_is_checked_and_the_remedy_names_it_alone(
    bare: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for chosen in (bare, "python3"):
        monkeypatch.setenv("PYSPARK_PYTHON", chosen)
        with pytest.raises(ExecutorPythonError, match=r"set PYSPARK_PYTHON .*alone.*, to a Python 3") as error:
            choose_python(Context(chosen))
        assert sys.executable in str(error.value)


# --- modules of the user's own ----------------------------------------------------------------------


class Executors(Context):
    """A context whose executors have only installed packages."""

    def parallelize(self, rows: list[int], parts: int) -> Any:
        return self

    def map(self, task: Any) -> Any:
        self.jobs = getattr(self, "jobs", 0) + 1
        return self

    def collect(self) -> Any:
        return [("/their/python3", "3.11.0", ["own_module"])]


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    (tmp_path / "own_module.py").write_text("class Net:\n    pass\n\ndef work():\n    return Net()\n")
    monkeypatch.syspath_prepend(tmp_path)
    yield importlib.import_module("own_module")
    del sys.modules["own_module"]


def test_modules_that_a_pickle_imports_are_found_and_equal_strings_are_not(own: Any) -> None:
    needing = [own.Net(), own.work, lambda: own.work(), {"a": [own, own.Net]}, [pickle.dumps(own.Net)]]
    for value in needing:
        assert "own_module" in modules_in(cloudpickle.dumps(value))
        assert "own_module" in modules_in(cloudpickle.dumps(["own_module", value, "own_module"]))
    for value in ({"own_module": "Net"}, Path("own_module"), ["own_module"], b"\x80own_module"):
        assert "own_module" not in modules_in(cloudpickle.dumps(value))


def test_a_module_of_ones_own_that_executors_lack_is_named_with_the_way_to_send_it(own: Any) -> None:
    with pytest.raises(
        NotPicklableError, match=r"cannot import own_module, .*own_module\.py; send it with sc.addPyFile"
    ):
        check_modules(Executors("python3"), cloudpickle.dumps(own.Net()))


def test_no_job_looks_for_modules_that_the_workers_own_pythonpath_has(own: Any) -> None:
    executors = Executors("python3")
    check_modules(executors, cloudpickle.dumps(own.Net()), {"PYTHONPATH": "/shared"})
    assert not hasattr(executors, "jobs")


def test_job_that_gets_no_slot_keeps_nobody_waiting(own: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spark_python, "_PATIENCE_S", 0.01)
    executors, free = Executors("python3"), threading.Event()
    monkeypatch.setattr(executors, "collect", lambda: free.wait(20))
    check_modules(executors, cloudpickle.dumps(own.Net()))
    free.set()


def test_no_job_looks_for_installed_modules() -> None:
    executors = Executors("python3")
    check_modules(executors, cloudpickle.dumps([Path, pytest.raises, json.loads]))
    assert not hasattr(executors, "jobs")
