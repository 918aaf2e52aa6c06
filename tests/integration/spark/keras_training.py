"""`training.train` once more, with `model.fit`: the same diary, and the same points to be held at.

What a worker writes at a step stands in callbacks, one before and one after `ElasticCallback`, whose place must not
matter.
"""

from __future__ import annotations

import hashlib
import os
import time
from pathlib import Path
from typing import Any

from tests.integration.spark.training import FEATURES, ROWS, STEP_S, Notes, Points, _hold_at_calls

BATCH = 12
"""Of all workers together: with up to 4 of them the shares are equal."""


def train(folder: str, steps_per_execution: int = 1, validate: bool = False) -> dict[str, Any]:
    """Train a small network, epoch by epoch, until `folder/finish` is there at the end of an epoch."""
    import keras
    import numpy as np

    import spark_elastic.collective.group as groups
    import spark_elastic.elastic.handlers as elastic_handlers
    import spark_elastic.keras as hvd
    from spark_elastic.collective.process import process

    at, note = Points(folder), Notes(folder)
    note("up")
    _hold_at_calls(at, groups.Group, "connect", "rendezvous")
    _hold_at_calls(at, elastic_handlers, "take_over", "sync", lambda: hvd.rank())
    hvd.init()
    note("initialised", rank=hvd.rank(), size=hvd.size(), local_rank=hvd.local_rank(), local_size=hvd.local_size())

    keras.utils.set_random_seed(os.getpid() % 100_000)  # only a sync can make them equal
    layers = [keras.layers.Input((FEATURES,)), keras.layers.Dense(16, "tanh"), keras.layers.Dropout(0.1)]
    model = keras.Sequential([*layers, keras.layers.Dense(1)])
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.05, momentum=0.9))
    model.compile(optimizer, "mse", metrics=["mae"], steps_per_execution=steps_per_execution)
    fixed = np.random.default_rng(1)
    inputs = fixed.normal(size=(ROWS, FEATURES)).astype("float32")
    targets = np.sin(inputs.sum(axis=1, keepdims=True))
    state = hvd.elastic.KerasState(model, batch=0, epoch=0)
    state.register_reset_callbacks([lambda: note("reset", rank=hvd.rank(), size=hvd.size())])
    dataset = hvd.elastic.ElasticDataset(inputs, targets, state=state, batch_size=BATCH)
    finish = Path(folder, "finish")

    def digest() -> str:
        sums = hashlib.sha1()
        for variable in [*model.trainable_variables, *optimizer.variables]:
            sums.update(variable.numpy().tobytes())
        return sums.hexdigest()[:12]

    def place() -> dict[str, int]:
        round = process.assignment.world.round if process.assignment is not None else 0
        return {"round": round, "rank": hvd.rank(), "size": hvd.size()}

    class Before(keras.callbacks.Callback):  # type: ignore[misc]
        def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
            if batch >= len(dataset._mine):
                return  # of an epoch that was left after its last batch, only the end is to come
            time.sleep(STEP_S)
            rows = dataset._mine[batch].tolist()
            note("tries", step=int(optimizer.iterations) + 1, epoch=state.epoch, rows=rows, before=digest(), **place())
            at("step", hvd.rank())

        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            if any(hvd.allgather_object(finish.exists())):
                self.model.stop_training = True

    class After(keras.callbacks.Callback):  # type: ignore[misc]
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            note("applied", step=int(optimizer.iterations), epoch=state.epoch, after=digest(), **place())
            at("applied", hvd.rank())

        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            note("epoch", number=epoch, known=state.epoch - 1, logs={k: float(v) for k, v in logs.items()}, **place())

    @hvd.elastic.run
    def loop(state: Any) -> None:
        callbacks = [Before(), hvd.callbacks.MetricAverageCallback(), hvd.elastic.ElasticCallback(state), After()]
        held_out = (inputs[:8], targets[:8]) if validate else None
        model.fit(
            dataset,
            initial_epoch=state.epoch,
            epochs=1_000_000,
            verbose=0,
            callbacks=callbacks,
            validation_data=held_out,
        )

    loop(state)
    note("end", step=int(optimizer.iterations), **place())
    end = {"pid": os.getpid(), "step": int(optimizer.iterations), "epoch": state.epoch, "digest": digest()}
    return {**place(), **end}
