"""Storms over loops with virtual workers, for `exact.py`: many schedules of kills and arrivals, and a picture."""

from __future__ import annotations

import hashlib
import random
import time
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from tests.unit.world_link import tell
from tests.unit.worlds import WorldDriver

QUIET, STORMY, WORKERS, FAULTS, GREY = "#f0b429", "#1f4e79", "#6b8e9f", "#d64545", "#888888"
STEPS, BATCH, ROWS = 240, 96, 2048

# --- many schedules -----------------------------------------------------------------------------------


def storms(framework: str, first: int, count: int) -> dict[str, Any]:
    """Train through schedules `first`.. of the framework's tests; raise AssertionError if a bit differs."""
    begun, worlds = time.monotonic(), 0
    known: dict[Any, Any] = {}
    for seed in range(first, first + count):
        if framework == "keras":
            from tests.unit.keras.test_virtual_workers import storm as keras_storm

            worlds += keras_storm(seed, known)
        else:
            from tests.unit.torch import test_virtual_workers as loops

            kind = [1, 2, 3, 4, 5][seed % 5], list(loops.optimizers())[seed % 2]
            if kind not in known:
                known[kind] = loops.in_one(*kind)
            worlds += loops.storm(seed, *kind, known[kind])
        print(f"schedule {seed}: the same bits", flush=True)
    return {
        "schedules": count,
        "first": first,
        "worlds": worlds,
        "different": 0,
        "seconds": round(time.monotonic() - begun, 1),
    }


# --- the picture of a quiet and a stormy run -------------------------------------------------------------


def train_in_keras(pause_s: float) -> str:
    """Train a small network with dropout and batch normalisation; tell each loss, and return the hash of all values."""
    import keras
    import numpy as np
    import tensorflow as tf

    tf.config.threading.set_intra_op_parallelism_threads(1)
    import spark_elastic.keras as hvd

    hvd.init()
    keras.utils.set_random_seed(0)
    generator = np.random.default_rng(1)
    x = generator.normal(size=(ROWS, 16)).astype(np.float32)
    y = np.tanh(x @ generator.normal(size=(16, 4))).argmax(1)
    layers = [keras.layers.Dense(64, "relu"), keras.layers.BatchNormalization(), keras.layers.Dropout(0.3)]
    model = keras.Sequential([keras.Input((16,)), *layers, keras.layers.Dense(4)])
    optimizer = keras.optimizers.AdamW(0.003)
    optimizer.build(model.trainable_variables)
    workers = hvd.elastic.virtual_workers(4, model, optimizer, seed=1, sums=["loss"])
    state = hvd.elastic.KerasState(model, optimizer, workers=workers, step=0)
    cross_entropy = keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction="sum")

    @tf.function(input_signature=[tf.TensorSpec([None, 16]), tf.TensorSpec([None], tf.int64)])
    def gradients(x: Any, y: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = cross_entropy(y, model(x, training=True)) / BATCH
        return loss, tape.gradient(loss, model.trainable_variables)

    @hvd.elastic.run
    def loop(state: Any) -> None:
        while state.step < STEPS:
            batch = np.random.default_rng(state.step).choice(ROWS, BATCH, replace=False)
            for shard in workers.shards(BATCH, step=state.step):
                loss, found = gradients(x[batch[shard.rows]], y[batch[shard.rows]])
                shard.add_gradients(found)
                shard.add("loss", loss)
            optimizer.apply(workers.gradients, model.trainable_variables)
            state.step += 1
            tell("loss", (state.step, workers.sums["loss"], hvd.size()))
            time.sleep(pause_s)
            state.check_host_updates()

    loop(state)
    values = [each.numpy().tobytes() for each in (*model.variables, *optimizer.variables)]
    return hashlib.sha256(b"".join(values)).hexdigest()


def train_in_torch(pause_s: float) -> str:
    """Train a small network with dropout and batch normalisation; tell each loss, and return the hash of all values."""
    import torch
    from torch import nn

    import spark_elastic.torch as hvd

    hvd.init()
    torch.manual_seed(0)
    x = torch.randn(ROWS, 16)
    y = torch.tanh(x @ torch.randn(16, 4)).argmax(1)
    model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.BatchNorm1d(64), nn.Dropout(0.3), nn.Linear(64, 4))
    optimizer = torch.optim.AdamW(model.parameters(), 0.003)
    workers = hvd.elastic.virtual_workers(4, model, optimizer, seed=1, sums=["loss"])
    state = hvd.elastic.TorchState(model, optimizer, workers=workers, step=0)

    @hvd.elastic.run
    def loop(state: Any) -> None:
        while state.step < STEPS:
            batch = torch.randperm(ROWS, generator=torch.Generator().manual_seed(state.step))[:BATCH]
            for shard in workers.shards(BATCH, step=state.step):
                rows = batch[shard.rows]
                loss = nn.functional.cross_entropy(model(x[rows]), y[rows], reduction="sum") / BATCH
                loss.backward()
                shard.add("loss", loss)
            optimizer.step()
            state.step += 1
            tell("loss", (state.step, workers.sums["loss"], hvd.size()))
            time.sleep(pause_s)
            state.check_host_updates()

    loop(state)
    values = [*model.state_dict().values()]
    values += [each for of_param in optimizer.state_dict()["state"].values() for each in of_param.values()]
    return hashlib.sha256(b"".join(each.numpy().tobytes() for each in values)).hexdigest()


