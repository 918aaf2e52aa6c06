"""Durable checkpoints of a PyTorch training: when they are written, their contents, and resuming from them."""

import threading
from collections import Counter, OrderedDict
from dataclasses import replace

import pytest
import torch

import spark_elastic.torch as hvd
from spark_elastic.collective.process import process
from spark_elastic.errors import CheckpointError
from spark_elastic.ml.callbacks import BestCheckpoint, Callback, EarlyStopping, LambdaCallback
from spark_elastic.ml.torch.train import assemble
from spark_elastic.ml.training.spec import CheckpointPlan
from spark_elastic.runs.checkpoints import Checkpoints
from spark_elastic.runs.tensors import detached, from_bytes, to_bytes
from tests.unit.ml.in_worlds import STEPS, At, EverySteps, TheEnd, best_in, checkpoints_in, close, end, stop_and_resume
from tests.unit.ml.torch import trainings
from tests.unit.ml.torch.trainings import alone, assert_as_undisturbed, make_training
from tests.unit.worlds import together


def test_finished_training_is_not_repeated(data, tmp_path, undisturbed):
    alone(make_training(data, tmp_path))
    latest = checkpoints_in(tmp_path).latest()
    steps = Counter()
    counting = LambdaCallback(on_batch_end=lambda run: steps.update(["step"]))
    with pytest.raises(CheckpointError, match="was written with the callbacks"):
        alone(make_training(data, tmp_path, resume_from=latest.name, callbacks=[counting]))
    result = alone(make_training(data, tmp_path, resume_from=latest.name))
    assert_as_undisturbed(result, tmp_path, undisturbed)


def test_another_number_of_workers_resumes_to_the_same_result(data, tmp_path, undisturbed):
    with pytest.raises(TheEnd):
        alone(make_training(data, tmp_path, callbacks=[EverySteps(5), At("on_batch_end", 18, end)]))
    latest = checkpoints_in(tmp_path).latest()
    for result in together(trainings.in_worker_resumed, data, tmp_path, latest.name):
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


# --- which are written ------------------------------------------------------------------------------


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


def test_the_best_weights_outlive_the_worker_that_had_found_them_and_a_resume(data, tmp_path):
    alone(make_training(data, tmp_path / "one", epochs=1))
    best = trainings.weights(tmp_path / "one")
    (result,) = together(trainings.in_worker_with_best, data, tmp_path / "two", left=1)
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
