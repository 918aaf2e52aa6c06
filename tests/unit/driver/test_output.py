from __future__ import annotations

import io
import sys
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from spark_elastic.driver.output import MAX_QUEUED_BYTES, OutputPrinter


class Moody(io.StringIO):
    """Refuses some lines, in a way that files do not."""

    def write(self, text):
        if "bad" in text:
            raise RuntimeError("not in this mood")
        return super().write(text)


def test_target_that_raises_loses_only_that_line_and_is_reported_once(monkeypatch):
    last_resort = io.StringIO()
    monkeypatch.setattr(sys, "__stderr__", last_resort)
    target = Moody()
    printer = OutputPrinter(target, target)
    printer.worker_lines("0", "stdout", ("one", "bad", "bad again", "two"))
    printer.close()
    assert target.getvalue() == "[0]<stdout>:one\n[0]<stdout>:two\n"
    assert (
        last_resort.getvalue() == "spark_elastic: lines for stdout cannot be written (RuntimeError: not in this mood)\n"
    )


def test_printer_without_stdout_still_writes_to_stderr(monkeypatch):
    errors = io.StringIO()
    monkeypatch.setattr(sys, "stdout", None)
    printer = OutputPrinter(None, errors)
    printer.worker_lines("0", "stdout", ("lost",))
    printer.worker_lines("0", "stderr", ("kept",))
    printer.close()
    assert errors.getvalue() == "[0]<stderr>:kept\n"


class Blocked(io.StringIO):
    """A terminal that takes nothing until it is released."""

    def __init__(self) -> None:
        super().__init__()
        self.reached, self.released = threading.Event(), threading.Event()

    def write(self, text: str) -> int:
        self.reached.set()
        self.released.wait(30)
        return super().write(text)


@pytest.fixture
def blocked() -> Iterator[Blocked]:
    made = Blocked()
    yield made
    made.released.set()


def test_blocked_terminal_holds_a_bounded_number_of_bytes(blocked: Blocked) -> None:
    printer = OutputPrinter(blocked, blocked)
    printer.line("first")
    assert blocked.reached.wait(10)
    line = "x" * 2**16
    for _ in range(2 * MAX_QUEUED_BYTES // len(line)):
        printer.line(line)
    assert printer._bytes <= MAX_QUEUED_BYTES
    blocked.released.set()
    printer.close(20)
    said = blocked.getvalue()
    kept = said.count(line)
    assert len(line) * kept <= MAX_QUEUED_BYTES
    dropped = 512 - kept
    assert f"spark_elastic: {dropped} lines ({dropped * len(line) / 1e6:.1f} MB) were dropped" in said
    assert printer._bytes == 0


@pytest.mark.parametrize(
    ("printed", "shown"),
    [
        ("plain\tüñ 漢", "plain\tüñ 漢"),
        ("\x1b[1;31mred\x1b[0m and \x9b32mgreen", "red and green"),
        ("\x1b]0;title\x07text \x1b]8;;http://x\x1b\\link\x1b]8;;\x1b\\", "text link"),
        ("\x1b[2J\x1b[Hcleared\x1bc\x1b(B", "cleared"),
        ("\x1bP1;2|secret\x1b\\after \x1b_x\x1b\\", "after "),
        ("bell\x07\x08\x00\x7f\x85", "bell"),
        ("right\u202eleft", "rightleft"),
        ("\x1b", ""),
        ("\r 10%|# |\r 90%|##|\r100%|###|", "100%|###|"),
        ("Epoch 1\rEpoch 2\r", "Epoch 2"),
    ],
)
def test_what_workers_print_cannot_control_the_terminal(printed: str, shown: str, tmp_path: Any) -> None:
    target, kept = io.StringIO(), []
    printer = OutputPrinter(target, target, copy=lambda who, stream, text: kept.append(text))
    printer.worker_lines("0", "stdout", (printed,))
    printer.close()
    assert target.getvalue() == f"[0]<stdout>:{shown}\n"
    assert kept == [printed], "files have the lines as they were printed"


def test_error_of_a_worker_in_a_line_about_the_job_cannot_control_the_terminal() -> None:
    target = io.StringIO()
    printer = OutputPrinter(target, target)
    printer.say("spark_elastic: rank 0 lost (ValueError: \x1b]0;title\x07bad)\nand more")
    printer.close()
    assert target.getvalue() == "spark_elastic: rank 0 lost (ValueError: bad)\nand more\n"


def test_long_line_about_the_job_stays_whole_in_a_file() -> None:
    target = io.StringIO()
    printer = OutputPrinter(target, target)
    printer.say("word " * 40 + "end")
    printer.close()
    assert target.getvalue() == "word " * 40 + "end\n"
