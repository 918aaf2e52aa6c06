"""The notebooks in examples/notebooks: each is run once, from its .py file, and has a twin that was made from it."""

from __future__ import annotations

import getpass
import re
import socket
from concurrent.futures import ThreadPoolExecutor

import nbformat
import pytest

from scripts import notebooks
from tests.nightly import asked, by_night

LEARNT = {
    "01_quickstart": (r"([\d.]+)% of \d+ unseen digits", 92, 100),
    "02_elastic": (r"lost \(killed by signal 9\): 3 -> (\d) workers", 2, 2),
    "03_keras": (r"area under the ROC curve ([\d.]+)", 0.96, 1),
    "04_custom_loop": (r"([\d.]+) after the last", 1, 30),
    "05_cross_validation": (r"accuracy ([\d.]+) on \d+ wines", 0.9, 1),
    "06_from_horovod": (r"explained, by each worker: \[([\d.]+), \1\]", 0.3, 0.7),
    "07_batch_inference": (r"R² ([\d.]+)", 0.9, 1),
}
"""By notebook: what it says in the end, with a number, and between what that number has to be."""
TWINS = [pytest.param(path, id=path.stem) for path in notebooks.sources()]


@pytest.fixture(scope="module")
def running(request):
    """The notebooks that are asked for, two at a time, since each waits a lot."""
    names = asked(request, "name")
    with ThreadPoolExecutor(2) as pool:
        yield {
            path.stem: pool.submit(notebooks.execute, notebooks.notebook_of(path.read_text()))
            for path in notebooks.sources()
            if path.stem in names
        }


BY_DAY = {"06_from_horovod"}
"""The code of the others is also that of pages and tests that run by day."""


@pytest.mark.parametrize("name", by_night(LEARNT, but=BY_DAY))
def test_the_notebook_runs_from_top_to_bottom_and_has_learnt_something(running, name):
    pattern, low, high = LEARNT[name]
    text = shown(running[name].result(300))
    found = re.search(pattern, text)
    assert found is not None, text
    assert low <= float(found.group(1)) <= high, text
    assert "Traceback" not in text


@pytest.mark.parametrize("path", TWINS)
def test_the_twin_was_made_from_the_source(path):
    assert path.stem in LEARNT
    assert notebooks.differs(path) is None, "run: python scripts/notebooks.py"


@pytest.mark.parametrize("path", TWINS)
def test_the_twin_says_nothing_of_the_machine_that_made_it(path):
    twin = notebooks.twin_of(path)
    text = shown(nbformat.read(twin, as_version=4))
    names = [getpass.getuser(), socket.gethostname(), str(notebooks.ROOT)]
    about = [word for word in ("/home/", "/tmp/", "/Users/", *names) if re.search(rf"\b{re.escape(word)}\b", text)]
    assert about == []
    assert twin.stat().st_size < 300_000


def shown(notebook: nbformat.NotebookNode) -> str:
    """All that its cells have printed, as text."""
    outputs = [output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]
    return "\n".join(output.get("text") or output.get("data", {}).get("text/plain", "") for output in outputs)
