"""For trainings of either framework in worlds that change: callbacks that tell the test, and kills and arrivals."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from spark_elastic.ml.callbacks import Callback
from tests.unit.world_link import tell
from tests.unit.worlds import WorldDriver


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
