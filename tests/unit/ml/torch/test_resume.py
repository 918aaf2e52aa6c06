"""Durable checkpoints of a PyTorch training: when they are written, their contents, and resuming from them."""

from __future__ import annotations

import threading
from collections import Counter, OrderedDict
from dataclasses import replace

import pytest
import torch

import spark_elastic.torch as hvd
from spark_elastic.collective.process import process
from spark_elastic.errors import CheckpointError, InvalidSettingsError
from spark_elastic.ml.callbacks import BestCheckpoint, Callback, EarlyStopping, LambdaCallback
from spark_elastic.ml.torch.training import assemble
from spark_elastic.ml.training.spec import CheckpointPlan
from spark_elastic.runs.checkpoints import Checkpoints
from spark_elastic.runs.tensors import detached, from_bytes, to_bytes
from tests.unit.ml.in_worlds import STEPS, At, EverySteps, TheEnd, best_in, checkpoints_in, close, end, stop_and_resume
from tests.unit.ml.torch import trainings
from tests.unit.ml.torch.trainings import alone, assert_as_undisturbed, make_training
from tests.unit.worlds import WorldDriver


def test_dropout_is_the_same_after_a_resume(data, tmp_path):
    net = trainings.make_net(dropout=0.5)
    changes = {"model": net, "optimizer": trainings.adam}
    whole = alone(make_training(data, tmp_path / "whole", **{**changes, "model": trainings.make_net(dropout=0.5)}))
    expected = whole, trainings.weights(tmp_path / "whole")
    ending = [EverySteps(1), At("on_batch_end", 17, end)]
    with pytest.raises(TheEnd):
        alone(make_training(data, tmp_path / "cut", callbacks=ending, **changes))
    latest = checkpoints_in(tmp_path / "cut").latest()
    torch.manual_seed(99)
    changes["model"] = trainings.make_net(dropout=0.5)
    again = [EverySteps(1), At("on_batch_end", 999, end)]
    result = alone(make_training(data, tmp_path / "cut", callbacks=again, resume_from=latest.name, **changes))
    assert_as_undisturbed(result, tmp_path / "cut", expected)


def test_finished_training_is_not_repeated(data, tmp_path, undisturbed):
    alone(make_training(data, tmp_path))
    latest = checkpoints_in(tmp_path).latest()
    steps = Counter()
    counting = LambdaCallback(on_batch_end=lambda run: steps.update(["step"]))
    with pytest.raises(CheckpointError, match="was written with the callbacks"):
        alone(make_training(data, tmp_path, resume_from=latest.name, callbacks=[counting]))
    result = alone(make_training(data, tmp_path, resume_from=latest.name))
    assert_as_undisturbed(result, tmp_path, undisturbed)


@pytest.mark.parametrize("half", [True, False], ids=["half written", "written"])
@pytest.mark.parametrize("file", ["state.pt", "checkpoint.json"])
def test_only_worker_killed_while_it_writes_a_checkpoint_can_be_resumed(file, half, data, tmp_path, undisturbed):
    with WorldDriver(start_with=1) as driver:
        driver.start(trainings.in_worker_that_checkpoints, data, tmp_path, file, half)
        driver.wait(lambda: driver.told("dying"))
        driver._peers[1].process.join(30)
    latest = checkpoints_in(tmp_path).latest()
    assert latest.step == (13 if half or file == "state.pt" else 26)
    result = alone(make_training(data, tmp_path, resume_from=latest.name))
    assert_as_undisturbed(result, tmp_path, undisturbed)


def test_another_number_of_workers_resumes_to_the_same_result(data, tmp_path, undisturbed):
    with pytest.raises(TheEnd):
        alone(make_training(data, tmp_path, callbacks=[EverySteps(5), At("on_batch_end", 18, end)]))
    latest = checkpoints_in(tmp_path).latest()
    with WorldDriver(start_with=2) as driver:
        driver.start(trainings.in_worker_resumed, data, tmp_path, latest.name, count=2)
        for result in driver.results(2):
            assert_as_undisturbed(result, tmp_path, undisturbed)


