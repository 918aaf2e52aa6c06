"""DistributedOptimizer: the wrapped optimizer steps with the gradients of all members."""

import subprocess
import sys

import keras
import numpy as np
import pytest

import spark_elastic.keras as hvd
from spark_elastic.errors import UsageError
from spark_elastic.keras.optimizer import is_distributed
from tests.nightly import by_night
from tests.unit.keras.test_keras_state import CLASSES, build_model, rows, same
from tests.unit.world_link import tell
from tests.unit.worlds import together


def loss():
    return keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def model_with(optimizer, dtype=None, **options):
    keras.utils.set_random_seed(1)
    model = keras.Sequential(
        [keras.layers.Input((4,)), keras.layers.Dense(8, dtype=dtype), keras.layers.Dense(CLASSES, dtype="float32")]
    )
    model.compile(optimizer, loss(), **options)
    return model


OPTIMIZERS = {
    "momentum": lambda: keras.optimizers.SGD(0.1, momentum=0.9),
    "clipnorm": lambda: keras.optimizers.Adam(0.1, clipnorm=0.1),
    "decay": lambda: keras.optimizers.AdamW(0.1, global_clipnorm=0.5, weight_decay=0.1),
    "average": lambda: keras.optimizers.SGD(0.1, clipvalue=0.01, use_ema=True, ema_overwrite_frequency=2),
    "accumulating": lambda: keras.optimizers.SGD(0.1, gradient_accumulation_steps=2),
    "scaled": lambda: keras.optimizers.LossScaleOptimizer(keras.optimizers.Adam(0.1), dynamic_growth_steps=2),
    "schedule": lambda: keras.optimizers.SGD(keras.optimizers.schedules.ExponentialDecay(0.1, 2, 0.5)),
}
HALF = 8


def halves(name, options):
    """Train on this rank's rows of each batch; then, on rank 0, on whole batches with the plain optimizer."""
    hvd.init()
    x, y = rows(64)
    mine = slice(hvd.rank() * HALF, (hvd.rank() + 1) * HALF)
    parts = [np.concatenate([values[start:][mine] for start in range(0, 64, 2 * HALF)]) for values in (x, y)]
    ours = model_with(hvd.DistributedOptimizer(OPTIMIZERS[name]()), **options)
    ours.fit(*parts, batch_size=HALF, epochs=2, shuffle=False, verbose=0)
    tell("trained", name)
    if hvd.rank() != 0:
        return None
    plain = model_with(OPTIMIZERS[name](), **options)
    plain.fit(x, y, batch_size=2 * HALF, epochs=2, shuffle=False, verbose=0)
    known = [(a.numpy(), b.numpy()) for a, b in zip(ours.optimizer.variables, plain.optimizer.variables, strict=True)]
    known += [(a.numpy(), b.numpy()) for a, b in zip(ours.weights, plain.weights, strict=True)]
    worst = max(float(np.abs(a.astype("float64") - b).max()) for a, b in known)
    return worst, type(ours.optimizer).__name__ == type(plain.optimizer).__name__


CASES = [(name, {}) for name in OPTIMIZERS]
CASES += [("scaled", {"run_eagerly": True}), ("clipnorm", {"steps_per_execution": 3})]


def all_halves(cases):
    return [halves(*case) for case in cases]


@pytest.mark.parametrize("cases", by_night([CASES[:2], CASES[2:]], but=[CASES[:2]]), ids=["two", "others"])
def test_two_members_with_half_a_batch_each_match_one_process(cases):
    first, _ = together(all_halves, cases)
    for case, (worst, same_class) in zip(cases, first, strict=True):
        assert worst < 2e-5, case
        assert same_class


def more_than_gradients():
    hvd.init()
    out = {}
    x, y = rows(32, seed=hvd.rank())
    # several passes, summed or averaged
    for average, rate in ((True, 0.1), (False, 0.05)):
        optimizer = hvd.DistributedOptimizer(
            keras.optimizers.SGD(rate), backward_passes_per_step=2, average_aggregated_gradients=average
        )
        model = model_with(optimizer)
        model.fit(x, y, batch_size=8, shuffle=False, verbose=0)
        out[f"passes {average}"] = [v.numpy() for v in model.weights], int(optimizer.iterations)
    model = model_with(hvd.DistributedOptimizer(keras.optimizers.SGD(0.1)))
    model.fit(x, y, batch_size=16, shuffle=False, verbose=0)
    out["whole"] = [v.numpy() for v in model.weights], 2
    # compression, predivision and sums
    for name, options in {
        "fp16": {"compression": hvd.Compression.fp16},
        "predivide": {"gradient_predivide_factor": 2.0},
        "sum": {"op": hvd.Sum},
    }.items():
        rate = 0.05 if name == "sum" else 0.1
        model = model_with(hvd.DistributedOptimizer(keras.optimizers.SGD(rate), **options))
        model.fit(x, y, batch_size=16, shuffle=False, verbose=0)
        out[name] = [v.numpy() for v in model.weights], 2
    return out


@pytest.mark.nightly
def test_passes_compression_predivision_and_sums_change_nothing_but_rounding():
    first, second = together(more_than_gradients)
    for name, (weights, steps) in first.items():
        assert steps == 2
        assert same(weights, second[name][0])
        assert all(np.allclose(a, b, atol=1e-3) for a, b in zip(weights, first["whole"][0], strict=True)), name


