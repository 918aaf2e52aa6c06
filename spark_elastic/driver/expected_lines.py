"""Lines of TensorFlow and torch that are not shown, because nothing is wrong: of a start, and of an interrupted step.

A collective that fails in a TensorFlow graph makes TensorFlow's C++ log the error twice, each time with its traceback:
seventy lines a survivor, although nothing is wrong with it, and a line of the driver's says what happened. They are
found by the token that `spark_elastic.tensorflow.host.with_token` writes into the error. torch logs the stack of each
NCCL collective whose peer is gone, twice a survivor: from its watchdog and from the thread that asks. Other warnings
are shown.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Iterable

_LOG = r"^(?:[IWE]\d{4} [\d:.]+\s+\d+ |[\d-]+ [\d:.]+: [IWE] \S*)[\w/]+\.cc:\d+\] "
"""The head of a log line of TensorFlow's C++, from version 2.17 on and before."""
_INTERRUPTED = re.compile(_LOG + r".*HorovodInternalError: .*\[lost peer \d+\]")
_EXPECTED = re.compile(
    r"^WARNING: All log messages before absl::InitializeLog\(\) is called are written to STDERR$"
    r"|^I\d{4} [\d:.]+\s+\d+ port\.cc:\d+\] oneDNN custom operations are on\."
    r"|^(?:\[\w+\]:)?\[W\d{4} [\d:.]+ init\.cpp:\d+\] Warning: Work::exception API is being deprecated"
)
"""Written at each start, whatever TF_CPP_MIN_LOG_LEVEL says; and by torch when NCCL is asked for its error."""
_TORCH = r"^(?:\[\w+\]:)?\[[WE]\d{4} [\d:.]+ "
_PEER_GONE = re.compile(_TORCH + r"ProcessGroupNCCL\.cpp:\d+\] .*NCCL error: remote process exited")
_OF_STACK = re.compile(r"^(?:nccl\w+: |Exception raised from |frame #\d+: )")
_OF_TRACEBACK = re.compile(
    r"^(?:\s|$|Traceback \(most recent call last\):$|The above exception was the direct cause |"
    r"During handling of the above exception, |(?:[\w.]+\.)?HorovodInternalError: )"
)
_FIRST_LINE = re.compile(r"^Traceback \(most recent call last\):$")
_LAST_LINE = re.compile(r"^(?:[\w.]+\.)?HorovodInternalError: .*\[lost peer \d+\]$")
_AFTER_IT = re.compile(r"^$|^\t \[\[\{\{.*\}\}\]\]$")


class _At(enum.Enum):
    """The part of the output that the last line belongs to."""

    OTHER = enum.auto()
    HEAD = enum.auto()  # the head of a message to leave out; its traceback follows
    TRACEBACK = enum.auto()
    END = enum.auto()  # the last line of its traceback; empty lines, and the name of the operation, may follow
    STACK = enum.auto()  # a message of torch, which an empty line ends
    LAST_ERROR = enum.auto()  # NCCL's words for it follow


_NEXT = {
    _At.STACK: ((re.compile("^Last error:$"), _At.LAST_ERROR), (_OF_STACK, _At.STACK), (re.compile("^$"), _At.END)),
    _At.LAST_ERROR: ((re.compile(""), _At.STACK),),
    _At.HEAD: ((_FIRST_LINE, _At.TRACEBACK), (_AFTER_IT, _At.END)),
    _At.TRACEBACK: ((_LAST_LINE, _At.END), (_OF_TRACEBACK, _At.TRACEBACK)),
    _At.END: ((_AFTER_IT, _At.END),),
}
"""The part that a line belongs to, by that of the line before; OTHER, if no pattern matches."""


class ExpectedLines:
    """Filters the stderr of one worker: leaves out the frameworks' messages about steps that a loss interrupted."""

    def __init__(self) -> None:
        self._at = _At.OTHER

    def shown(self, lines: Iterable[str]) -> list[str]:
        """Return those of the next lines that are not left out."""
        return [line for line in lines if not _EXPECTED.match(line) and self._next(line) is _At.OTHER]

    def _next(self, line: str) -> _At:
        starts = ((_INTERRUPTED, _At.HEAD), (_PEER_GONE, _At.STACK))
        patterns = (*starts, *_NEXT.get(self._at, ()))
        self._at = next((at for pattern, at in patterns if pattern.match(line)), _At.OTHER)
        return self._at