@pytest.mark.parametrize("known", [True, False])
def test_new_worker_starts_at_the_checkpoint_in_case_all_others_are_lost(known, data, tmp_path, monkeypatch):
    alone(make_training(data, tmp_path, epochs=1))
    latest = checkpoints_in(tmp_path).latest().name if known else "gone"
    hvd.init()
    try:
        monkeypatch.setattr(type(process), "provisional", True)
        monkeypatch.setattr(hvd, "size", lambda: 1)
        trainer = assemble(make_training(data, tmp_path, resume_from=latest))
        trainer.close()
    finally:
        hvd.shutdown()
    assert trainer.state.at.step == (13 if known else 0)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"order": "lanes"}, "was written with order='global', but order is 'lanes' now"),
        ({"seed": 1}, "was written with seed=0, but seed is 1 now"),
        ({"shuffle": False}, "was written with shuffle=True, but shuffle is False now"),
        ({"metrics": {}}, r"was written with metrics=\['accuracy', 'label_sum'\]"),
        ({"model": torch.nn.Linear(6, 3).double(), "optimizer": torch.optim.SGD}, "another model or optimizer"),
    ],
)
def test_a_checkpoint_of_another_training_is_refused(changes, message, data, tmp_path):
    alone(make_training(data, tmp_path, epochs=1))
    latest = checkpoints_in(tmp_path).latest()
    with pytest.raises(CheckpointError, match=message):
        alone(make_training(data, tmp_path, resume_from=latest.name, **changes))


# --- which are written ------------------------------------------------------------------------------


def test_checkpoints_follow_the_plan_and_the_newest_are_kept(data, tmp_path):
    alone(make_training(data, tmp_path, checkpoints=CheckpointPlan(every_epochs=2, keep=2)))
    assert [facts.step for facts in checkpoints_in(tmp_path).complete()] == [26, STEPS]


def test_storage_that_hangs_does_not_hold_up_the_steps(data, tmp_path, monkeypatch, undisturbed):
    """It answers after the last step, which otherwise would never come."""
    over, steps, write = threading.Event(), Counter(), Checkpoints.write

    def count(run):
        steps.update(["step"])
        if steps["step"] == STEPS:
            over.set()

    monkeypatch.setattr(Checkpoints, "write", lambda self, contents: over.wait(60) and write(self, contents))
    callbacks = [EverySteps(1), LambdaCallback(on_batch_end=count)]
    result = alone(make_training(data, tmp_path, callbacks=callbacks))
    assert steps["step"] == STEPS
    assert_as_undisturbed(result, tmp_path, undisturbed)
    assert checkpoints_in(tmp_path).latest().step == STEPS


def test_without_a_plan_no_checkpoints_are_written(data, tmp_path):
    alone(make_training(data, tmp_path, checkpoints=None))
    assert checkpoints_in(tmp_path).complete() == []


def test_time_can_make_a_checkpoint_due(data, tmp_path):
    plan = CheckpointPlan(every_epochs=None, every_seconds=1e-9, keep=1000)
    alone(make_training(data, tmp_path, checkpoints=plan, epochs=1))
    assert checkpoints_in(tmp_path).complete()[0].step == 1


def test_the_best_by_a_metric_is_kept_whatever_its_age(data, tmp_path):
    plan = CheckpointPlan(keep=1, best_of="lr", mode="max")  # the first epoch has the largest learning rate
    alone(make_training(data, tmp_path, checkpoints=plan, lr_scheduler=trainings.halved_every_epoch))
    assert [(facts.epoch, facts.best) for facts in checkpoints_in(tmp_path).complete()] == [
        (1, ("lr max",)),
        (3, ()),
    ]
    assert best_in(checkpoints_in(tmp_path), "lr max").epoch == 1


def test_the_trained_model_gets_the_weights_of_the_best_epoch(data, tmp_path):
    one_epoch = make_training(data, tmp_path / "one", epochs=1)
    alone(one_epoch)
    callbacks = [BestCheckpoint("lr", mode="max")]
    schedule = trainings.halved_every_epoch
    result = alone(make_training(data, tmp_path / "best", callbacks=callbacks, lr_scheduler=schedule))
    assert result["restored"] == 0
    assert trainings.weights(tmp_path / "best") == close(trainings.weights(tmp_path / "one"))


