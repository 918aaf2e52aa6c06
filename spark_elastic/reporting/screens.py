"""Where a bar and lines go: a terminal, a notebook, or a stream that nobody may redraw.

A screen belongs to one thread. Screens of several threads share a terminal: tqdm keeps a line for each bar, and whoever
prints clears all of them first.
"""

from __future__ import annotations

import html
import os
import sys
import threading
from collections.abc import Callable
from typing import Any, Protocol, TextIO

from tqdm.std import tqdm

from spark_elastic.reporting.format import View, bar_width, cut, right_of_bar


class Screen(Protocol):
    """live: whether `show` shows anything. to_stdout: lines about the job are better there than on stderr."""

    live: bool
    to_stdout: bool

    def show(self, view: View) -> None:
        """Draw the bar, or draw it anew."""

    def lines(self, write: Callable[[], None]) -> None:
        """Call `write`, which prints lines, so that neither they nor the bar are torn."""

    def clear(self) -> None:
        """Take the bar away, until it is shown again."""


def screen_for(stream: TextIO | None) -> Screen:
    """stream: where the caller wants it; None: wherever this process's stderr goes."""
    if stream is None and in_notebook():
        return NotebookScreen()
    target = stream if stream is not None else sys.stderr
    return TerminalScreen(stream) if is_terminal(target) else PlainScreen()


def is_terminal(stream: Any) -> bool:
    try:
        return bool(stream.isatty()) and os.environ.get("TERM") != "dumb"
    except Exception:  # None, closed, or of somebody's own making
        return False


def in_notebook() -> bool:
    """Whether this process is the kernel of a notebook."""
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    return getattr(shell, "kernel", None) is not None


class PlainScreen:
    """No bar at all."""

    live = False
    to_stdout = False

    def show(self, view: View) -> None: ...

    def lines(self, write: Callable[[], None]) -> None:
        write()

    def clear(self) -> None: ...


class _Bar(tqdm):
    monitor_interval = 0  # no thread that would redraw it


_Bar.set_lock(threading.RLock())  # tqdm's own brings a semaphore of the system and a process that looks after it


class TerminalScreen:
    """One line at the bottom, redrawn in place."""

    live = True
    to_stdout = False

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = stream
        self._bar: Any = None

    def show(self, view: View) -> None:
        if self._bar is None:
            file = self._stream if self._stream is not None else sys.stderr
            self._bar = _Bar(total=1, file=file, leave=False, dynamic_ncols=True, mininterval=0, bar_format=" ")
        width = (self._bar.format_dict["ncols"] or 80) - 1
        self._bar.total, self._bar.n = view.total or 1, view.done if view.total else 0
        self._bar.bar_format = layout(view, width)
        self._bar.refresh()

    def lines(self, write: Callable[[], None]) -> None:
        file = self._stream if self._stream is not None else sys.stderr
        with _Bar.external_write_mode(file=file):
            write()

    def clear(self) -> None:
        if self._bar is not None:
            stream = self._bar.fp
            self._bar.close()
            self._bar = None
            with _Bar.get_lock():  # of several bars, those that were not the first leave the cursor behind the line
                stream.write("\r")
                stream.flush()


def layout(view: View, width: int) -> str:
    """A line of at most `width` characters, as tqdm's bar_format."""
    title = cut(view.title, width // 2)
    if view.waiting or not view.total:
        begin = f"{title}  " if title else ""
        return _literal(f"{begin}{right_of_bar(view, width - len(begin))}")
    bar = bar_width(title, width)
    right = right_of_bar(view, width - len(title) - bar - 10)
    return f"{_literal(title)} {view.fraction:4.0%} |{{bar:{bar}}}| {_literal(right)}"


def _literal(text: str) -> str:
    return text.replace("{", "{{").replace("}", "}}")


class NotebookScreen:
    """One output of the cell, redrawn in place. What it showed last stays in the notebook's file."""

    live = True
    to_stdout = True

    def __init__(self) -> None:
        self._handle: Any = None
        self._waits = False
        """What is shown is a wait."""

    def show(self, view: View) -> None:
        from IPython.display import display

        self._waits = bool(view.waiting)
        data = {"text/plain": as_text(view), "text/html": as_html(view)}
        if self._handle is None:
            self._handle = display(data, raw=True, display_id=True)
        else:
            self._handle.update(data, raw=True)

    def lines(self, write: Callable[[], None]) -> None:
        write()

    def clear(self) -> None:
        """A bar stays as it was last, and is kept with the notebook; a wait that is over does not."""
        if self._handle is not None and self._waits:
            self._waits = False
            self._handle.update({"text/plain": "", "text/html": ""}, raw=True)


def as_text(view: View) -> str:
    percent = f" {view.fraction:4.0%}" if view.total else ""
    return f"{view.title}{percent}  {right_of_bar(view, 200)}".strip()


def as_html(view: View) -> str:
    bar = f'<progress max="1" value="{view.fraction:.4f}" style="width:14em;vertical-align:middle"></progress>'
    percent = f"{view.fraction:.0%}" if view.total else ""
    said = html.escape(right_of_bar(view, 200))
    style = "font-family:var(--jp-code-font-family,monospace);font-size:90%;white-space:nowrap"
    return f'<div style="{style}">{html.escape(view.title)} {bar if view.total else ""} {percent} &nbsp;{said}</div>'