TRAIN = {"keras": train_in_keras, "torch": train_in_torch}


def quiet_and_stormy(framework: str, seed: int = 4) -> dict[str, Any]:
    """Train alone, and again with four workers through kills and arrivals; return losses, workers and hashes."""
    with WorldDriver(start_with=1) as driver:
        driver.start(TRAIN[framework], 0.0)
        (hash_of_quiet,) = driver.results(1)
        quiet = [(step, loss) for step, loss, _ in driver.told("loss")]
    with WorldDriver(start_with=4) as driver:
        start = TRAIN[framework], 0.15
        driver.start(*start, count=4)
        faults = _storm(driver, random.Random(seed), start)
        results = driver.results(1)
        stormy = driver.told("loss")
    assert (
        len({loss for step, loss in quiet if step == STEPS} | {loss for step, loss, _ in stormy if step == STEPS}) == 1
    )
    assert set(results) == {hash_of_quiet}, "the two runs differ"
    return {
        "framework": framework,
        "quiet": quiet,
        "stormy": stormy,
        "faults": faults,
        "hash_of_quiet": hash_of_quiet,
        "hash_of_stormy": results[0],
    }


def _storm(driver: WorldDriver, chance: random.Random, start: tuple[Any, ...]) -> list[tuple[int, str]]:
    """Kill and start workers all along; return the step and kind of each fault."""

    def reached() -> int:
        return max((step for step, *_ in driver.told("loss")), default=0)

    faults: list[tuple[int, str]] = []
    at = 12
    while True:
        driver.wait(lambda at=at: driver.done or reached() >= at)
        if driver.done or driver.world is None:
            return faults
        alive = [each for each in driver.world.workers if driver._peers[each].process.is_alive()]
        if len(alive) > 2 and chance.random() < 0.6:
            driver.kill(chance.choice(alive))
            faults.append((reached(), "killed"))
        elif len(alive) < 5:
            driver.start(*start)
            faults.append((reached(), "started"))
        at = reached() + chance.randint(10, 26)


def draw(found: dict[str, Any], target: Path) -> None:
    """Draw the losses of both runs, one on the other, and the workers of the stormy one."""
    figure = Figure(figsize=(9.0, 5.2), layout="constrained")
    kills = sum(kind == "killed" for _, kind in found["faults"])
    title = f"{found['framework'].capitalize()}, 4 virtual workers: one worker undisturbed, and {kills} kills and "
    figure.suptitle(f"{title}{len(found['faults']) - kills} arrivals", fontsize="large", x=0.02, ha="left")
    above, below = figure.subplots(2, 1, sharex=True, gridspec_kw={"height_ratios": [3.0, 1.3]})
    steps, losses = zip(*found["quiet"], strict=True)
    above.plot(steps, losses, color=QUIET, linewidth=6.0, label=f"quiet     sha256 {found['hash_of_quiet'][:32]}…")
    by_step = {step: (loss, size) for step, loss, size in found["stormy"]}
    steps = sorted(by_step)
    losses = [by_step[step][0] for step in steps]
    above.plot(steps, losses, color=STORMY, linewidth=1.3, label=f"stormy  sha256 {found['hash_of_stormy'][:32]}…")
    above.set_ylabel("loss of the batch")
    above.legend(loc="upper right", frameon=False, prop={"family": "monospace", "size": 9})
    below.step(steps, [by_step[step][1] for step in steps], color=WORKERS, where="post", label="workers (stormy)")
    for kind, marker, color in (("killed", "x", FAULTS), ("started", "^", STORMY)):
        places = [step for step, each in found["faults"] if each == kind]
        below.plot(places, [0.3] * len(places), marker, color=color, markersize=6, label=f"a worker is {kind}")
    below.set_ylim(0, max(size for _, size in by_step.values()) + 0.8)
    below.yaxis.set_major_locator(MaxNLocator(integer=True))
    below.set_ylabel("workers")
    below.set_xlabel("step")
    below.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), frameon=False, fontsize="small")
    for panel in (above, below):
        panel.grid(axis="y", color=GREY, alpha=0.25, linewidth=0.8)
        panel.spines[["top", "right"]].set_visible(False)
    target.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(target, dpi=110)
