"""TensorFlow's collectives between real processes, eagerly and inside of tf.function."""

import numpy as np
import pytest
import tensorflow as tf
import torch

import spark_elastic.keras as on_keras
import spark_elastic.tensorflow as hvd
import spark_elastic.torch as on_torch
from spark_elastic.errors import UsageError
from tests.nightly import by_night
from tests.unit.worlds import together

DTYPES = ("float16", "bfloat16", "float32", "float64", "int16", "int32", "int64", "uint8")


def both_ways(function):
    """The function as it is, and traced into a graph."""
    return [function, tf.function(function)]


def reductions():
    hvd.init()
    r, n = hvd.rank(), hvd.size()
    ranks = range(n)
    checks = {}
    for name in DTYPES:
        mine = tf.cast(tf.constant([1, 2, 3]) * (r + 1), name)
        for how, call in zip(("eager", "graph"), both_ways(lambda t, op: hvd.allreduce(t, op=op)), strict=True):
            total, most = call(mine, hvd.Sum), call(mine, hvd.Max)
            expected = [sum((k + 1) * v for k in ranks) for v in (1, 2, 3)]
            checks[f"sum {name} {how}"] = tf.cast(total, tf.int64).numpy().tolist() == expected
            checks[f"max {name} {how}"] = tf.cast(most, tf.int64).numpy().tolist() == [n, 2 * n, 3 * n]
            checks[f"type {name} {how}"] = total.dtype == mine.dtype and total.shape == mine.shape
    mean = sum(ranks) / n
    for how, call in zip(("eager", "graph"), both_ways(lambda: hvd.allreduce(tf.constant(float(r)))), strict=True):
        checks[f"average of scalars {how}"] = call().numpy() == mean
    scaled = hvd.allreduce(tf.constant([float(r)]), op=hvd.Sum, prescale_factor=2.0, postscale_factor=0.25)
    checks["factors"] = scaled.numpy().tolist() == [sum(ranks) / 2]
    squeezed = hvd.allreduce(tf.fill([5], float(r)), compression=hvd.Compression.fp16)
    checks["compressed"] = squeezed.dtype == tf.float32 and squeezed.numpy().tolist() == [mean] * 5
    a, b = hvd.grouped_allreduce([tf.fill([2], float(r)), tf.constant([r], tf.int64)], op=hvd.Sum)
    checks["grouped"] = a.numpy().tolist() == [sum(ranks)] * 2 and b.numpy().tolist() == [sum(ranks)]
    checks["no tensors"] = hvd.grouped_allreduce([]) == []
    empty = hvd.allreduce(tf.zeros([0, 3]), op=hvd.Sum)
    checks["empty"] = empty.shape == (0, 3)
    slices = tf.IndexedSlices(tf.fill([1, 2], float(r + 1)), tf.constant([r]), tf.constant([n, 2]))
    dense = tf.convert_to_tensor(hvd.allreduce(slices, op=hvd.Sum))
    checks["slices"] = dense.numpy()[:, 0].tolist() == [k + 1 for k in ranks]
    whole = tf.IndexedSlices(tf.fill([1, 2], r + 2), tf.constant([r]), tf.constant([n, 2]))
    checks["average of whole slices"] = np.allclose(hvd.allreduce(whole).values[:, 0], [(k + 2) / n for k in ranks])
    halved = tf.convert_to_tensor(hvd.allreduce(slices))
    checks["average of slices"] = np.allclose(halved.numpy()[:, 0], [(k + 1) / n for k in ranks])
    return checks


@pytest.mark.parametrize("count", by_night([2, 3], but=[2]))
def test_every_member_gets_the_same_reduction_for_every_type(count):
    for checks in together(reductions, count=count):
        assert [name for name, right in checks.items() if not right] == []


