"""Trainings of either framework in tests: callbacks that act at a chosen moment, kills, arrivals, comparison."""

from __future__ import annotations

import importlib
import itertools
import random
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from spark_elastic.data.store import Store
from spark_elastic.ml.callbacks import Callback
from spark_elastic.ml.training.spec import CheckpointPlan, TrainingResult
from spark_elastic.runs.checkpoints import CHECKPOINTS, CheckpointFacts, Checkpoints
from tests.unit.world_link import tell
from tests.unit.worlds import WorldDriver

ROWS, VALIDATION_ROWS, BATCH, EPOCHS = 203, 77, 16, 3
STEPS_AN_EPOCH = 13
"""203 rows make 12 batches of 16 and one of 11, which three workers share unevenly."""
STEPS = EPOCHS * STEPS_AN_EPOCH
NEVER = 1 << 30
"""A count that no event reaches."""


class TheEnd(Exception):
    """The job is over, before the training is."""


def end() -> None:
    raise TheEnd


def at_call(count: int, action: Callable[[], None]) -> Callable[..., None]:
    """Return a function that calls the action when it is called itself for the `count`-th time."""
    calls = itertools.count(1)

    def called(*_: Any) -> None:
        if next(calls) == count:
            action()

    return called


class At(Callback):
    """Does something at the `count`-th time that `event` happens, in this process."""

    def __init__(self, event: str, count: int, action: Callable[[], None]) -> None:
        setattr(self, event, at_call(count, action))


def plain_outcome(result: TrainingResult, size: int) -> dict[str, Any]:
    """Return the result of a training as plain values that are equal in every world."""
    return {
        "history": [{k: v for k, v in row.items() if k not in ("seconds", "ended")} for row in result.history],
        "steps": result.steps,
        "stopped": result.stopped,
        "restored": result.restored,
        "diverged": result.diverged and asdict(result.diverged),
        "caused_divergence": result.caused_divergence,
        "size": size,
    }


def close(expected: Any, tolerance: float = 1e-12) -> Any:
    return pytest.approx(expected, rel=1e-9, abs=tolerance)


def assert_same_outcome(
    result: Mapping[str, Any], weights: Any, undisturbed: tuple[Any, Any], tolerance: float = 1e-12
) -> None:
    """Compare steps, history and weights with those of a training that nothing has disturbed."""
    expected, expected_weights = undisturbed
    assert result["steps"] == expected["steps"]
    for row, wanted in zip(result["history"], expected["history"], strict=True):
        assert row == close(wanted, tolerance)
        assert row["rows"] == ROWS
    assert weights == close(expected_weights, tolerance)


def checkpoints_in(folder: Path) -> Checkpoints:
    return Checkpoints(Store.create(folder).sub(CHECKPOINTS))


def best_in(checkpoints: Checkpoints, value: str) -> CheckpointFacts:
    """Return the newest checkpoint that was the best by this value when it was written."""
    return next(facts for facts in reversed(checkpoints.complete()) if value in facts.best)


class EverySteps(Callback):
    """Requests a checkpoint after every so many steps."""

    def __init__(self, steps: int) -> None:
        self._steps = steps

    def on_batch_end(self, run: Any) -> None:
        if run.step % self._steps == 0:
            run.checkpoint()


def stop_and_resume(
    trainings: Any,
    data: Path,
    folder: Path,
    event: str,
    count: int,
    plan: CheckpointPlan,
    make: Callable[[], Any] = dict,
    every_steps: int = NEVER,
) -> tuple[dict[str, Any], Any]:
    """Return the outcome of a training that ended at an event and was resumed, and the checkpoint that was used.

    `make` makes the settings anew for each of the two, as another process would.
    """

    def training(count: int, **more: Any) -> Any:
        settings = make()
        callbacks = [*settings.pop("callbacks", []), EverySteps(every_steps), At(event, count, end)]
        return trainings.make_training(data, folder, checkpoints=plan, callbacks=callbacks, **settings, **more)

    with pytest.raises(TheEnd):
        trainings.alone(training(count))
    latest = checkpoints_in(folder).latest()
    return trainings.alone(training(NEVER, resume_from=latest.name)), latest


