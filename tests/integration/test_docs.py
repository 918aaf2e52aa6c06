"""Every block of code in README and docs/ is run: pages from top to bottom, in one process those that are run by day,
and in another one those that are run by night.

A page's blocks share their names, as if they were typed in one after the other. All pages share one Spark session: the
first to ask for one gets it, and the others find it. Blocks of shell are run in a folder that has the repository's
examples, and what the page's Python has left there. What cannot be run here says why, in a comment before it.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.pages import PAGES, ROOT, blocks

MOST_S = 2400.0
"""For all pages of a process; a busy machine needs ten times as long as an idle one."""
RUNNER = Path(__file__).with_name("page_runner.py")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the pages are run."""
    made = tmp_path_factory.mktemp("pages")
    for name in ("examples", "benchmarks", "docs"):
        (made / name).symlink_to(ROOT / name)
    command = made / "bin" / "spark-elastic"  # of this tree, whatever is installed
    command.parent.mkdir()
    command.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m spark_elastic "$@"\n')
    command.chmod(0o755)
    return made


BY_DAY = ("README.md",)
GROUPS = {
    "day": [page.name for page in PAGES if page.name in BY_DAY],
    "night": [page.name for page in PAGES if page.name not in BY_DAY],
}


@pytest.fixture(scope="module")
def outcomes(folder: Path) -> Callable[[str], dict[str, str]]:
    """Run the pages of a group, when the first of them is asked for."""
    return functools.cache(lambda group: outcome_of(group, folder))


def outcome_of(group: str, folder: Path) -> dict[str, str]:
    """Return, by page, how it failed; "" if it did not."""
    env = {**os.environ, "PYSPARK_PYTHON": sys.executable, "TF_CPP_MIN_LOG_LEVEL": "2"}
    env["PATH"] = os.pathsep.join([str(folder / "bin"), str(Path(sys.executable).parent), env["PATH"]])
    env["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), env.get("PYTHONPATH")]))
    told = folder / f"{group}.json"
    with (folder / f"{group}.output").open("wb") as output, contextlib.suppress(subprocess.TimeoutExpired):
        command = [sys.executable, str(RUNNER), str(told), *GROUPS[group]]
        subprocess.run(command, cwd=folder, env=env, stdout=output, stderr=output, timeout=MOST_S)
    printed = (folder / f"{group}.output").read_text(errors="replace")
    assert told.exists(), printed
    print("\n".join(line for line in printed.splitlines() if line.startswith("== ")))
    return dict(json.loads(told.read_text()))


@pytest.mark.parametrize(
    ("group", "page"),
    [
        pytest.param(group, page, marks=[pytest.mark.nightly] if group == "night" else [])
        for group in GROUPS
        for page in GROUPS[group]
    ],
)
def test_the_code_of_a_page_can_be_typed_in_from_top_to_bottom(
    group: str, page: str, outcomes: Callable[[str], dict[str, str]]
) -> None:
    outcome = outcomes(group)
    has_code = any(b.page.name == page and b.not_run is None for b in blocks("python", "sh"))
    if not has_code:
        assert page not in outcome
        return
    assert outcome[page] == "", outcome[page]