def one_overflows():
    """Train under mixed_float16, where `compile` wraps the optimizer; rank 1 has infinite gradients once."""
    hvd.init()
    keras.mixed_precision.set_global_policy("mixed_float16")
    try:
        model = model_with(hvd.DistributedOptimizer(keras.optimizers.SGD(0.1)))
    finally:
        keras.mixed_precision.set_global_policy("float32")
    optimizer = model.optimizer
    x, y = rows(32)
    if hvd.rank() == 1:
        x[:8] = np.inf
    model.fit(x, y, batch_size=8, shuffle=False, verbose=0)
    return (
        type(optimizer).__name__,
        is_distributed(optimizer),
        int(optimizer.iterations),
        int(optimizer.steps_applied()),
        float(optimizer.dynamic_scale),
        [float(v.numpy().sum()) for v in model.weights],
    )


@pytest.mark.nightly
def test_overflow_of_one_member_makes_all_members_skip_the_step():
    first, second = together(one_overflows)
    assert first == second
    assert first[:4] == ("LossScaleOptimizer", True, 3, 4)
    assert first[4] == 2.0**14


def test_passes_apply_the_gradients_that_any_of_them_has(alone):
    plain = keras.optimizers.SGD(1.0, momentum=0.5, weight_decay=0.1)
    optimizer = hvd.DistributedOptimizer(plain, backward_passes_per_step=2)
    variables = [keras.Variable(1.0) for _ in range(3)]
    for _ in range(2):
        optimizer.apply([keras.ops.ones(()), keras.ops.ones(()), None], variables)
        optimizer.apply([keras.ops.ones(()), None, None], variables)
    wanted = keras.optimizers.SGD(1.0, momentum=0.5, weight_decay=0.1)
    expected = [keras.Variable(1.0) for _ in range(3)]
    for _ in range(2):
        wanted.apply([keras.ops.full((), 2.0), keras.ops.ones(()), None], expected)
    assert [float(each) for each in variables] == pytest.approx([float(each) for each in expected])
    assert float(variables[2]) == 1.0


def test_a_built_optimizer_keeps_its_state(alone):
    plain = keras.optimizers.Adam(0.1)
    model = model_with(plain)
    model.fit(*rows(32), batch_size=8, verbose=0)
    ours = hvd.DistributedOptimizer(plain, name="ours")
    assert ours.name == "ours"
    assert ours.built
    assert int(ours.iterations) == 4
    assert all(a is b for a, b in zip(ours.variables, plain.variables, strict=True))
    assert isinstance(ours, keras.optimizers.Adam)
    model.compile(ours, loss())
    model.fit(*rows(32), batch_size=8, verbose=0)
    assert int(ours.iterations) == 8


@pytest.mark.nightly
def test_saved_model_loads_without_this_package_and_with_it_distributed(alone, tmp_path):
    model = model_with(hvd.DistributedOptimizer(OPTIMIZERS["scaled"]()))
    model.fit(*rows(32), batch_size=8, verbose=0)
    path = tmp_path / "model.keras"
    model.save(path)
    look = f"import keras; o = keras.models.load_model({str(path)!r}).optimizer; print(int(o.iterations), type(o))"
    code = f"import sys; sys.modules['spark_elastic'] = None; {look}"
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert shown.startswith("4 <class 'keras.src.optimizers")
    loaded = hvd.load_model(path, compression=hvd.Compression.bf16)
    assert is_distributed(loaded.optimizer)
    assert same([v.numpy() for v in model.optimizer.variables], [v.numpy() for v in loaded.optimizer.variables])
    loaded.fit(*rows(32), batch_size=8, verbose=0)
    assert int(loaded.optimizer.iterations) == 8


class Odd(keras.optimizers.SGD):
    """An optimizer that Keras does not know."""


def test_load_model_accepts_custom_optimizers(alone, tmp_path):
    model = model_with(hvd.DistributedOptimizer(Odd(0.1)))
    model.fit(*rows(32), batch_size=8, verbose=0)
    model.save(tmp_path / "model.keras")
    loaded = hvd.load_model(tmp_path / "model.keras", custom_optimizers=[Odd])
    assert isinstance(loaded.optimizer, Odd)
    assert int(loaded.optimizer.iterations) == 4


def test_invalid_arguments_are_reported(alone):
    with pytest.raises(UsageError, match="already"):
        hvd.DistributedOptimizer(hvd.DistributedOptimizer("adam"))
    with pytest.raises(UsageError, match="at least 1"):
        hvd.DistributedOptimizer("adam", backward_passes_per_step=0)
    with pytest.raises(UsageError, match="Adasum"):
        hvd.DistributedOptimizer("adam", op=hvd.Adasum)
    model = model_with(hvd.DistributedOptimizer("adam"), jit_compile=True)
    with pytest.raises(UsageError, match="jit_compile=False"):
        model.fit(*rows(32), verbose=0)
    with pytest.raises(UsageError, match=r"KerasState\(model, batch=0"):
        hvd.elastic.ElasticCallback(hvd.elastic.KerasState(build_model()))
