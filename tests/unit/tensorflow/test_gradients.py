"""The fused reduction of a step's gradients, and the errors of a lost peer through TensorFlow."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

import spark_elastic.tensorflow as hvd
from spark_elastic.errors import UsageError
from spark_elastic.tensorflow.gradients import GradientReducer
from tests.unit.tensorflow.test_operations import both_ways
from tests.unit.worlds import together


def reduced_steps():
    hvd.init()
    r, n = hvd.rank(), hvd.size()
    checks = {}
    mean = sum(range(n)) / n

    def grads(step):
        factor = float(r) + step
        return [
            tf.fill([3, 5], factor),
            None,
            tf.cast(tf.fill([2], factor), tf.float64),
            tf.cast(tf.fill([7], factor), tf.bfloat16),
            tf.IndexedSlices(tf.fill([1, 2], factor), tf.constant([r], tf.int64), tf.constant([n, 2], tf.int64)),
            tf.fill([], factor),
        ]

    for how, compression, dense in (
        ("plain", hvd.Compression.none, False),
        ("compressed", hvd.Compression.fp16, True),
    ):
        reducer = GradientReducer(compression=compression, sparse_as_dense=dense)
        for mode, call in zip(("eager", "graph"), both_ways(lambda g, c, reducer=reducer: reducer(g, c)), strict=True):
            kept = []
            for step in range(6):  # more steps than there are sets of buckets, and all results are kept
                carried = tf.constant([r + step, 1.0], tf.float64)
                out, sums = call(grads(float(step)), carried)
                kept.append(out)
                checks[f"{how} {mode} carried {step}"] = sums.numpy().tolist() == [
                    sum(k + step for k in range(n)),
                    float(n),
                ]
            for step, out in enumerate(kept):
                expected = mean + step
                exact, coarse = (1e-6, 1e-2) if how == "plain" else (1e-3, 1e-2)  # of bfloat16 is the fourth
                precision = {0: exact, 2: exact, 3: coarse, 5: exact}
                right = [
                    np.allclose(tf.cast(out[at], tf.float64).numpy(), expected, rtol=rtol)
                    for at, rtol in precision.items()
                ]
                sparse = tf.convert_to_tensor(out[4]).numpy()[:, 0]
                right.append(np.allclose(sparse, [(k + step) / n for k in range(n)], rtol=exact))
                right += [out[1] is None, out[0].shape == (3, 5), out[3].dtype == tf.bfloat16]
                checks[f"{how} {mode} {step}"] = all(right)
    total, _ = GradientReducer(op=hvd.Sum)([tf.fill([2], float(r))])
    checks["sum"] = total[0].numpy().tolist() == [float(sum(range(n)))] * 2
    divided, sums = GradientReducer(predivide=2.0)([tf.fill([2], float(r))], tf.constant([1.0]))
    checks["predivided"] = np.allclose(divided[0].numpy(), mean) and sums.numpy().tolist() == [n]
    alone, sums = GradientReducer()([None], tf.constant([float(r)]))
    checks["nothing but numbers"] = alone == [None] and sums.numpy().tolist() == [float(sum(range(n)))]
    return checks


@pytest.mark.parametrize("count", [2, 3])
def test_gradients_of_every_kind_are_averaged_in_one_reduction(count):
    for checks in together(reduced_steps, count=count):
        assert [name for name, right in checks.items() if not right] == []


def tapes():
    hvd.init()
    r, n = hvd.rank(), hvd.size()
    shared, own = tf.Variable([1.0, 2.0]), tf.Variable([3.0])
    checks = {}
    for mode, wrap in (("eager", lambda f: f), ("graph", tf.function)):

        def slopes(local, scale=True):
            tape = hvd.DistributedGradientTape(
                tf.GradientTape(), local_sources=[own] if local else (), scale_local_gradients=scale
            )
            with tape:
                loss = float(r + 1) * (tf.reduce_sum(shared) + tf.reduce_sum(own))
            return tape.gradient(loss, {"shared": shared, "own": own})

        mean = sum(k + 1 for k in range(n)) / n
        both = wrap(lambda: slopes(False))()
        checks[f"{mode} structure"] = set(both) == {"shared", "own"}
        checks[f"{mode} averaged"] = both["shared"].numpy().tolist() == [mean] * 2
        local = wrap(lambda: slopes(True))()
        checks[f"{mode} local scaled"] = np.allclose(local["own"].numpy(), (r + 1) / n)
        unscaled = wrap(lambda: slopes(True, scale=False))()
        checks[f"{mode} local"] = np.allclose(unscaled["own"].numpy(), r + 1)
    return checks


def test_distributed_tape_returns_averaged_gradients():
    for checks in together(tapes):
        assert [name for name, right in checks.items() if not right] == []


# --- a lost peer ----------------------------------------------------------------------------------


def test_contradictory_settings_are_refused():
    with pytest.raises(UsageError, match="Average or op"):
        GradientReducer(op=hvd.Max)
    with pytest.raises(UsageError, match="predivide"):
        GradientReducer(op=hvd.Sum, predivide=2.0)
    with pytest.raises(UsageError, match="Adasum"):
        GradientReducer(op=hvd.Adasum)