class EpochCounter(Callback):
    """Has a state, tells of its steps and takes its time up to one of them, so that a newcomer comes in time."""

    def __init__(self, last_slow_step: int, pause_s: float) -> None:
        self.epochs, self._last_slow_step, self._pause_s = 0, last_slow_step, pause_s

    def on_batch_end(self, run: Any) -> None:
        tell("step", run.step)
        if run.size == 1 and run.step < self._last_slow_step:
            threading.Event().wait(self._pause_s)

    def on_epoch_end(self, run: Any, logs: Any) -> None:
        self.epochs += 1

    def state_dict(self) -> dict[str, Any]:
        return {"epochs": self.epochs}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.epochs = state["epochs"]


class Telling(Callback):
    """Tells the test of all that happens."""

    def on_epoch_begin(self, run: Any) -> None:
        tell("epoch_begin", run.step)

    def on_batch_end(self, run: Any) -> None:
        tell("step", run.step)

    def on_validation_end(self, run: Any, logs: Any) -> None:
        tell("validation_end", run.step)

    def on_epoch_end(self, run: Any, logs: Any) -> None:
        tell("epoch_end", run.step)

    def on_fit_end(self, run: Any) -> None:
        tell("fit_end", run.step)


def kill_and_add(driver: WorldDriver, chance: random.Random, start: Callable[[], Any]) -> None:
    """One to three kills or arrivals, each at any moment; somebody survives. start: one more worker that tells."""
    driver.wait(lambda: driver.told("step"))
    for _ in range(chance.randint(1, 3)):
        moment = len(driver.events) + chance.randint(1, 60)
        driver.wait(lambda moment=moment: len(driver.events) >= moment or driver.done)
        time.sleep(chance.random() * 0.01)
        if chance.random() < 0.4:
            start()
        elif driver.world is not None and not driver.done:
            alive = [w for w in driver.world.workers if driver._peers[w].process.is_alive()]
            if len(alive) > 1:
                driver.kill(chance.choice(alive))


# --- shares by speed ----------------------------------------------------------------------------------

FAST_ROW_S, SLOW_ROW_S = 2e-3, 6e-3
LONG = 8
"""Epochs of trainings whose shares change."""


def in_worker_with_shares(
    framework: str, data: Path, folder: Path, variant: str | None = None, most: int = BATCH
) -> Any:
    """Train with shares by speed; each third worker from the first on takes three times as long for a row.

    The second has memory for `most` rows. Adds this worker's shares, of which it tells, and `History.work`.
    """
    from spark_elastic.ml.training.trainer import Trainer
    from tests.unit.world_link import link

    worker = link().worker
    seconds = SLOW_ROW_S if worker % 3 == 1 else FAST_ROW_S
    trainings = importlib.import_module(f"tests.unit.ml.{framework}.trainings")
    plain_balance, shares, trainers = Trainer._set_shares, [], []

    def set_shares(trainer: Any, given: Any) -> None:
        plain_balance(trainer, given)
        shares.append(given)
        trainers.append(trainer)
        tell("shares", given)
        plain_step = type(trainer.engine).step

        def step(batch: Any, at: Any, stop: bool) -> Any:
            time.sleep(seconds * batch.rows)
            if worker == 2 and batch.rows > most:
                raise MemoryError
            return plain_step(trainer.engine, batch, at, stop)

        trainer.engine.step = step

    Trainer._set_shares = set_shares  # type: ignore[method-assign]
    changes = {} if variant is None else trainings.variant_of(variant)
    changes = {"epochs": LONG, "balance": "auto", **changes, "callbacks": [Telling()]}
    training = trainings.make_training(data, folder, **changes)
    outcome = trainings.outcome(training)
    return {**outcome, "shares": shares, "work": trainers[-1].view.history.work}
