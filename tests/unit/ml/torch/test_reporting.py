"""What rank 0 tells of a training while it goes on."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

import spark_elastic.torch as hvd
from spark_elastic.ml.torch.training import _assemble
from spark_elastic.ml.training.progress import Progress, TrainingPhase
from spark_elastic.ml.training.reporting import Reporter, RunView
from spark_elastic.reporting.history import History
from spark_elastic.wire.messages import EpochEnded, LiveProgress
from tests.unit.ml.torch.trainings import EPOCHS, ROWS, make_training


class Link:
    """Keeps what it is told."""

    def __init__(self, broken: bool = False) -> None:
        self.said: list[Any] = []
        self.broken = broken

    def show(self, what: Any) -> bool:
        if not self.broken:
            self.said.append(what)
        return not self.broken


def view_at(at: Progress, rank: int = 0) -> Any:
    dataset = SimpleNamespace(rows=lambda split: 100)
    engine = SimpleNamespace(live_logs=lambda sums: {})
    view = RunView(SimpleNamespace(epochs=3, dataset=dataset), engine, SimpleNamespace(at=at))  # type: ignore[arg-type]
    view.rank = rank
    return view


def row(epoch: int) -> dict[str, float]:
    return {"epoch": epoch, "seconds": 1.0, "ended": 5.0, "steps": 3, "rows": 100, "lr": 0.1, "loss": 0.5}


def test_each_epoch_of_a_training_is_told_with_what_it_has_come_to(data, tmp_path):
    hvd.init()
    try:
        trainer = _assemble(make_training(data, tmp_path))
        link = Link()
        trainer.reporter = Reporter(trainer.view, link)
        result = trainer.run()
    finally:
        hvd.shutdown()
    ended = [said for said in link.said if isinstance(said, EpochEnded)]
    assert [(said.epoch, said.epochs) for said in ended] == [(epoch, EPOCHS) for epoch in range(EPOCHS)]
    assert [said.values["val_loss"] for said in ended] == result.history["val_loss"]
    assert "lr" not in ended[0].values


def test_what_can_be_told_at_any_moment_is_what_the_history_would_say(data, tmp_path):
    hvd.init()
    told = []
    try:
        trainer = _assemble(make_training(data, tmp_path))
        logs = trainer.engine.logs

        def both(sums: Any, pieces: Any, prefix: str = "") -> Any:
            out = logs(sums, pieces, prefix)
            told.append(
                (trainer.engine.live_logs(sums), {name.removeprefix("val_"): value for name, value in out.items()})
            )
            return out

        trainer.engine.logs = both
        trainer.run()
    finally:
        hvd.shutdown()
    assert told
    for now, later in told:
        assert now == pytest.approx(later)


def test_only_rank_0_tells():
    link = Link()
    view = view_at(Progress(position=40, serial=4), rank=1)
    reporter = Reporter(view, link)
    reporter.report()
    assert link.said == []
    view.rank = 0
    reporter.report()
    assert link.said == [LiveProgress(0, 3, "train", 40, 100, {})]


def test_a_new_rank_0_tells_the_epochs_that_it_has_seen():
    link = Link()
    history = History([row(0), row(1)])
    view = view_at(Progress(phase=TrainingPhase.VALIDATE, epoch=2, val_position=10, serial=9, history=history))
    Reporter(view, link).report()
    assert [type(said).__name__ for said in link.said] == ["EpochEnded", "EpochEnded", "LiveProgress"]
    assert link.said[-1] == LiveProgress(2, 3, "validate", 10, 100, {})


def test_nothing_is_told_twice_where_nothing_has_changed():
    link = Link()
    view = view_at(Progress(position=40, serial=4))
    reporter = Reporter(view, link)
    reporter.report()
    reporter.report()
    assert len(link.said) == 1


def test_what_a_broken_channel_has_not_taken_is_told_again():
    link = Link(broken=True)
    view = view_at(Progress(serial=4, phase=TrainingPhase.EPOCH_END, history=History([row(0)])))
    reporter = Reporter(view, link)
    reporter.report()
    link.broken = False
    view._state.at = replace(view._state.at, serial=5)
    reporter.report()
    assert [said.epoch for said in link.said] == [0]


def test_an_error_while_telling_stays_there():
    view = view_at(Progress(position=ROWS, serial=4))
    view.training.dataset = None
    Reporter(view, Link()).report()
