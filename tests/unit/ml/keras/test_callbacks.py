"""Callbacks of Keras in a training: their calls and arguments, and the attributes that survive a lost worker."""

import csv
import json
from pathlib import Path

import keras
import numpy as np
import pytest

from spark_elastic.errors import InvalidSettingsError
from spark_elastic.ml.keras.engine import MODEL_FILE
from spark_elastic.ml.keras.serialization import arrays_from_bytes
from tests.unit.ml.keras import trainings
from tests.unit.ml.keras.trainings import EPOCHS, STEPS, alone, close, make_training
from tests.unit.worlds import together


def noting(event):
    """Return a method that writes its call to a file, because the worker has a copy of the callback."""

    def note(self, at=None, logs=None):
        with Path(self.path).open("a") as file:
            file.write(json.dumps([event, self.params if event == "train_begin" else at, logs], default=float) + "\n")

    return note


class Diary(keras.callbacks.Callback):
    def __init__(self, path):
        super().__init__()
        self.path = str(path)

    on_train_begin, on_train_end = noting("train_begin"), noting("train_end")
    on_epoch_begin, on_epoch_end = noting("epoch_begin"), noting("epoch_end")
    on_train_batch_begin, on_train_batch_end = noting("batch_begin"), noting("batch_end")
    on_test_begin, on_test_end, on_test_batch_end = noting("test_begin"), noting("test_end"), noting("test_batch_end")


def test_keras_callbacks_are_called_as_in_model_fit(data, tmp_path):
    result = alone(make_training(data, tmp_path, callbacks=[Diary(tmp_path / "diary")], epochs=2))
    told = [json.loads(line) for line in (tmp_path / "diary").read_text().splitlines()]
    an_epoch = ["epoch_begin", *["batch_begin", "batch_end"] * 13, "test_begin", *["test_batch_end"] * 5, "test_end"]
    assert [event for event, *_ in told] == ["train_begin", *[*an_epoch, "epoch_end"] * 2, "train_end"]
    assert told[0][1] == {"verbose": 0, "epochs": 2, "steps": 13}
    row = result["history"][0]
    ends = [args for event, *args in told if event == "batch_end"]
    assert [batch for batch, _ in ends] == [*range(13)] * 2
    assert ends[12][1] == close({name: row[name] for name in ("loss", "accuracy", "label_sum")})
    assert [at for event, at, _ in told if event == "test_batch_end"] == [*range(5)] * 2
    (epoch, logs), _ = (args for event, *args in told if event == "epoch_end")
    assert (epoch, sorted(logs)) == (0, sorted([*ends[0][1], *(f"val_{name}" for name in ends[0][1])]))
    assert logs == close({name: row[name] for name in logs})


def test_early_stopping_stops_and_restores_the_best_weights(data, tmp_path):
    alone(make_training(data, tmp_path / "one", epochs=1))
    stopping = keras.callbacks.EarlyStopping("label_sum", mode="max", patience=1, restore_best_weights=True)
    result = alone(make_training(data, tmp_path / "best", callbacks=[stopping], epochs=10))
    assert len(result["history"]) == 2, "which is the same in all epochs"
    assert result["stopped"] == "EarlyStopping has set model.stop_training"
    assert trainings.weights(tmp_path / "best") == close(trainings.weights(tmp_path / "one"))


def halved(epoch, rate):
    return rate / 2 if epoch else rate


def test_learning_rate_set_by_a_callback_is_used_and_seen_by_others(data, tmp_path):
    reducing = keras.callbacks.ReduceLROnPlateau("label_sum", mode="max", factor=0.1, patience=1)
    scheduler = keras.callbacks.LearningRateScheduler(halved)
    logger = keras.callbacks.CSVLogger(str(tmp_path / "log.csv"))
    result = alone(make_training(data, tmp_path, callbacks=[scheduler, logger], epochs=3))
    assert [row["lr"] for row in result["history"]] == pytest.approx([0.1, 0.05, 0.025])
    rows = list(csv.DictReader((tmp_path / "log.csv").open()))
    assert [float(row["learning_rate"]) for row in rows] == pytest.approx([0.1, 0.05, 0.025])
    assert [float(row["val_loss"]) for row in rows] == [row["val_loss"] for row in result["history"]]
    result = alone(make_training(data, tmp_path / "2", callbacks=[reducing], epochs=4))
    assert [row["lr"] for row in result["history"]] == pytest.approx([0.1, 0.1, 0.01, 0.001])


