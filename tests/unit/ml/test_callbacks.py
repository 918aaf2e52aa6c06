"""The callbacks that come with it, on a training that is only played."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest

from spark_elastic.errors import CheckpointError, InvalidSettingsError
from spark_elastic.ml.callbacks import BestCheckpoint, EarlyStopping, HistoryLogger, LambdaCallback, Monitor
from spark_elastic.reporting.history import History


class Played(SimpleNamespace):
    """A run that writes down what it was asked for."""

    def __init__(self, rank: int = 0) -> None:
        super().__init__(rank=rank, epoch=0, history=History(), stopped="", bests=[], restored=False)

    def stop(self, reason):
        self.stopped = reason

    def checkpoint(self, *, best=False):
        self.bests.append(self.epoch)

    def restore_best(self):
        self.restored = True

    def play(self, callback, name, values):
        for value in values:
            row = {"epoch": self.epoch, name: value}
            callback.on_epoch_end(self, row)
            self.history = self.history.with_row(row)
            self.epoch += 1
            if self.stopped:
                break
        callback.on_fit_end(self)
        return self


def test_early_stopping_stops_after_patience_epochs_without_improvement():
    run = Played().play(EarlyStopping(patience=2), "val_loss", [3, 2, 2.5, 1.9, 1.9, 2.0, 1.0])
    assert run.epoch == 6
    assert "val_loss has not improved on 1.9 in 2 epochs" in run.stopped
    assert not run.restored
    assert Played().play(EarlyStopping(patience=1, min_delta=0.5), "val_loss", [3, 2.6, 1]).epoch == 2
    assert Played().play(EarlyStopping(patience=2), "val_loss", [float("nan"), float("nan"), 1]).epoch == 2


def test_auto_mode_prefers_a_larger_accuracy():
    assert Played().play(EarlyStopping("val_accuracy", patience=1), "val_accuracy", [0.1, 0.2, 0.1, 0.3]).epoch == 3
    assert Monitor("val_loss").mode == "min"
    assert Monitor("loss", "max").mode == "max"


def test_state_of_early_stopping_includes_its_counter():
    first, second = EarlyStopping(patience=2), EarlyStopping(patience=2)
    Played().play(first, "val_loss", [1, 2])
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert Played().play(second, "val_loss", [2, 0]).epoch == 1


def test_unknown_monitor_is_reported_with_the_known_columns():
    with pytest.raises(InvalidSettingsError, match=r"no 'val_los' to monitor; there are epoch, val_loss"):
        Played().play(EarlyStopping("val_los"), "val_loss", [1])


def test_each_best_epoch_is_checkpointed_and_the_last_one_restored():
    callback = BestCheckpoint("val_loss")
    run = Played().play(callback, "val_loss", [3, 2, 4, 1, 5])
    assert run.bests == [0, 1, 3]
    assert run.restored
    assert callback.restores_best
    assert not Played().play(BestCheckpoint("val_loss", restore=False), "val_loss", [3]).restored


def test_lambda_callback_refuses_an_unknown_event():
    with pytest.raises(InvalidSettingsError, match="did you mean on_epoch_end"):
        LambdaCallback(on_epoch_ends=print)


@pytest.mark.parametrize("rank", [0, 1])
def test_only_rank_0_writes_the_history(rank, tmp_path):
    path = tmp_path / "logs" / "history.csv"
    Played(rank).play(HistoryLogger(path), "loss", [2, 1])
    if rank:
        assert not path.exists()
    else:
        assert path.read_text() == "epoch,loss\n0,2\n1,1\n"


def test_new_rank_0_writes_the_whole_history(tmp_path):
    path = tmp_path / "history.jsonl"
    run = Played()
    run.history = History([{"epoch": 0, "loss": 3}])
    HistoryLogger(path).on_epoch_end(run, {"epoch": 1, "loss": 2})
    assert [json.loads(line)["loss"] for line in path.read_text().splitlines()] == [3, 2]


def test_a_history_gives_rows_columns_and_the_best():
    history = History([{"epoch": 0, "loss": 2.0}, {"epoch": 1, "loss": 1.0, "accuracy": 0.5}])
    assert history["loss"] == [2.0, 1.0]
    assert history["accuracy"] == [None, 0.5]
    assert history[1]["epoch"] == 1
    assert history.best("loss") == history[1]
    assert History.from_json(json.loads(history.dumps())) == history
    with pytest.raises(KeyError, match="epoch, loss, accuracy"):
        history["los"]
    with pytest.raises(CheckpointError, match="not a history"):
        History.from_json({"loss": 1})
