"""The screens that a progress bar is drawn on: a terminal, a notebook, or none if the stream cannot be redrawn.

A screen belongs to one thread. Screens of several threads may share a terminal: tqdm keeps a line for each bar, and all
of them are cleared before a line is printed.
"""

from __future__ import annotations

import html
import os
import sys
import threading
from collections.abc import Callable
from typing import Any, TextIO

from tqdm.std import tqdm

from spark_elastic.reporting.progress import LINE_WIDTH, View, cut, right_of_bar

NARROWEST_BAR, WIDEST_BAR = 6, 24


class Screen:
    """Draws a bar, and keeps it apart from printed lines. The base class draws none: the stream cannot be redrawn."""

    live = False  # True if `show` draws something
    to_stdout = False  # True if lines about the job are better printed on stdout than on stderr

    @property
    def columns(self) -> int:
        """The width at which lines about the job are broken: a terminal's. Lines in files stay whole."""
        return sys.maxsize

    def show(self, view: View) -> None:
        """Draw the bar, in place of the one that was drawn before."""

    def lines(self, write: Callable[[], None]) -> None:
        """Call `write`, which prints lines, so that the bar and the lines do not overwrite one another."""
        write()

    def clear(self) -> None:
        """Remove the bar, until it is shown again."""


def screen_for(stream: TextIO | None) -> Screen:
    """Return the screen for a stream; None: for this process's notebook, or else its stderr."""
    if stream is None and in_notebook():
        return NotebookScreen()
    target = stream if stream is not None else sys.stderr
    return TerminalScreen(stream) if is_terminal(target) else Screen()


def is_terminal(stream: Any) -> bool:
    """Return True if the stream is a terminal in which a line can be redrawn."""
    try:
        return bool(stream.isatty()) and os.environ.get("TERM") != "dumb"
    except Exception:  # None, closed, or an object of the user's own
        return False


def in_notebook() -> bool:
    """Return True if this process is the kernel of a notebook."""
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    return getattr(shell, "kernel", None) is not None


class _Bar(tqdm):
    monitor_interval = 0  # starts no thread that would redraw the bar


_Bar.set_lock(threading.RLock())  # tqdm's default takes a system semaphore and a process that tracks it


class TerminalScreen(Screen):
    """Draws one line at the bottom of a terminal, in place."""

    live = True

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = stream
        self._bar: Any = None

    @property
    def _file(self) -> TextIO:
        return self._stream if self._stream is not None else sys.stderr

    @property
    def columns(self) -> int:
        try:
            return max(LINE_WIDTH, os.get_terminal_size(self._file.fileno()).columns)
        except (OSError, ValueError):  # it is closed, or only pretends to be a terminal
            return LINE_WIDTH

    def show(self, view: View) -> None:
        if self._bar is None:
            self._bar = _Bar(total=1, file=self._file, leave=False, dynamic_ncols=True, mininterval=0, bar_format=" ")
        width = (self._bar.format_dict["ncols"] or 80) - 1
        self._bar.total, self._bar.n = view.total or 1, view.done if view.total else 0
        self._bar.bar_format = layout(view, width)
        self._bar.refresh()

    def lines(self, write: Callable[[], None]) -> None:
        with _Bar.external_write_mode(file=self._file):
            write()

    def clear(self) -> None:
        if self._bar is not None:
            stream = self._bar.fp
            self._bar.close()
            self._bar = None
            with _Bar.get_lock():  # of several bars, only the first leaves the cursor at the begin of the line
                stream.write("\r")
                stream.flush()


def layout(view: View, width: int) -> str:
    """Return a line of at most `width` characters, as tqdm's bar_format."""
    title = cut(view.title, width // 2)
    if view.waiting or not view.total:
        left, bar = f"{title}  " if title else "", ""
        right = right_of_bar(view, width - len(left))
    else:
        columns = max(NARROWEST_BAR, min(WIDEST_BAR, (width - len(title)) // 8))
        left, bar = f"{title} {view.fraction:4.0%} |", f"{{bar:{columns}}}| "
        right = right_of_bar(view, width - len(title) - columns - 10)
    left, right = (text.replace("{", "{{").replace("}", "}}") for text in (left, right))
    return f"{left}{bar}{right}"


class NotebookScreen(Screen):
    """Draws one output of a notebook cell, in place. Its last content stays in the notebook's file."""

    live = True
    to_stdout = True
    columns = LINE_WIDTH

    def __init__(self) -> None:
        self._handle: Any = None
        self._waits = False  # a wait is shown, not progress

    def show(self, view: View) -> None:
        from IPython.display import display

        self._waits = bool(view.waiting)
        data = {"text/plain": as_text(view), "text/html": as_html(view)}
        if self._handle is None:
            self._handle = display(data, raw=True, display_id=True)
        else:
            self._handle.update(data, raw=True)

    def clear(self) -> None:
        """Remove the text of a wait. A bar remains as it was drawn last, and is stored with the notebook."""
        if self._handle is not None and self._waits:
            self._waits = False
            self._handle.update({"text/plain": "", "text/html": ""}, raw=True)


def as_text(view: View) -> str:
    """Return the bar as plain text, for notebooks that cannot show HTML."""
    percent = f" {view.fraction:4.0%}" if view.total else ""
    return f"{view.title}{percent}  {right_of_bar(view, 200)}".strip()


def as_html(view: View) -> str:
    bar = f'<progress max="1" value="{view.fraction:.4f}" style="width:14em;vertical-align:middle"></progress>'
    percent = f"{view.fraction:.0%}" if view.total else ""
    said = html.escape(right_of_bar(view, 200))
    style = "font-family:var(--jp-code-font-family,monospace);font-size:90%;white-space:nowrap"
    return f'<div style="{style}">{html.escape(view.title)} {bar if view.total else ""} {percent} &nbsp;{said}</div>'
