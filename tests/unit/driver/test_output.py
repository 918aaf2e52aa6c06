from __future__ import annotations

import io
import sys

from spark_elastic.driver.output import OutputPrinter


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
