"""The fused reduction of a step's gradients, and the errors of a lost peer through TensorFlow."""

import numpy as np
import pytest
import tensorflow as tf

import spark_elastic.tensorflow as hvd
from spark_elastic.errors import UsageError
from spark_elastic.tensorflow.gradients import GradientReducer
from tests.nightly import by_night
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

    for how, compression, dense in (("plain", hvd.Compression.none, False), ("compressed", hvd.Compression.fp16, True)):
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


@pytest.mark.parametrize("count", by_night([2, 3], but=[2]))
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


# --- clipping ---------------------------------------------------------------------------------------

ROWS, CLIPPED_STEPS = 12, 3
CLIPS = ("clipnorm", "global_clipnorm", "clipvalue")


def clipped(gradients):
    return tf.clip_by_global_norm(gradients, 0.05)[0]


def training(optimizer, gradients_of, parts=1):
    """Train two variables on the rows of this member, and return their values. `gradients_of` returns the gradients,
    given a function that computes the loss of one of the parts of all rows, and the variables.
    """
    generator = np.random.default_rng(5)
    x = generator.normal(size=(ROWS, 3)).astype("float32") * np.linspace(0.1, 3.0, ROWS, dtype="float32")[:, None]
    y = x.sum(axis=1, keepdims=True)
    slope, offset = tf.Variable(tf.zeros((3, 1))), tf.Variable([0.5])
    variables = [slope, offset]
    for _ in range(CLIPPED_STEPS):

        def loss(part):
            return tf.reduce_mean(tf.square(x[part::parts] @ slope + offset - y[part::parts]))

        optimizer.apply_gradients(zip(gradients_of(loss, variables), variables, strict=True))
    return [variable.numpy().reshape(-1).tolist() for variable in variables]


def plain_gradients(loss, variables, part=0):
    with tf.GradientTape() as tape:
        value = loss(part)
    return tape.gradient(value, variables)


def clips():
    hvd.init()
    rank, size = hvd.rank(), hvd.size()
    sgd = tf.keras.optimizers.SGD

    def of_the_tape(loss, variables):
        with hvd.DistributedGradientTape(tf.GradientTape()) as tape:
            value = loss(rank)
        return clipped(tape.gradient(value, variables))

    def own(loss, variables):
        return plain_gradients(loss, variables, rank)

    out = {"tape": training(sgd(0.1), of_the_tape, size)}
    for clip in CLIPS:
        out[clip] = training(hvd.DistributedOptimizer(sgd(0.1, **{clip: 0.05})), own, size)
    out["between"] = training(hvd.DistributedOptimizer(sgd(0.1)), lambda *of: clipped(own(*of)), size)
    return out


@pytest.mark.parametrize("count", by_night([1, 2, 3], but=[2]))
def test_clipping_after_the_reduction_is_that_of_one_process(count):
    sgd = tf.keras.optimizers.SGD
    one = {"tape": training(sgd(0.1), lambda *of: clipped(plain_gradients(*of)))}
    for clip in CLIPS:
        one[clip] = training(sgd(0.1, **{clip: 0.05}), plain_gradients)

    def mean_of_clipped(loss, variables):
        of_parts = [clipped(plain_gradients(loss, variables, part)) for part in range(count)]
        return [sum(each) / count for each in zip(*of_parts, strict=True)]

    one["between"] = training(sgd(0.1), mean_of_clipped, count)  # clipped before: each worker clips its own
    for result in together(clips, count=count):
        for way, wanted in one.items():
            for own, right in zip(result[way], wanted, strict=True):
                assert own == pytest.approx(right, rel=1e-4), way
    same = np.allclose(one["between"][0], one["tape"][0], rtol=1e-3)
    assert same == (count == 1)


# --- a lost peer ----------------------------------------------------------------------------------


def test_contradictory_settings_are_refused():
    with pytest.raises(UsageError, match="Average or op"):
        GradientReducer(op=hvd.Max)
    with pytest.raises(UsageError, match="predivide"):
        GradientReducer(op=hvd.Sum, predivide=2.0)
    with pytest.raises(UsageError, match="Adasum"):
        GradientReducer(op=hvd.Adasum)
