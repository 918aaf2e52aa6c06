"""Compare users' loops of Keras and TensorFlow with undisturbed runs, in one process whose collectives fail at random.

    python -m tests.simulation.keras_loops FIRST LAST

Prints the first of these seeds whose loop ended differently, if there is one. The loops have a `KerasState` or a
`TensorFlowState`, steps in graphs or not, tapes, loss scaling, passes, clipping, frozen layers, learning rates, two
optimizers, metrics, batch normalisation, dropout, averages of weights, and models that the first step builds.

All ranks compute the same gradients, so the final values are those of one process, to the last bit, for one rank or
two. `tests/unit/keras/test_random_loops.py` runs these loops on several.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

from tests.simulation.user_loops import RATE, failing, search
from tests.simulation.wide_loops import checks_failing

EPOCHS, BATCHES, ROWS = 2, 8, 4


@dataclass(frozen=True)
class Loop:
    state: str
    reduces: str
    """ "optimizer", "tape", "scaled" (an optimizer around the one that reduces), "by hand", or "fit"."""
    graph: bool
    passes: int
    clip: str
    freezes: bool
    rate: str
    second: bool
    layer: str
    late: bool
    """The first step builds the model."""
    averages: bool
    metric: str
    """ "before" or "after" the step, as for the next field."""
    counts: str
    commit_every: int
    checks: bool
    commits_epochs: bool
    skipped: int
    """Number of batches at the beginning of an epoch that make no step."""
    validates_every: int


def loop_of(seed: int) -> Loop:
    rng = random.Random(f"keras {seed}")
    reduces = rng.choice(["optimizer", "optimizer", "tape", "tape", "scaled", "by hand", "fit"])
    return Loop(
        state=rng.choice(["keras", "tensorflow"]),
        reduces=reduces,
        graph=rng.random() < 0.6,
        passes=rng.choice([1, 2]) if reduces == "optimizer" else 1,
        clip=rng.choice(["", "clipnorm", "global_clipnorm", "tape" if reduces == "tape" else ""]),
        freezes=rng.random() < 0.3,
        rate=rng.choice(["", "batch", "epoch", "schedule"]),
        second=rng.random() < 0.3,
        layer=rng.choice(["", "norm", "dropout"]),
        late=rng.random() < 0.25,
        averages=rng.random() < 0.2,
        metric=rng.choice(["", "before", "after"]),
        counts=rng.choice(["before", "after"]),
        commit_every=rng.choice([1, 1, 3, 5, 0]),
        checks=rng.random() < 0.4,
        commits_epochs=rng.random() < 0.6,
        skipped=rng.choice([0, 0, 2]),
        validates_every=rng.choice([0, 3]),
    )


def train(seed: int, observe: Callable[[Callable[[], str]], Callable[[], None]] | None = None) -> dict[str, Any]:
    """Run the loop of this seed, and return its final values by kind; `observe` is as for `wide_loops.train`."""
    import keras
    import numpy as np
    import tensorflow as tf

    import spark_elastic.keras as hk
    import spark_elastic.tensorflow as hvd

    hvd.init()
    how = loop_of(seed)
    entered = None
    keras.utils.set_random_seed(seed)
    x = np.random.default_rng(seed).normal(size=(BATCHES * ROWS, 6)).astype("float32")
    y = x.sum(1, keepdims=True)
    fits = how.reduces == "fit"

    def build(late: bool = False) -> Any:
        more = {"": [], "norm": [keras.layers.BatchNormalization()], "dropout": [keras.layers.Dropout(0.3, seed=seed)]}
        layers = [keras.layers.Dense(4, "tanh"), *more["" if fits else how.layer], keras.layers.Dense(1)]
        return keras.Sequential(layers if late else [keras.layers.Input((6,)), *layers])

    def optimizer_of() -> Any:
        rate: Any = keras.optimizers.schedules.ExponentialDecay(0.02, 3, 0.8) if how.rate == "schedule" else 0.02
        clip = {how.clip: 0.5} if "norm" in how.clip else {}
        kind = random.Random(f"kind {seed}").choice(
            [keras.optimizers.Adam, lambda *a, **k: keras.optimizers.SGD(*a, momentum=0.9, **k)]
        )
        plain = kind(rate, use_ema=how.averages, **clip)
        if how.reduces in ("tape", "by hand"):
            return plain
        optimizer = hvd.DistributedOptimizer(plain, backward_passes_per_step=how.passes)
        if how.reduces == "scaled":
            return keras.optimizers.LossScaleOptimizer(optimizer, initial_scale=4.0, dynamic_growth_steps=3)
        return optimizer

    models, optimizers = [build(how.late), build()], [optimizer_of(), optimizer_of()]
    both = 2 if how.second else 1
    for model, optimizer in zip(models, optimizers, strict=True):
        if model.built and how.reduces != "by hand" and not fits:
            optimizer.build(model.trainable_variables)
    metric = keras.metrics.Mean()
    plain = {"batch": 0, "epoch": 0, "seen": 0, "best": 1e9, "noted": [], "counts": {"odd": 0}}
    kept: dict[str, Any] = {"model": models[0], "optimizer": optimizers[0], "metric": metric, **plain}
    if how.second:
        kept |= {"second": models[1], "other": optimizers[1]}
    if how.reduces == "by hand":
        del kept["optimizer"]
    if fits:
        models[0].compile(optimizers[0], "mse")
    kinds = {"keras": hvd.elastic.TensorFlowKerasState, "tensorflow": hvd.elastic.TensorFlowState}
    state = kinds[how.state](**kept)
    rows = hk.elastic.ElasticDataset(x, y, state=state, batch_size=ROWS, seed=seed) if fits else None

    def step_of(model: Any, optimizer: Any) -> Any:
        def step(inputs: Any, targets: Any, factor: Any, frozen: bool) -> None:
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(tf.square(model(inputs, training=True) - targets)) * factor
                if how.reduces == "scaled":
                    loss = optimizer.scale_loss(loss)
            variables = model.trainable_variables
            if how.reduces == "tape":
                tape = hvd.DistributedGradientTape(tape)
            gradients = tape.gradient(loss, variables)
            if how.clip == "tape":
                gradients, _ = tf.clip_by_global_norm(gradients, 0.5)
            if how.reduces == "by hand":
                for variable, gradient in zip(variables, hvd.grouped_allreduce(gradients), strict=True):
                    variable.assign_sub(0.02 * gradient)
            else:
                optimizer.apply_gradients(zip(gradients, variables, strict=True))

        return tf.function(step) if how.graph else step

    steps = [step_of(*pair) for pair in zip(models, optimizers, strict=True)]

    def slower(optimizer: Any) -> None:
        inner = getattr(optimizer, "inner_optimizer", optimizer)
        inner.learning_rate = 0.9 * float(inner.learning_rate)

    def count(when: str) -> None:
        if how.counts == when:
            state.seen += 1
            state.noted.append(state.seen)
            state.counts["odd"] += 2
        if how.metric == when:
            metric.update_state(float(state.batch))

    def one_batch() -> None:
        index = state.batch
        if how.counts == "before":
            state.batch += 1
        count("before")
        if index >= how.skipped:
            part = slice(index * ROWS, index * ROWS + ROWS)
            frozen = how.freezes and not how.late and state.epoch == 1
            models[0].layers[0].trainable = not frozen
            bad = how.reduces == "scaled" and state.epoch == 1 and index in (4, 5)
            for step in steps[:both]:
                for number in range(how.passes):
                    factor = tf.constant(float("inf") if bad else 1.0 + number)
                    step(tf.constant(x[part]), tf.constant(y[part]), factor, frozen)
            if how.rate == "batch":
                slower(optimizers[0])
        count("after")
        if how.counts == "after":
            state.batch += 1
        validates(state.batch)
        if how.commit_every and state.batch % how.commit_every == 0:
            state.commit()
        elif how.checks:
            state.check_host_updates()

    def validates(number: int) -> None:
        if how.validates_every and number % how.validates_every == 0:
            state.best = min(state.best, float(hvd.allreduce(tf.constant(1.0 / (1 + state.seen)), op=hvd.Max)))

    @hk.elastic.run
    def loop(state: Any) -> dict[str, Any]:
        if entered is not None:
            entered()
        while state.epoch < EPOCHS:
            if fits:
                callbacks = [hk.elastic.ElasticCallback(state, how.commit_every or None)]
                until = state.epoch + 1
                models[0].fit(rows, initial_epoch=state.epoch, epochs=until, callbacks=callbacks, verbose=0)
                state.seen += 1
                validates(0)
                state.noted.append(state.epoch)
            else:
                while state.batch < BATCHES:
                    one_batch()
                state.epoch += 1
                state.batch = 0
            if how.rate == "epoch":
                slower(optimizers[0])
            if how.commits_epochs:
                state.commit()
        hvd.barrier()  # no rank is past the loop while another one may still be called again
        return outcome()

    def outcome() -> dict[str, Any]:
        of = [*models[:both], *([] if how.reduces == "by hand" else optimizers[:both])]
        found = [variable for each in of for variable in each.variables]
        values = [np.asarray(v.numpy()) for v in [*found, *metric.variables]]
        plain = state.batch, state.epoch, state.seen, state.noted, state.best, state.counts
        digest = hashlib.sha256(b"".join(value.tobytes() for value in values)).hexdigest()
        return {
            "tensors": "" if fits else digest,
            # members share the rows of a batch: equal but for rounding
            "sums": [float(np.sum(value, dtype="float64")) for value in values] if fits else [],
            "values": str(plain),
        }

    def observed() -> str:
        # no mark has the variables of a model that its first batch builds
        untrained = how.late and state.epoch == 0 and state.batch <= how.skipped
        return str((outcome()["values"] if untrained else outcome(), state.batch))

    entered = observe(observed) if observe is not None else None
    return loop(state)


def collectives_failing(seed: object, rate: float) -> AbstractContextManager[None]:
    """Make reductions of gradients and sums fail at random, before them or after them."""
    from spark_elastic.collective import operations
    from spark_elastic.collective.fused import FusedReduction

    return failing(seed, rate, [(FusedReduction, "__call__"), (operations, "grouped_allreduce_async")])


def same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    import numpy as np

    exact = all(one[name] == other[name] for name in ("tensors", "values"))
    return exact and bool(np.allclose(one["sums"], other["sums"], rtol=1e-3, atol=1e-4))


@contextmanager
def disturbed(seed: int) -> Iterator[None]:
    with collectives_failing(seed, RATE), checks_failing(seed):
        yield


if __name__ == "__main__":
    search(loop_of, train, disturbed, same)
