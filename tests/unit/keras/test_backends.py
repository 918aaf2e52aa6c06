"""Keras on PyTorch with the same classes, and on unsupported backends."""

import os
import subprocess
import sys

import pytest

from tests.nightly import by_night

TORCH_WORLD = """
def gradients(norm, mine):
    import keras, numpy as np, torch
    keras.utils.set_random_seed(1)
    layers = keras.layers
    model = keras.Sequential([keras.Input((4,)), layers.Dense(6), norm(), layers.Dense(3)])
    x = np.random.default_rng(2).normal(size=(8, 4)).astype("float32") * 3 + 5
    y = torch.arange(8)[mine] % 3
    torch.nn.functional.cross_entropy(model(x[mine], training=True), y, reduction="sum").div(8).backward()
    return [v.value.grad for v in model.trainable_variables]

def synchronised(norm):
    import keras, torch
    import spark_elastic.keras as hvd
    import spark_elastic.torch as on_torch
    mine = [slice(0, 5), slice(5, 7), slice(7, 8)][hvd.rank()]
    found = [on_torch.allreduce(grad, op=hvd.Sum) for grad in gradients(norm, mine)]
    expected = gradients(keras.layers.BatchNormalization, slice(0, 8))
    return all(torch.allclose(a, b, rtol=1e-4, atol=1e-6) for a, b in zip(found, expected))

def train(dies):
    # imported here, so that the fork server alone imports them, and not the program that starts it as well
    import keras, numpy as np
    import spark_elastic.keras as hvd
    from spark_elastic.keras.elastic import ElasticCallback, ElasticDataset, KerasState
    from tests.unit.world_link import die, link

    hvd.init()
    assert synchronised(hvd.SyncBatchNormalization)
    assert not synchronised(keras.layers.BatchNormalization)
    keras.utils.set_random_seed(hvd.rank())
    model = keras.Sequential([keras.layers.Input((4,)), keras.layers.Dense(6), keras.layers.BatchNormalization(),
                              keras.layers.Dropout(0.1), keras.layers.Dense(3)])
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.05, momentum=0.9))
    model.compile(optimizer, keras.losses.SparseCategoricalCrossentropy(from_logits=True), metrics=["accuracy"])
    state = KerasState(model, batch=0, epoch=0)
    generator = np.random.default_rng(0)
    x, y = generator.normal(size=(90, 4)).astype("float32"), generator.integers(0, 3, 90)
    data = ElasticDataset(x, y, state=state, batch_size=9)

    class Dies(keras.callbacks.Callback):
        def on_train_batch_begin(self, batch, logs=None):
            if dies.get(link().worker) == (state.epoch, state.batch):
                die()

    @hvd.elastic.run
    def loop(state):
        callbacks = [Dies(), hvd.callbacks.MetricAverageCallback(), ElasticCallback(state)]
        return model.fit(data, initial_epoch=state.epoch, epochs=3, verbose=0, callbacks=callbacks)

    history = loop(state)
    weights = [float(keras.ops.convert_to_numpy(v).astype("float64").sum()) for v in model.trainable_variables]
    return keras.backend.backend(), hvd.size(), state.progress, int(optimizer.iterations), weights, history.history
"""


def in_a_process(code, backend, **more):
    environment = {**os.environ, "KERAS_BACKEND": backend, **more}
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, timeout=120)


@pytest.mark.nightly
def test_keras_on_torch_survives_a_loss_and_synchronises_batch_statistics(tmp_path):
    (tmp_path / "torch_world.py").write_text(TORCH_WORLD)
    run = """
import torch_world
from tests.unit import worlds
worlds.preloaded = lambda: ["torch", "torch._dynamo", "keras", "spark_elastic.keras"]
with worlds.WorldDriver(start_with=3) as driver:
    driver.start(torch_world.train, {2: (1, 4)}, count=3)
    one, other = driver.results(2)
assert one[:4] == other[:4] == ("torch", 2, 30, 30), (one, other)
assert one[4] == other[4]
assert one[5] == other[5]
assert all(len(values) == 3 for values in one[5].values())
"""
    path = os.pathsep.join([str(tmp_path), os.getcwd(), os.environ.get("PYTHONPATH", "")])
    done = in_a_process(run, "torch", PYTHONPATH=path)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("backend", by_night(["jax", "numpy"], but=["jax"]))
def test_unsupported_backend_is_reported_before_keras_imports_it(backend):
    done = in_a_process("import spark_elastic.keras", backend)
    assert f"UsageError: Keras is set to the {backend} backend" in done.stderr
    assert "KERAS_BACKEND=tensorflow or KERAS_BACKEND=torch" in done.stderr
