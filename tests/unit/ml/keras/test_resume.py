"""Durable checkpoints of a Keras training: their contents, and resuming from them."""

import keras
import numpy as np
import pytest

from spark_elastic.errors import CheckpointError
from spark_elastic.ml.callbacks import BestCheckpoint
from spark_elastic.ml.keras import serialization
from spark_elastic.ml.keras.engine import MODEL_FILE
from spark_elastic.ml.keras.serialization import arrays_from_bytes, arrays_to_bytes
from spark_elastic.ml.training.spec import CheckpointPlan
from tests.unit.ml.in_worlds import EPOCHS, TheEnd, checkpoints_in, stop_and_resume
from tests.unit.ml.keras import trainings
from tests.unit.ml.keras.trainings import OwnStep, alone, close, in_float64, make_net, make_training


def no_number(y_true, y_pred):
    return keras.ops.mean(y_pred, axis=-1) * float("nan")


@pytest.mark.parametrize("kind", ["Keras's own step", "a train_step of one's own"])
def test_nan_loss_ends_the_training_without_a_model(kind, data, tmp_path):
    with in_float64():
        model = make_net() if kind.startswith("Keras") else make_net(kind=OwnStep)
    result = alone(make_training(data, tmp_path, model=model, loss=no_number))
    assert np.isnan(result["diverged"].pop("loss"))
    assert (result["diverged"], result["history"]) == ({"step": 0, "epoch": 0}, [])
    assert result["caused_divergence"] == kind.startswith("Keras")
    assert not (tmp_path / MODEL_FILE).exists()
    assert checkpoints_in(tmp_path).latest() is None
    result = alone(make_training(data, tmp_path, loss=no_number, allow_nan_loss=True))
    assert (result["diverged"], len(result["history"])) == (None, EPOCHS)


def test_the_trained_model_gets_the_weights_of_the_best_epoch_also_after_a_resume(data, tmp_path):
    def make():
        schedule = keras.optimizers.schedules.ExponentialDecay(0.1, 13, 0.5)
        return {"callbacks": [BestCheckpoint("lr", mode="max")], "optimizer": keras.optimizers.SGD(schedule)}

    settings = make()
    alone(make_training(data, tmp_path / "one", epochs=1, optimizer=settings["optimizer"]))
    whole = alone(make_training(data, tmp_path / "best", **settings))
    assert whole["restored"] == 0
    assert trainings.weights(tmp_path / "best") == close(trainings.weights(tmp_path / "one"))
    result, _ = stop_and_resume(
        trainings, data, tmp_path / "cut", "on_batch_end", 32, CheckpointPlan(), make, every_steps=2
    )
    assert result["restored"] == 0
    assert trainings.weights(tmp_path / "cut") == close(trainings.weights(tmp_path / "one"))


# --- what is in files -------------------------------------------------------------------------------


def test_arrays_of_any_type_come_back_and_a_file_that_would_run_code_is_not_loaded(tmp_path):
    given = {"a": keras.ops.cast([1.5, -2.0], "bfloat16").numpy(), "c": np.array(7), "d": np.zeros((0, 2), np.int8)}
    found = arrays_from_bytes(arrays_to_bytes(given))
    for name, one in given.items():
        assert (found[name].dtype, found[name].shape, found[name].tolist()) == (one.dtype, one.shape, one.tolist())
    np.savez(tmp_path / "x.npz", a=np.array([TheEnd()], dtype=object))
    for file in ((tmp_path / "x.npz").read_bytes(), b"nothing of ours"):
        with pytest.raises(CheckpointError, match="not a file of arrays"):
            arrays_from_bytes(file)


def test_weights_fill_models_of_the_same_architecture_alone():
    with in_float64():
        net, other = make_net(norm=True), make_net(norm=True)
        net.set_weights([one + 1 for one in net.get_weights()])
        assert serialization.fill(other, serialization.weights_to_bytes(net)) is other
        assert all(np.array_equal(a, b) for a, b in zip(other.get_weights(), net.get_weights(), strict=True))
        with pytest.raises(CheckpointError, match=r"do not fit .*there are 8 arrays for 4 variables"):
            serialization.fill(make_net(), serialization.weights_to_bytes(net))
