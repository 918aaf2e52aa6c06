"""A training of a Keras model that ended somewhere goes on from its last durable checkpoint, to the same result."""

from __future__ import annotations

import keras
import numpy as np
import pytest

from spark_elastic.data.store import Store
from spark_elastic.errors import CheckpointError
from spark_elastic.ml.callbacks import BestCheckpoint, EarlyStopping
from spark_elastic.ml.checkpoints import Checkpoints
from spark_elastic.ml.keras import serialization
from spark_elastic.ml.keras.engine import MODEL_FILE
from spark_elastic.ml.keras.serialization import arrays_from_bytes, arrays_to_bytes
from spark_elastic.ml.training.spec import CHECKPOINTS, CheckpointPlan
from tests.unit.ml.keras import trainings
from tests.unit.ml.keras.test_training_worlds import assert_as_undisturbed, close
from tests.unit.ml.keras.trainings import (
    EPOCHS,
    OwnStep,
    TheEnd,
    alone,
    dense,
    ending,
    in_float64,
    make_net,
    make_training,
)


def latest_in(folder):
    return Checkpoints(Store.create(folder).sub(CHECKPOINTS)).latest()


def stop_and_resume(data, folder, event, count, plan, make=dict):
    """What the training comes to that ended at an event, was loaded from its latest checkpoint, and went on.

    make: makes the settings anew, as another process would.
    """
    first, again = make(), make()
    callbacks = [*first.pop("callbacks", []), ending(event, count)]
    training = make_training(data, folder, checkpoints=plan, callbacks=callbacks, **first)
    with pytest.raises(TheEnd):
        alone(training)
    latest = latest_in(folder)
    callbacks = [*again.pop("callbacks", []), ending(event, 1 << 30)]  # the same callbacks as before
    training = make_training(data, folder, checkpoints=plan, callbacks=callbacks, resume_from=latest.name, **again)
    return alone(training), latest


def no_number(y_true, y_pred):
    return keras.ops.mean(y_pred, axis=-1) * float("nan")


@pytest.mark.parametrize("kind", ["Keras's own step", "a train_step of one's own"])
def test_a_loss_that_is_no_number_ends_the_training_without_a_model(kind, data, tmp_path):
    with in_float64():
        model = make_net() if kind.startswith("Keras") else make_net(kind=OwnStep)
    result = alone(make_training(data, tmp_path, model=model, loss=no_number))
    assert np.isnan(result["diverged"].pop("loss"))
    assert (result["diverged"], result["history"]) == ({"step": 0, "epoch": 0}, [])
    assert result["lost_here"] == kind.startswith("Keras")
    assert not (tmp_path / MODEL_FILE).exists()
    assert latest_in(tmp_path) is None
    result = alone(make_training(data, tmp_path, loss=no_number, allow_nan_loss=True))
    assert (result["diverged"], len(result["history"])) == (None, EPOCHS)


def moving():
    with in_float64():
        return {
            "model": make_net(dropout=0.3, norm=True),
            "optimizer": keras.optimizers.AdamW(keras.optimizers.schedules.CosineDecay(0.02, 50)),
            "callbacks": [keras.callbacks.EarlyStopping("loss", restore_best_weights=True)],
        }


