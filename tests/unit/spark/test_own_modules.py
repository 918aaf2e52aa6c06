"""The user's own modules are looked for on the executors before a job starts."""

from __future__ import annotations

import importlib
import itertools
import json
import pickle
import sys
import threading
from pathlib import Path
from typing import Any

import cloudpickle
import pytest

from spark_elastic.errors import NotPicklableError
from spark_elastic.spark import own_modules
from spark_elastic.spark.classic import ClassicCluster
from spark_elastic.spark.own_modules import check_modules, modules_in

numbers = itertools.count()


class Executors(ClassicCluster):
    """A cluster whose executors have only installed packages; `free` is set when there is a slot for tasks."""

    def __init__(self, has_slots: bool = True) -> None:
        self.number, self.free, self.jobs, self.cancelled = next(numbers), threading.Event(), 0, threading.Event()
        if has_slots:
            self.free.set()

    id = property(lambda self: f"app-{self.number}")  # type: ignore[assignment]

    def tagging(self, tag: str, name: str) -> Any:
        self.jobs += 1
        return lambda: None

    def _rows_of_tasks(self, task: Any, width: int | None, barrier: bool) -> list[Any]:
        self.free.wait(20)
        return [("/their/python3", "3.11.0", ["own_module"])]

    def cancel_tagged(self, tag: str) -> None:
        self.cancelled.set()
        self.free.set()

    def leave_thread(self) -> None:
        pass


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
        check_modules(Executors(), cloudpickle.dumps(own.Net()))


def test_no_job_looks_for_modules_that_the_workers_own_pythonpath_has(own: Any) -> None:
    executors = Executors()
    check_modules(executors, cloudpickle.dumps(own.Net()), {"PYTHONPATH": "/shared"})
    assert executors.jobs == 0


def test_job_that_gets_no_slot_keeps_nobody_waiting(own: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(own_modules, "PATIENCE_S", 0.01)
    executors = Executors(has_slots=False)
    check_modules(executors, cloudpickle.dumps(own.Net()))
    assert executors.cancelled.wait(20)


def test_no_job_looks_for_installed_modules() -> None:
    executors = Executors()
    check_modules(executors, cloudpickle.dumps([Path, pytest.raises, json.loads]))
    assert executors.jobs == 0