def movements():
    hvd.init()
    r, n = hvd.rank(), hvd.size()
    ranks = range(n)
    checks = {}
    for how, gather in zip(("eager", "graph"), both_ways(hvd.allgather), strict=True):
        rows = gather(tf.fill([r + 1, 2], tf.cast(r, tf.int32)))
        checks[f"allgather {how}"] = rows.numpy()[:, 0].tolist() == [k for k in ranks for _ in range(k + 1)]
        checks[f"allgather of scalars {how}"] = gather(tf.constant(r)).numpy().tolist() == list(ranks)
    checks["grouped"] = [t.shape[0] for t in hvd.grouped_allgather([tf.zeros([1]), tf.zeros([2])])] == [n, 2 * n]
    for how, send in zip(("eager", "graph"), both_ways(lambda t: hvd.broadcast(t, 1)), strict=True):
        checks[f"broadcast {how}"] = send(tf.constant([r, 7])).numpy().tolist() == [1, 7]
        checks[f"broadcast of truth {how}"] = bool(send(tf.constant(r == 1)).numpy())
    for how, exchange in zip(("eager", "graph"), both_ways(lambda t, s: hvd.alltoall(t, s)), strict=True):
        received, counts = exchange(tf.repeat(tf.range(n), 2), tf.fill([n], 2))
        checks[f"alltoall {how}"] = received.numpy().tolist() == [r] * (2 * n) and counts.numpy().tolist() == [2] * n
    uneven = hvd.alltoall(tf.zeros([0]) if r == 1 else tf.fill([n], float(r)), [int(r != 1)] * n)
    checks["alltoall, one sends nothing"] = uneven[1].numpy().tolist() == [int(k != 1) for k in ranks]
    checks["equal alltoall"] = hvd.alltoall(tf.range(n)).numpy().tolist() == [r] * n
    for how, scatter in zip(("eager", "graph"), both_ways(lambda t: hvd.reducescatter(t, op=hvd.Sum)), strict=True):
        mine = scatter(tf.range(n + 1, dtype=tf.float32)).numpy().tolist()
        cut = [range(n + 1)[:2] if r == 0 else range(n + 1)[r + 1 : r + 2]][0]
        checks[f"reducescatter {how}"] = mine == [float(n * v) for v in cut]
    variables = [tf.Variable(tf.fill([3], float(r))), tf.Variable(r, dtype=tf.int64), tf.Variable(tf.zeros([0]))]
    large = tf.Variable(tf.fill([3_000_000], float(r)))
    hvd.broadcast_variables([*variables, large], root_rank=1)
    traced = [tf.Variable(tf.fill([3], float(r))), tf.Variable(r, dtype=tf.int64), tf.Variable(r == 1)]
    first = tf.function(lambda: hvd.broadcast_variables(traced, root_rank=1))
    first()
    checks["variables in a graph"] = [v.numpy().tolist() for v in traced] == [[1.0] * 3, 1, True]
    inside = tf.function(lambda: hvd.broadcast_(traced[:1], 0))()
    checks["values that were broadcast"] = inside[0].numpy().tolist() == [1.0] * 3
    checks["variables"] = variables[0].numpy().tolist() == [1.0] * 3 and variables[1].numpy() == 1
    checks["large variable"] = float(tf.reduce_min(large)) == float(tf.reduce_max(large)) == 1.0
    checks["object"] = hvd.broadcast_object({"rank": r}, root_rank=1) == {"rank": 1}
    checks["objects"] = hvd.allgather_object(r) == list(ranks)
    placed = tf.function(lambda: (hvd.rank_op(), hvd.size_op(), hvd.local_rank_op(), hvd.local_size_op()))()
    checks["place"] = [int(t) for t in placed] == [r, n, r, n]
    hvd.barrier()
    return checks


def test_gathers_broadcasts_and_exchanges_deliver_the_right_rows():
    for checks in together(movements):
        assert [name for name, right in checks.items() if not right] == []