def test_a_training_can_be_stopped_in_the_middle_of_an_epoch(data, tmp_path):
    result = alone(make_training(data, tmp_path, callbacks=[StopsAtTheFifth()]))
    assert result["steps"] == 6, "the wish travels with the next step"
    assert result["history"][0]["rows"] == 6 * 16


class StopsAtTheFifth(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        self.model.stop_training = self.model.stop_training or batch == 4


def test_model_checkpoint_callback_writes_files_of_keras(data, tmp_path):
    checkpoint = keras.callbacks.ModelCheckpoint(str(tmp_path / "{epoch}.keras"), save_best_only=False)
    weights = keras.callbacks.ModelCheckpoint(str(tmp_path / "x.weights.h5"), save_weights_only=True, save_freq=5)
    alone(make_training(data, tmp_path / "run", callbacks=[checkpoint, weights], epochs=2))
    saved = keras.saving.load_model(tmp_path / "2.keras", custom_objects={"LabelSum": trainings.LabelSum})
    trained = arrays_from_bytes((tmp_path / "run" / MODEL_FILE).read_bytes())
    assert all(np.array_equal(a, b) for a, b in zip(saved.get_weights(), trained.values(), strict=True))
    assert int(saved.optimizer.iterations) == 26
    assert (tmp_path / "1.keras").exists()
    assert (tmp_path / "x.weights.h5").exists()


@pytest.mark.parametrize(
    ("callback", "said"),
    [
        (lambda: keras.callbacks.BackupAndRestore("x"), "BackupAndRestore .*checkpoint_dir and run_id"),
        (keras.callbacks.SwapEMAWeights, "SwapEMAWeights .*use_ema=True"),
        (lambda: len, "not of <built-in function len>"),
    ],
)
def test_unsupported_keras_callbacks_are_refused(callback, said, data, tmp_path):
    with pytest.raises(InvalidSettingsError, match=said):
        alone(make_training(data, tmp_path, callbacks=[callback()]))


# --- what is remembered -----------------------------------------------------------------------------


class Remembering(keras.callbacks.Callback):
    """A callback with plain values, arrays, and attributes that cannot be kept."""

    def __init__(self):
        super().__init__()
        self.count, self.seen = 0, []
        self.sums = np.zeros(2)
        self.opened = None

    def on_train_begin(self, logs=None):
        self.opened = iter([])
        self.count = 0

    def on_epoch_end(self, epoch, logs=None):
        self.count += 1
        self.seen.append((epoch, {"loss": logs["loss"]}))
        self.sums += [1, logs["accuracy"]]


def in_worker_that_remembers(data, folder, victim):
    from tests.unit.world_link import die, link

    ends = trainings.At("on_batch_end", 20, die if link().worker == victim else trainings._nothing)
    checkpoint = keras.callbacks.ModelCheckpoint(
        str(folder / "best.keras"), "label_sum", save_best_only=True, mode="max"
    )
    stopping = keras.callbacks.EarlyStopping("lr_told", mode="min", patience=99)
    remembering = Remembering()
    logger = keras.callbacks.CSVLogger(str(folder / "log.csv"))
    training = make_training(data, folder, callbacks=[])
    from spark_elastic.ml.keras import engine

    plain = engine.adapt_callbacks
    given = [remembering, checkpoint, logger, stopping, ends]
    engine.adapt_callbacks = lambda _, *rest: plain(given, *rest)
    result = trainings.outcome(training)
    return {
        **result,
        "count": remembering.count,
        "epochs": [epoch for epoch, _ in remembering.seen],
        "sums": remembering.sums.tolist(),
        "best": checkpoint.best,
    }


@pytest.mark.nightly
def test_attributes_of_callbacks_survive_the_loss_of_rank_0(data, tmp_path):
    (result,) = together(in_worker_that_remembers, data, tmp_path, 1, left=1)
    assert result["steps"] == STEPS
    assert (result["count"], result["epochs"]) == (EPOCHS, [0, 1, 2])
    assert result["sums"] == close([3.0, sum(row["accuracy"] for row in result["history"])])
    assert result["best"] == result["history"][0]["label_sum"], "remembered by whoever has rank 0 after it was lost"
    rows = list(csv.DictReader((tmp_path / "log.csv").open()))
    assert [int(row["epoch"]) for row in rows] == [0, 1, 2]
    assert [float(row["loss"]) for row in rows] == close([row["loss"] for row in result["history"]])
