from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import spark_elastic
import spark_elastic.torch as hvd
from spark_elastic import errors
from spark_elastic.collective import surface

PACKAGE = Path(str(errors.__file__)).parent


def test_what_the_frameworks_have_in_common_is_found_in_each_of_them() -> None:
    assert set(surface.__all__) < set(hvd.__all__)
    assert all(getattr(hvd, name) is getattr(surface, name) for name in surface.__all__)
    assert len(set(hvd.__all__)) == len(hvd.__all__)


def test_package_lists_its_public_names_and_nothing_else() -> None:
    tree = ast.parse((PACKAGE / "__init__.py").read_text())
    (declared,) = [node.body for node in tree.body if isinstance(node, ast.If)]
    imported = {alias.name for node in declared if isinstance(node, ast.ImportFrom) for alias in node.names}
    assert set(dir(spark_elastic)) == {*spark_elastic.__all__, "__version__"}
    assert set(spark_elastic.__all__) == imported, "type checkers see other names than users"
    assert all(getattr(spark_elastic, name) is not None for name in spark_elastic.__all__)


def test_errors_are_found_from_the_package_alone() -> None:
    code = "import spark_elastic; print(spark_elastic.errors.UsageError.__name__)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "UsageError\n"