def derivatives():
    hvd.init()
    r, n = hvd.rank(), hvd.size()
    checks = {}

    def slope(function, at):
        with tf.GradientTape() as tape:
            tape.watch(at)
            out = function(at)
            loss = tf.reduce_sum(out * tf.cast(r + 1, out.dtype))
        return tape.gradient(loss, at)

    mine = tf.constant([1.0, 2.0])
    weights = sum(k + 1 for k in range(n))
    for how, wrap in (("eager", lambda f: f), ("graph", tf.function)):
        run = wrap(lambda t: slope(lambda v: hvd.allreduce(v, op=hvd.Sum), t))
        checks[f"allreduce {how}"] = run(mine).numpy().tolist() == [weights] * 2
        run = wrap(lambda t: slope(hvd.allgather, t))
        checks[f"allgather {how}"] = np.allclose(run(mine).numpy(), [weights / n] * 2)
        run = wrap(lambda t: slope(lambda v: hvd.broadcast(v, 0), t))
        # Horovod's is the average of the members' gradients; the derivative of the sum of their losses is n times that
        checks[f"broadcast {how}"] = run(mine).numpy().tolist() == [weights / n if r == 0 else 0.0] * 2
        run = wrap(lambda t: slope(hvd.alltoall, t))
        checks[f"alltoall {how}"] = run(tf.ones([n])).numpy().tolist() == [k + 1.0 for k in range(n)]
        # rank r sends r + 1 rows to each: row j of those that it sends to k is weighted by k + 1
        uneven = run(tf.ones([n * (r + 1)])).numpy().tolist()
        checks[f"alltoall, unequal rows {how}"] = uneven == [k + 1.0 for k in range(n) for _ in range(r + 1)]
        run = wrap(lambda t: slope(lambda v: hvd.alltoall(v, [1, 2] if r == 0 else [3, 0])[0], t))
        expected = [1.0, 2.0, 2.0] if r == 0 else [1.0] * 3
        checks[f"alltoall with splits {how}"] = n != 2 or run(tf.ones([3])).numpy().tolist() == expected
        for op, scale in ((hvd.Sum, n), (hvd.Average, 1)):
            run = wrap(lambda t, op=op: slope(lambda v: hvd.reducescatter(v, op=op), t))
            expected = [(k + 1.0) * scale for k in range(n)]
            checks[f"reducescatter {op} {how}"] = run(tf.ones([n])).numpy().tolist() == expected
    return checks


def test_gradients_flow_through_collectives():
    for checks in together(derivatives):
        assert [name for name, right in checks.items() if not right] == []


def test_unsupported_tensors_and_operators_are_refused():
    hvd.init()
    try:
        slices = tf.IndexedSlices(tf.ones([1]), tf.constant([0]), tf.constant([3]))
        with pytest.raises(UsageError, match="IndexedSlices"):
            hvd.allreduce(slices, op=hvd.Max)
        with pytest.raises(UsageError, match="string"):
            hvd.allgather(tf.constant(["a"]))
        with pytest.raises(NotImplementedError):
            hvd.allreduce(slices, op=hvd.Min)
        with pytest.raises(NotImplementedError, match="Adasum"):
            hvd.grouped_allreduce([slices, tf.ones([1])], op=hvd.Adasum)
        with pytest.raises(RuntimeError, match="broadcast_variables"):
            hvd.broadcast_global_variables(0)
    finally:
        hvd.shutdown()


# --- compressors --------------------------------------------------------------------------------------


def test_casts_convert_floating_point_tensors_of_both_frameworks_and_back():
    assert hvd.Compression is on_torch.Compression is on_keras.Compression
    for compressor, name in ((hvd.Compression.fp16, "float16"), (hvd.Compression.bf16, "bfloat16")):
        sent, context = compressor.compress(tf.constant([1.5, 2.0], tf.float64))
        assert sent.dtype.name == name
        assert compressor.decompress(sent, context).dtype == tf.float64
        sent, context = compressor.compress(torch.tensor([1.5, 2.0], dtype=torch.float64))
        assert sent.dtype == getattr(torch, name)
        assert compressor.decompress(sent, context).dtype == torch.float64

    for tensor in (tf.constant([3]), torch.tensor([3])):
        sent, context = hvd.Compression.fp16.compress(tensor)
        assert sent is tensor
        assert hvd.Compression.fp16.decompress(sent, context) is tensor
