"""The package has no import circles, and no name of two classes."""

import importlib.util
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / "scripts" / "house.py"
spec = importlib.util.spec_from_file_location("house", SCRIPT)
house = importlib.util.module_from_spec(spec)
sys.modules["house"] = house
spec.loader.exec_module(house)


def test_no_modules_import_one_another():
    assert house.circles(house.import_graph()) == []


def test_a_circle_is_found():
    graph = {"a": {"b"}, "b": {"c"}, "c": {"b", "d"}, "d": set()}
    assert house.circles(graph) == [["b", "c"]]


def test_no_two_classes_have_one_name():
    assert house.doubled_class_names() == {}