@pytest.mark.parametrize("make", [dict, moving], ids=["plain", "running means, dropout and slots"])
def test_in_the_middle_of_an_epoch_it_goes_on_after_the_last_row(make, data, tmp_path):
    settings = make()
    callbacks = [*settings.pop("callbacks", []), ending("on_batch_end", 1 << 30)]
    whole = alone(make_training(data, tmp_path / "whole", callbacks=callbacks, **settings))
    expected = whole, trainings.weights(tmp_path / "whole")
    plan = CheckpointPlan(every_epochs=None, every_steps=5)
    result, latest = stop_and_resume(data, tmp_path / "cut", "on_batch_end", 22, plan, make)
    assert latest.step in (5, 10, 15, 20)  # one that comes while another is being written is left out
    assert (latest.epoch, latest.position) == (latest.step // 13, latest.step % 13 * 16)
    assert_as_undisturbed(result, tmp_path / "cut", expected)


@pytest.mark.parametrize(
    ("event", "count"), [("on_epoch_begin", 2), ("on_validation_end", 2), ("on_epoch_end", 3), ("on_fit_end", 1)]
)
def test_between_epochs_it_goes_on_with_the_next(event, count, data, tmp_path, undisturbed):
    result, latest = stop_and_resume(data, tmp_path, event, count, CheckpointPlan(every_epochs=1))
    assert latest.position == 0
    assert_as_undisturbed(result, tmp_path, undisturbed)


def test_more_epochs_than_before_go_on_from_the_end(data, tmp_path, undisturbed):
    alone(make_training(data, tmp_path, epochs=EPOCHS - 1))
    result = alone(make_training(data, tmp_path, resume_from=latest_in(tmp_path).name))
    assert_as_undisturbed(result, tmp_path, undisturbed)


def larger():
    with in_float64():
        return keras.Sequential([keras.Input((6,)), dense(9, 1, activation="tanh"), dense(3, 2)])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"seed": 1}, "was written with seed=0, and now it is 1"),
        ({"metrics": []}, r"was written with metrics=\['loss', 'compile_metrics', "),
        ({"model": larger}, r"another model or optimizer: .*kernel \[6, 8\] is not .*kernel \[6, 9\]"),
        ({"optimizer": lambda: keras.optimizers.Adam(0.1)}, r"another model or optimizer: there are 6 arrays for 10"),
        ({"callbacks": [EarlyStopping("loss")]}, r"written with the callbacks \[\], and now there are \['Early"),
    ],
)
def test_a_checkpoint_of_another_training_is_refused(changes, message, data, tmp_path):
    alone(make_training(data, tmp_path, epochs=1))
    latest = latest_in(tmp_path)
    changes = {name: value() if name in ("model", "optimizer") else value for name, value in changes.items()}
    with pytest.raises(CheckpointError, match=message):
        alone(make_training(data, tmp_path, resume_from=latest.name, **changes))


def test_the_trained_model_gets_the_weights_of_the_best_epoch_also_after_a_resume(data, tmp_path):
    def make():
        schedule = keras.optimizers.schedules.ExponentialDecay(0.1, 13, 0.5)
        return {"callbacks": [BestCheckpoint("lr", mode="max")], "optimizer": keras.optimizers.SGD(schedule)}

    settings = make()
    alone(make_training(data, tmp_path / "one", epochs=1, optimizer=settings["optimizer"]))
    whole = alone(make_training(data, tmp_path / "best", **settings))
    assert whole["restored"] == 0
    assert trainings.weights(tmp_path / "best") == close(trainings.weights(tmp_path / "one"))
    result, _ = stop_and_resume(data, tmp_path / "cut", "on_batch_end", 32, CheckpointPlan(every_steps=2), make)
    assert result["restored"] == 0
    assert trainings.weights(tmp_path / "cut") == close(trainings.weights(tmp_path / "one"))


# --- what is in files -------------------------------------------------------------------------------


def test_arrays_of_types_that_numpy_does_not_know_come_back():
    bfloat16 = keras.ops.cast([1.5, -2.0], "bfloat16").numpy()
    given = {"a": np.arange(6.0).reshape(2, 3), "b": bfloat16, "c": np.array(7), "d": np.zeros((0, 2), np.int8)}
    found = arrays_from_bytes(arrays_to_bytes(given))
    assert {name: (one.dtype, one.shape, one.tolist()) for name, one in found.items()} == {
        name: (one.dtype, one.shape, one.tolist()) for name, one in given.items()
    }


@pytest.mark.parametrize("damage", [lambda file: b"nothing of ours", lambda file: file[:100], lambda file: b""])
def test_what_is_damaged_is_said_to_be(damage):
    with pytest.raises(CheckpointError, match="not a file of arrays"):
        arrays_from_bytes(damage(arrays_to_bytes({"a": np.ones(3)})))


def test_what_would_run_code_is_not_loaded(tmp_path):
    np.savez(tmp_path / "x.npz", a=np.array([TheEnd()], dtype=object))
    with pytest.raises(CheckpointError, match="not a file of arrays"):
        arrays_from_bytes((tmp_path / "x.npz").read_bytes())


def test_weights_fill_models_of_the_same_architecture_alone():
    with in_float64():
        net, other = make_net(norm=True), make_net(norm=True)
        net.set_weights([one + 1 for one in net.get_weights()])
        assert serialization.fill(other, serialization.weights_to_bytes(net)) is other
        assert all(np.array_equal(a, b) for a, b in zip(other.get_weights(), net.get_weights(), strict=True))
        with pytest.raises(CheckpointError, match=r"do not fit .*there are 8 arrays for 4 variables"):
            serialization.fill(make_net(), serialization.weights_to_bytes(net))
