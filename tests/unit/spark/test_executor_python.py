"""The Python that Spark starts on this machine, and what its errors say of one that cannot run workers."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from spark_elastic.errors import ExecutorPythonError
from spark_elastic.spark.executor_python import choose_python, python_error_of, refuse_python


def program(folder: Path, *commands: str) -> str:
    path = folder / "python"
    path.write_text("#!/bin/sh\n" + "\n".join(commands))
    path.chmod(0o755)
    return str(path)


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


def test_a_python_that_the_variable_chose_is_kept_and_has_to_be_looked_at(
    bare: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for chosen in (bare, "python3"):
        monkeypatch.setenv("PYSPARK_PYTHON", chosen)
        context = Context(chosen)
        assert not choose_python(context)
        assert context.pythonExec == chosen
    assert choose_python(Context(sys.executable))


def test_python_without_packages_is_refused_and_the_remedy_names_the_variable_alone() -> None:
    with pytest.raises(ExecutorPythonError, match=r"set PYSPARK_PYTHON .*alone.*, to a Python 3") as error:
        refuse_python(("/their/python3", "3.11.0", ["torch"]))
    assert sys.executable in str(error.value)


@pytest.mark.parametrize(
    ("said", "problem"),
    [
        ('java.io.IOException: Cannot run program "/no/python": error=2', "no such program"),
        ("Error from python worker:\n  Segmentation fault\nPYTHONPATH was:\n  /x", "it does not start"),
        ("[PYTHON_VERSION_MISMATCH] Python in worker has different version: 3.9", "its minor version is another one"),
        ("No module named 'pyarrow'", "it has no pyarrow"),
        ("Pandas >= 2.2.0 must be installed; however, your version was 2.0.3", "has no pandas >= 2.2.0, but an older"),
    ],
)
def test_error_of_a_job_says_what_is_wrong_with_the_python(said: str, problem: str) -> None:
    assert problem in str(python_error_of(RuntimeError(said), "/their/python3"))


def test_other_errors_of_a_job_are_not_about_the_python() -> None:
    assert python_error_of(RuntimeError("Python worker exited unexpectedly (crashed)"), "python3") is None
