"""The position of the cursor after bars in a terminal."""

from __future__ import annotations

import io
import re

import pytest

from spark_elastic.reporting.progress import View
from spark_elastic.reporting.screens import TerminalScreen


def column(written: str) -> int:
    """Return the cursor's column after this output."""
    line = re.sub(r"\x1b\[[A-Z]", "", written.replace("\r\n", "\n"))
    return len(re.split(r"[\r\n]", line)[-1])


@pytest.mark.parametrize("first", [0, 1])
def test_output_after_two_bars_begins_at_the_left_whichever_was_cleared_first(first):
    terminal = io.StringIO()
    screens = [TerminalScreen(terminal), TerminalScreen(terminal)]
    for number, screen in enumerate(screens):
        screen.show(View(f"epoch {number + 1}/2", 10, 100, "rows", {"loss": 0.5}, 2, 3.0))
    screens[first].clear()
    screens[1 - first].clear()
    assert "epoch 2/2" in terminal.getvalue()
    assert column(terminal.getvalue()) == 0
