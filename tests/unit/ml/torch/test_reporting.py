"""The reports of rank 0 during a training."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

from spark_elastic.ml.training.reporting import Reporter, RunView
from spark_elastic.ml.training.spec import Progress, TrainingPhase
from spark_elastic.reporting.history import History
from spark_elastic.wire.messages import LiveProgress
from tests.unit.ml.torch.trainings import ROWS


class Link:
    """A channel that keeps the reports."""

    def __init__(self, broken: bool = False) -> None:
        self.said: list[Any] = []
        self.broken = broken

    def show(self, what: Any) -> bool:
        if not self.broken:
            self.said.append(what)
        return not self.broken


def view_at(at: Progress, rank: int = 0) -> Any:
    dataset = SimpleNamespace(rows=lambda split: 100)
    engine = SimpleNamespace(metrics=SimpleNamespace(live_logs=lambda sums: {}), model=None, optimizer=None)
    view = RunView(SimpleNamespace(epochs=3, dataset=dataset), engine, SimpleNamespace(at=at))  # type: ignore[arg-type]
    view.rank = rank
    return view


def row(epoch: int) -> dict[str, float]:
    return {"epoch": epoch, "seconds": 1.0, "ended": 5.0, "steps": 3, "rows": 100, "lr": 0.1, "loss": 0.5}


def test_only_rank_0_reports():
    link = Link()
    view = view_at(Progress(position=40, serial=4), rank=1)
    reporter = Reporter(view, link)
    reporter.report()
    assert link.said == []
    view.rank = 0
    reporter.report()
    reporter.report()
    assert link.said == [LiveProgress(0, 3, "train", 40, 100, {})]


def test_new_rank_0_reports_the_epochs_that_it_has_seen():
    link = Link()
    history = History([row(0), row(1)])
    view = view_at(Progress(phase=TrainingPhase.VALIDATE, epoch=2, val_position=10, serial=9, history=history))
    Reporter(view, link).report()
    assert [type(said).__name__ for said in link.said] == ["EpochEnded", "EpochEnded", "LiveProgress"]
    assert link.said[-1] == LiveProgress(2, 3, "validate", 10, 100, {})


def test_report_lost_in_a_broken_channel_is_repeated():
    link = Link(broken=True)
    view = view_at(Progress(serial=4, phase=TrainingPhase.EPOCH_END, history=History([row(0)])))
    reporter = Reporter(view, link)
    reporter.report()
    link.broken = False
    view._state.at = replace(view._state.at, serial=5)
    reporter.report()
    assert [said.epoch for said in link.said] == [0]


def test_error_while_reporting_does_not_reach_the_training():
    view = view_at(Progress(position=ROWS, serial=4))
    view.training.dataset = None
    Reporter(view, Link()).report()