def test_best_checkpoint_by_another_column_is_kept_and_not_restored(data, tmp_path):
    one_epoch = make_training(data, tmp_path / "one", epochs=1)
    alone(one_epoch)
    changes = {"callbacks": [EarlyStopping("lr", mode="max", patience=9, restore_best=True)]}
    changes["checkpoints"] = CheckpointPlan(keep=1, best_of="steps", mode="max")  # which is best in the last
    result = alone(make_training(data, tmp_path / "two", lr_scheduler=trainings.halved_every_epoch, **changes))
    assert result["restored"] == 0
    assert trainings.weights(tmp_path / "two") == close(trainings.weights(tmp_path / "one"))
    checkpoints = checkpoints_in(tmp_path / "two")
    assert [facts.epoch for facts in checkpoints.complete()] == [1, 3]
    assert (best_in(checkpoints, "lr max").epoch, best_in(checkpoints, "steps max").epoch) == (1, 3)


def test_two_callbacks_cannot_both_choose_the_weights(data, tmp_path):
    callbacks = [BestCheckpoint("loss"), EarlyStopping("val_loss", restore_best=True)]
    with pytest.raises(InvalidSettingsError, match="by loss min and by val_loss min"):
        alone(make_training(data, tmp_path, callbacks=callbacks))


def test_the_best_weights_outlive_the_worker_that_had_found_them_and_a_resume(data, tmp_path):
    alone(make_training(data, tmp_path / "one", epochs=1))
    best = trainings.weights(tmp_path / "one")
    with WorldDriver(start_with=2) as driver:
        driver.start(trainings.in_worker_with_best, data, tmp_path / "two", count=2)
        (result,) = driver.results(1)
        assert result["restored"] == 0
        assert trainings.weights(tmp_path / "two") == close(best)

    def make():
        return {"lr_scheduler": trainings.halved_every_epoch, "callbacks": [BestCheckpoint("lr", mode="max")]}

    result, _ = stop_and_resume(
        trainings, data, tmp_path / "cut", "on_batch_end", 32, CheckpointPlan(), make, every_steps=2
    )
    assert result["restored"] == 0
    assert trainings.weights(tmp_path / "cut") == close(best)


def test_early_stopping_stops_and_a_resume_stays_stopped(data, tmp_path):
    stopping = EarlyStopping("lr", mode="min", patience=1)  # which never falls
    result = alone(make_training(data, tmp_path, callbacks=[stopping], epochs=10))
    assert len(result["history"]) == 2
    assert "lr has not improved on 0.1 in 1 epochs" in result["stopped"]
    latest = checkpoints_in(tmp_path).latest()
    again = make_training(data, tmp_path, callbacks=[EarlyStopping("lr", mode="min")], epochs=10)
    assert len(alone(replace(again, resume_from=latest.name))["history"]) == 2


def test_a_callback_can_stop_in_the_middle_of_an_epoch(data, tmp_path):
    def enough(run):
        if run.step == 4:
            run.stop("that was enough")

    result = alone(make_training(data, tmp_path, callbacks=[LambdaCallback(on_batch_end=enough)]))
    assert result["steps"] == 5
    assert result["stopped"] == "that was enough"
    assert result["history"][0]["rows"] == 5 * 16
    assert "val_loss" in result["history"][0]


def test_restoring_must_be_announced(data, tmp_path):
    class Restores(Callback):
        def on_fit_end(self, run):
            run.restore_best()

    with pytest.raises(ValueError, match="restores_best = True"):
        alone(make_training(data, tmp_path, callbacks=[Restores()]))


# --- what is in them --------------------------------------------------------------------------------


def test_only_tensors_and_plain_values_are_written():
    value = {"a": [torch.ones(2), (1, 2.5, "x", None, True)], "b": OrderedDict(c=Counter([3, 3, 4]))}
    assert repr(from_bytes(to_bytes(detached(value, "it")))) == repr(value)
    with pytest.raises(
        CheckpointError, match=r"it\.a\[1\] is of test_.*which a checkpoint cannot hold|it\.a\[1\] is of"
    ):
        detached({"a": [1, TheEnd()]}, "it")


def test_file_that_would_run_code_is_not_loaded():
    with pytest.raises(CheckpointError, match=r"not what torch\.save has written"):
        from_bytes(to_bytes(TheEnd))
    with pytest.raises(CheckpointError):
        from_bytes(b"nothing of ours")


def test_detached_copy_does_not_change_with_the_original():
    weight = torch.ones(2)
    copy = detached({"weight": weight}, "it")
    weight += 1
    assert copy["weight"].tolist() == [1, 1]
