"""Digits learnt with `model.fit` by workers that are killed on the way: as well as without that, each row once."""

import os
import signal
from pathlib import Path

import pytest

from spark_elastic.errors import UserFunctionError
from spark_elastic.membership.timeline import WorldStarted

pytest.importorskip("tensorflow")
PREIMPORT = ("torch", "tensorflow", "keras")
ROWS, BATCH, EPOCHS = 1500, 100, 8
STEPS = ROWS // BATCH * EPOCHS


def learn(folder, kills):
    """kills: {(epoch, batch): rank}; each happens once in the whole job, whoever has that rank then."""
    import keras
    import numpy as np
    from sklearn.datasets import load_digits

    import spark_elastic.keras as hvd

    hvd.init()
    images, labels = load_digits(return_X_y=True)
    images = (images / 16).astype("float32")
    keras.utils.set_random_seed(hvd.rank())
    model = keras.Sequential(
        [keras.layers.Input((64,)), keras.layers.Dense(48, "relu"), keras.layers.Dense(10, "softmax")]
    )
    optimizer = hvd.DistributedOptimizer(keras.optimizers.Adam(0.01))
    model.compile(optimizer, "sparse_categorical_crossentropy", metrics=["accuracy"])
    state = hvd.elastic.KerasState(model, batch=0, epoch=0, rows=[])
    dataset = hvd.elastic.ElasticDataset(images[:ROWS], labels[:ROWS], state=state, batch_size=BATCH)

    class Kills(keras.callbacks.Callback):
        def on_train_batch_begin(self, batch, logs=None):
            marker = Path(folder, f"killed-{state.epoch}-{state.batch}")
            if kills.get((state.epoch, state.batch)) == hvd.rank() and not marker.exists():
                marker.touch()
                os.kill(os.getpid(), signal.SIGKILL)

    class Counts(keras.callbacks.Callback):
        """What all members together have trained on, noted by each of them: it is part of the state."""

        def on_train_batch_end(self, batch, logs=None):
            mine = dataset._mine[batch].tolist()
            state.rows += [row for rows in hvd.allgather_object(mine) for row in rows] if state.epoch < 2 else []

    @hvd.elastic.run
    def loop(state):
        callbacks = [Kills(), Counts(), hvd.elastic.ElasticCallback(state)]
        return model.fit(dataset, initial_epoch=state.epoch, epochs=EPOCHS, verbose=0, callbacks=callbacks)

    history = loop(state)
    counts = np.bincount(state.rows, minlength=ROWS)
    _, accuracy = model.evaluate(images[ROWS:], labels[ROWS:], verbose=0)
    return {
        "steps": int(optimizer.iterations),
        "seen": (int(counts.min()), int(counts.max())),
        "accuracy": accuracy,
        "weights": float(sum(np.abs(v.numpy()).sum() for v in model.weights)),
        "last": history.history["accuracy"][-1],
    }


def sizes(job):
    return [record.size for record in job.events() if isinstance(record, WorldStarted)]


def test_killed_workers_cost_neither_rows_nor_accuracy(start_job, tmp_path):
    alone = start_job(learn, (str(tmp_path), {}), num_proc=1, preimport=PREIMPORT).result(120)[0]
    kills = {(0, 7): 1, (1, 3): 0}
    job = start_job(learn, (str(tmp_path), kills), num_proc=3, min_num_proc=1, preimport=PREIMPORT)
    results = job.result(150)
    assert len(list(tmp_path.glob("killed-*"))) == len(kills)
    assert len(sizes(job)) > len(kills)
    assert len({result["weights"] for result in results}) == 1
    for result in results:
        assert result["steps"] == alone["steps"] == STEPS
        assert result["seen"] == alone["seen"] == (2, 2)
        assert result["accuracy"] == pytest.approx(alone["accuracy"], abs=0.02)
        assert result["accuracy"] > 0.85


def halve(folder, dies):
    import tensorflow as tf

    @tf.function
    def halvings(number):
        found = 0
        while number > 1:  # a loop of the graph once AutoGraph has generated code for it
            number //= 2
            found += 1
        return found

    @tf.function
    def wrong(number):
        return number + "a word"

    marker = Path(folder, "dies")
    found = int(halvings(tf.constant(1024)))
    if dies and not marker.exists():
        marker.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    if not dies:
        wrong(found)
    return found


@pytest.mark.parametrize("dies", [True, False], ids=["killed", "raises"])
def test_workers_leave_no_code_that_tensorflow_has_generated(dies, start_job, tmp_path):
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    env = {"TMPDIR": str(temporary), "PYTHONDONTWRITEBYTECODE": ""}
    job = start_job(halve, (str(tmp_path), dies), num_proc=1, start_timeout=120, env=env, preimport=PREIMPORT)
    if dies:
        assert job.result(240) == [10]
    else:
        with pytest.raises(UserFunctionError, match='return number \\+ "a word"'):
            job.result(240)
    assert not list(temporary.rglob("*autograph*"))
