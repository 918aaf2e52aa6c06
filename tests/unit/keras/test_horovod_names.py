"""The names of Horovod's Keras namespaces that programs use."""

from pathlib import Path

import keras
import numpy as np
import pytest

import spark_elastic.keras as hvd
import spark_elastic.tensorflow.keras as hvd_tf
from spark_elastic.errors import UsageError
from tests.nightly import by_night
from tests.unit.worlds import together


def two_layers(first, second):
    model = keras.Sequential([keras.layers.Input((1,)), keras.layers.Dense(1), keras.layers.Dense(1)])
    model.set_weights([np.full(w.shape, value, "f4") for w, value in zip(model.weights, first + second, strict=True)])
    return model


def partial(passes):
    import tensorflow as tf

    hvd.init()
    r, n = hvd.rank(), hvd.size()
    checks = {}
    one = [np.float32(r + 1)] * 1
    checks["allreduce"] = float(hvd.allreduce(one)[0]) == (n + 1) / 2
    checks["sum"] = float(hvd.allreduce(one, op=hvd.Sum)[0]) == n * (n + 1) / 2
    checks["allgather"] = np.asarray(hvd.allgather(one)).tolist() == [k + 1.0 for k in range(n)]
    checks["broadcast"] = float(hvd.broadcast(float(r), 1)) == 1.0
    checks["reducescatter"] = np.asarray(hvd.reducescatter([1.0] * n, op=hvd.Sum)).tolist() == [float(n)]
    for scale in (True, False):
        model = two_layers([1.0, 0.0], [1.0, 0.0])
        optimizer = hvd.PartialDistributedOptimizer(
            keras.optimizers.SGD(1.0),
            local_layers=model.layers[:1],
            scale_local_gradients=scale,
            backward_passes_per_step=passes,
            average_aggregated_gradients=True,
        )
        grads = [tf.fill(w.shape, float(r + 1)) for w in model.trainable_variables]

        @tf.function
        def step(optimizer=optimizer, model=model, grads=grads):
            optimizer.apply_gradients(zip(grads, model.trainable_variables, strict=True))

        for _ in range(passes):
            step()
        own = (r + 1) / n if scale else r + 1.0
        expected = [1 - own, -own, 1 - (n + 1) / 2, -(n + 1) / 2]
        found = [float(np.asarray(w).item()) for w in model.weights]
        checks[f"local layers, {scale}"] = np.allclose(found, expected)
    model = two_layers([1.0, 0.0], [1.0, 0.0])
    optimizer = hvd.PartialDistributedOptimizer(keras.optimizers.SGD(1.0), local_layers=model.layers[0])
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(model(tf.fill([1, 1], float(r + 1)))) * 1.0
    pairs = optimizer.compute_gradients(loss, model.trainable_variables, tape=tape)
    mean = (n + 1) / 2
    checks["computed"] = np.allclose([float(tf.squeeze(g)) for g, _ in pairs], [(r + 1) / n, 1 / n, mean, 1.0])
    optimizer.apply_gradients(pairs)
    found = [float(np.asarray(w).item()) for w in model.weights]
    checks["applied once"] = np.allclose(found, [1 - (r + 1) / n, -1 / n, 1 - mean, -1.0])
    checks["counted"] = int(optimizer.steps_applied()) == 1
    model = two_layers([float(r)] * 2, [float(r)] * 2)
    callback = hvd.callbacks.BroadcastGlobalVariablesCallback(1, local_variables=model.layers[0].variables)
    model.compile(loss="mse")
    model.trainable = False
    model.fit(np.ones((1, 1), "f4"), np.ones((1, 1), "f4"), callbacks=[callback], verbose=0)
    found = [float(np.asarray(w).item()) for w in model.weights]
    checks["broadcast without local variables"] = found == [r, r, 1, 1]
    return checks


@pytest.mark.parametrize("passes", by_night([1, 2], but=[2]))
def test_collectives_on_values_and_local_layers(passes):
    for checks in together(partial, passes):
        assert [name for name, right in checks.items() if not right] == []


def best(folder):
    hvd.init()
    model = two_layers([1.0, 0.0], [1.0, 0.0])
    model.compile("sgd", "mse")
    checkpoint = hvd.callbacks.BestModelCheckpoint("loss", filepath=str(Path(folder, f"{hvd.rank()}.keras")))
    model.fit(np.ones((2, 1), "f4"), np.zeros((2, 1), "f4"), epochs=2, verbose=0, callbacks=[checkpoint])
    return checkpoint.best < 1.0


@pytest.mark.nightly
def test_best_model_is_written_by_rank_0_and_tracked_by_all_members(tmp_path):
    assert together(best, str(tmp_path)) == [True, True]
    assert [path.name for path in tmp_path.iterdir()] == ["0.keras"]


def test_optimizer_restored_from_its_config_is_distributed(alone):
    optimizer = hvd.DistributedOptimizer(keras.optimizers.Adam(0.25), backward_passes_per_step=3)
    again = optimizer.from_config(optimizer.get_config())
    assert again.get_config() == optimizer.get_config()
    assert again.backward_passes_per_step == 3
    plain = optimizer.__class__.from_config(optimizer.get_config())
    assert type(plain) is keras.optimizers.Adam


def test_old_name_of_the_learning_rate_is_accepted_with_a_warning(alone):
    for optimizer in (keras.optimizers.SGD(0.5), hvd.DistributedOptimizer(keras.optimizers.SGD(0.5))):
        old_name(optimizer)
    assert "lr" not in keras.optimizers.SGD(0.5).get_config()


def old_name(optimizer):
    with pytest.warns(UserWarning, match="learning_rate"):
        optimizer.lr.assign(0.25)
    assert float(optimizer.learning_rate.numpy()) == 0.25
    with pytest.warns(UserWarning, match="learning_rate"):
        optimizer.lr = 0.125
    assert float(optimizer.learning_rate.numpy()) == 0.125


def test_compile_argument_of_keras_2_is_accepted_with_a_warning(alone, tmp_path):
    model = two_layers([1.0, 0.0], [1.0, 0.0])
    with pytest.warns(UserWarning, match="experimental_run_tf_function"):
        model.compile(hvd.DistributedOptimizer("sgd"), "mse", experimental_run_tf_function=False)
    model.save(tmp_path / "model.keras")
    assert hvd.load_model(tmp_path / "model.keras").optimizer.backward_passes_per_step == 1
    with pytest.raises(TypeError):
        model.compile("sgd", "mse", experimental_something=False)


def test_local_layers_that_are_not_layers_and_global_variables_are_refused(alone):
    assert hvd_tf is hvd
    with pytest.raises(RuntimeError, match="BroadcastGlobalVariablesCallback"):
        hvd.broadcast_global_variables(0)
    with pytest.raises(UsageError, match="local_layers"):
        hvd.PartialDistributedOptimizer("sgd", local_layers=["dense"])
