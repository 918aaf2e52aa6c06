"""The bar of a notebook: one output, updated in place."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import pytest

from spark_elastic.reporting.progress import View
from spark_elastic.reporting.screens import NotebookScreen


class Cell:
    """The outputs below a cell."""

    def __init__(self) -> None:
        self.outputs: list[str] = []

    def display(self, data: dict[str, str], **_: Any) -> Any:
        self.outputs.append(data["text/plain"])
        place = len(self.outputs) - 1

        class Handle:
            def update(_, data: dict[str, str], raw: bool) -> None:
                self.outputs[place] = data["text/plain"]

        return Handle()


@pytest.fixture
def cell(monkeypatch: pytest.MonkeyPatch) -> Cell:
    made = Cell()
    module = ModuleType("IPython.display")
    module.display = made.display  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "IPython", ModuleType("IPython"))
    monkeypatch.setitem(sys.modules, "IPython.display", module)
    return made


def test_bar_is_one_output_that_keeps_its_last_content(cell: Cell) -> None:
    screen = NotebookScreen()
    screen.show(View("epoch 1/2", 50, 100))
    screen.clear()
    screen.show(View("epoch 2/2", 100, 100))
    screen.clear()
    assert cell.outputs == ["epoch 2/2 100%  100/100 rows"]


def test_wait_that_is_over_is_removed_from_the_output(cell: Cell) -> None:
    screen = NotebookScreen()
    screen.show(View("", waiting="waiting for 1 of 3 workers", left_s=8.0))
    assert cell.outputs == ["waiting for 1 of 3 workers; 8 s left"]
    screen.clear()
    assert cell.outputs == [""]
