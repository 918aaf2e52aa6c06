"""The check of the Python that Spark is to start on this machine."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from spark_elastic.errors import ExecutorPythonError
from spark_elastic.spark.executor_python import _check_program, choose_python


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


@dataclass
class Context:
    """A SparkContext, as far as the choice looks at it."""

    pythonExec: str
    _conf: dict[str, str] = field(default_factory=dict)


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
