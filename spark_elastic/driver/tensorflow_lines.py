"""TensorFlow's own lines that are not shown: those of its start, and of a step that a lost worker has interrupted.

A collective that fails in a TensorFlow graph makes TensorFlow's C++ log the error twice, each time with its traceback:
seventy lines a survivor, although nothing is wrong with it, and a line of the driver's says what happened. They are
found by the token that `spark_elastic.tensorflow.host.with_token` writes into the error. Other warnings are shown.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Iterable

_LOG = r"^(?:[IWE]\d{4} [\d:.]+\s+\d+ |[\d-]+ [\d:.]+: [IWE] \S*)[\w/]+\.cc:\d+\] "
"""The head of a log line of TensorFlow's C++, from version 2.17 on and before."""
_INTERRUPTED = re.compile(_LOG + r".*HorovodInternalError: .*\[lost peer \d+\]")
_PREAMBLE = re.compile(
    r"^WARNING: All log messages before absl::InitializeLog\(\) is called are written to STDERR$"
    r"|^I\d{4} [\d:.]+\s+\d+ port\.cc:\d+\] oneDNN custom operations are on\."
)
"""Written at each start, whatever TF_CPP_MIN_LOG_LEVEL says."""
_OF_TRACEBACK = re.compile(
    r"^(?:\s|$|Traceback \(most recent call last\):$|The above exception was the direct cause |"
    r"During handling of the above exception, |(?:[\w.]+\.)?HorovodInternalError: )"
)
_TRACEBACK = "Traceback (most recent call last):"
_LAST_LINE = re.compile(r"^(?:[\w.]+\.)?HorovodInternalError: .*\[lost peer \d+\]$")
_AFTER_IT = re.compile(r"^$|^\t \[\[\{\{.*\}\}\]\]$")


class _At(enum.Enum):
    """The part of the output that the last line belongs to."""

    OTHER = enum.auto()
    HEAD = enum.auto()  # the head of a message to leave out; its traceback follows
    TRACEBACK = enum.auto()
    END = enum.auto()  # the last line of its traceback; empty lines, and the name of the operation, may follow


class InterruptedSteps:
    """Filters the stderr of one worker: leaves out TensorFlow's messages about steps that a loss interrupted."""

    def __init__(self) -> None:
        self._at = _At.OTHER

    def shown(self, lines: Iterable[str]) -> list[str]:
        """Return those of the next lines that are not left out."""
        return [line for line in lines if self._is_shown(line)]

    def _is_shown(self, line: str) -> bool:
        if _PREAMBLE.match(line):
            return False
        self._at = self._next(line)
        return self._at is _At.OTHER

    def _next(self, line: str) -> _At:
        if _INTERRUPTED.match(line):
            return _At.HEAD
        match self._at:
            case _At.HEAD if line == _TRACEBACK:
                return _At.TRACEBACK
            case _At.TRACEBACK if _LAST_LINE.match(line):
                return _At.END
            case _At.TRACEBACK if _OF_TRACEBACK.match(line):
                return _At.TRACEBACK
            case _At.HEAD | _At.END if _AFTER_IT.match(line):
                return _At.END
            case _:
                return _At.OTHER
