"""Pictures: what is on them, told by the figure itself."""

from __future__ import annotations

import subprocess
import sys

import pytest

from spark_elastic import reporting
from spark_elastic.errors import MissingExtraError
from spark_elastic.reporting.history import History, draw_training

pytest.importorskip("matplotlib")


def history(epochs: int) -> History:
    rows = [
        {"epoch": n, "steps": 10 * n, "rows": 100, "seconds": 1.0, "ended": 1001.0 + n, "lr": 0.1}
        | {"loss": 1 / (n + 1), "val_loss": 1.1 / (n + 1), "accuracy": 0.9}
        for n in range(epochs)
    ]
    return History(rows)


def event(kind: str, time: float, before: int, after: int, pause_s: float | None = None) -> dict:
    return {"seconds": time - 990, "time": time, "kind": kind, "who": "w", "reason": "r", "before": before} | {
        "after": after,
        "pause_s": pause_s,
        "steps_lost": 0,
        "text": "",
    }


STORM = [event("started", 1000.0, 0, 4), event("lost", 1001.5, 4, 3, 0.1), event("joined", 1003.25, 3, 4, 0.1)]


def test_a_panel_each_for_loss_metrics_and_world():
    figure = draw_training(history(5), STORM, None)
    panels = {panel.get_ylabel(): panel for panel in figure.axes}
    assert list(panels) == ["loss", "accuracy", "workers"]
    assert [line.get_label() for line in panels["loss"].get_lines()[:2]] == ["train", "validation"]
    assert figure.get_suptitle() == "5 epochs, 500 rows; 3 to 4 workers, 1 lost, 1 joined, no step lost"


def test_a_panel_for_work_and_waiting_where_they_are_known():
    work = [{"epoch": n // 2, "rank": n % 2, "work_s": 1.0 + n, "wait_s": 4.0 - n} for n in range(4)]
    figure = draw_training(History(history(2), work), STORM, None)
    assert [panel.get_ylabel() for panel in figure.axes] == ["loss", "accuracy", "seconds", "workers"]
    panel = figure.axes[2]
    assert [list(line.get_ydata()) for line in panel.get_lines()[:4]] == [[1, 3], [2, 4], [4, 2], [3, 1]]
    legend = [text.get_text() for text in panel.get_legend().get_texts()]
    assert legend == ["work (most: rank 1)", "waiting (most: rank 0)"]


@pytest.mark.parametrize("ending", ["png", "svg", "pdf"])
def test_a_picture_is_written_as_its_path_says(tmp_path, ending):
    path = tmp_path / f"plot.{ending}"
    draw_training(history(2), STORM, path)
    assert path.stat().st_size > 1000


def test_without_matplotlib_the_error_names_the_extra(monkeypatch):
    monkeypatch.delitem(sys.modules, "spark_elastic.reporting.figure", raising=False)
    monkeypatch.delattr(reporting, "figure", raising=False)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(MissingExtraError, match=r"extra \[plot\]"):
        draw_training(history(2), STORM, None)


def test_matplotlib_is_imported_when_a_picture_is_asked_for_and_not_before():
    program = "import sys, spark_elastic.ml.model, spark_elastic.jobs.job; sys.exit('matplotlib' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
