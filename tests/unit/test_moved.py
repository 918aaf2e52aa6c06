"""Old module names in stored files lead to the present modules."""

from __future__ import annotations

import importlib
import subprocess
import sys

import pytest

from spark_elastic.moved import MOVED


@pytest.mark.parametrize("old", MOVED)
def test_an_old_name_is_the_present_module(old):
    found = importlib.import_module(old)
    assert found is importlib.import_module(MOVED[old])
    assert (found.__name__, found.__spec__.name) == (MOVED[old], MOVED[old])


def test_the_present_name_is_imported_once_when_the_old_one_comes_first():
    program = (
        "import spark_elastic.ml.history as old, spark_elastic.reporting.history as new; "
        "assert old is new and old.__spec__.name == new.__name__"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


def test_another_unknown_name_is_still_an_error():
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("spark_elastic.ml.no_such_module")
