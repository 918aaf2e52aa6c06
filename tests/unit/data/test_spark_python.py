"""The check of the Python that Spark is to start on this machine."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from spark_elastic.data.spark_python import _check_program
from spark_elastic.errors import ExecutorPythonError


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
