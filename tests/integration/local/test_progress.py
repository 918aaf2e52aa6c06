"""What a person sees of a training: in a terminal of 80 columns, in a pipe, and after Ctrl-C."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.integration.terminal import Terminal

pytestmark = pytest.mark.nightly

ROOT = Path(__file__).resolve().parents[3]
PROGRAM = [sys.executable, "-m", "tests.integration.local.progress_program"]
ENV = {"PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
LIMIT_S = 150

BAR = re.compile(r"epoch \d+/\d+\s+\d+% \|")
WHOLE = re.compile(
    r"|=== .*|spark_elastic: .*|\[(\d|slot \d+)\]<std(out|err)>:.*|"
    r"epoch \d+/\d+  loss [\d.]+  accuracy [\d.]+  [\d.]+ s|"
    r"    \S.*"  # the rest of a line of more than 80 columns
)
"""Lines that may stand on the screen in the end, each of them whole."""


@pytest.fixture
def terminal():
    made = []

    def start(*parts: str, columns: int = 80) -> Terminal:
        made.append(Terminal([*PROGRAM, *parts], columns, ENV))
        return made[-1]

    yield start
    for each in made:
        each.close()


def torn(screen: str) -> list[str]:
    return [line for line in screen.splitlines() if not WHOLE.fullmatch(line)]


def test_a_terminal_shows_a_bar_and_a_line_for_each_event_and_keeps_the_lines_alone(terminal):
    window = terminal("kill", "two", columns=200)
    assert window.read_to_the_end(LIMIT_S) == 0
    drawn = [part for part in re.split(r"[\r\n]", window.raw) if BAR.match(part)]
    assert any(re.search(r"\d+/1200 rows  loss [\d.]+  accuracy [\d.]+  2 workers  .*rows/s", bar) for bar in drawn)
    screen = window.screen()
    kill, _, two = screen.partition("=== end of kill")
    assert "spark_elastic: training starts with 2 workers" in kill
    assert re.search(
        r"^spark_elastic: rank 1 on \S+ lost \(killed by signal 9\): 2 -> 1 worker, \d\.\d\d s, no step", kill, re.M
    )
    assert len(re.findall(r"^epoch \d/3  loss", kill, re.M)) == 3
    assert len(re.findall(r"^\[\d\]<stdout>:worker says \d+$", kill, re.M)) >= 9
    assert torn(screen) == [], screen
    assert sorted(re.findall(r"^epoch (\d)/2  loss", two, re.M)) == ["1", "1", "2", "2"]


def test_without_a_terminal_there_are_few_plain_lines_and_with_verbose_0_none():
    done = subprocess.run(
        [*PROGRAM, "quiet", "kill"],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, **ENV},
        timeout=LIMIT_S,
        check=True,
    ).stdout
    quiet, _, rest = done.partition("=== end of quiet\n")
    assert quiet == ""
    assert not re.search(r"[\r\x1b]", rest)
    job = [line for line in rest.splitlines() if "worker says" not in line]
    assert torn("\n".join(job)) == []
    assert [line.partition("  ")[0] for line in job if line.startswith("epoch")] == [f"epoch {n}/3" for n in (1, 2, 3)]
    assert len(job) <= 12, job
    assert not [line for line in job if line.startswith("    ")], "lines in files are whole"
