"""The files that a training writes to its store: checkpoints while it runs, its result when it ends."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

from spark_elastic import clock
from spark_elastic.collective.process import process
from spark_elastic.data.reader import resolve_order, window_settings_of
from spark_elastic.data.store import Store
from spark_elastic.elastic.finish import loops
from spark_elastic.errors import CheckpointError, InvalidSettingsError, RunTakenError
from spark_elastic.ml.callbacks import Callback
from spark_elastic.ml.training.engine import Engine
from spark_elastic.ml.training.reporting import RunView
from spark_elastic.ml.training.spec import CheckpointPlan, Progress, Training, TrainingPhase
from spark_elastic.redaction import class_and_first_line, redacted
from spark_elastic.runs.checkpoints import (
    CHECKPOINTS,
    CLOSE_S,
    CheckpointFacts,
    Checkpoints,
    CheckpointWriter,
    Contents,
    name_of,
)
from spark_elastic.runs.lease import RunMissingError
from spark_elastic.wire.worker_link import notify

log = logging.getLogger("spark_elastic.ml")

SAVE_TIMEOUT_VARIABLE = "SPARK_ELASTIC_SAVE_TIMEOUT"
"""Environment variable of the workers: seconds during which writing the result is retried."""
SAVE_TIMEOUT_S = 300.0  # the default: a failover of HDFS takes a minute, and a person can make room on a full disk
RETRY_PAUSES_S = (0.5, 1.0, 2.0, 4.0, 8.0, 15.0)  # pauses between attempts; the last one repeats
NOTIFY_INTERVAL_S = 30.0


class CheckpointSchedule:
    """Decides when durable checkpoints of a training are due, and has rank 0 write them in the background."""

    def __init__(self, training: Training, engine: Engine, callbacks: Sequence[Callback]) -> None:
        self._training = training
        self._engine = engine
        self._callbacks = callbacks
        self._plan = training.checkpoints or CheckpointPlan(every_epochs=None, keep=1)
        dataset, cache_bytes = training.dataset, training.cache_bytes
        order = resolve_order(dataset, order=training.order, shuffle=training.shuffle, cache_bytes=cache_bytes)
        self._settings = {
            "rows": dataset.rows("train"),
            "seed": training.seed,
            "shuffle": training.shuffle,
            "order": order,  # in which `Progress.position` counts rows
            **({"lanes": asdict(window_settings_of(dataset))} if order == "lanes" else {}),
            "metrics": list(engine.metrics.names),
        }
        """The settings that must be equal when a training resumes from these checkpoints."""
        self.checkpoints = Checkpoints(training.store.sub(CHECKPOINTS), training.fence)
        self.writer = CheckpointWriter(self.checkpoints, self._plan.keep, notify)
        self.restart_clock()

    def restart_clock(self) -> None:
        self._last = clock.monotonic()

    def after_step(self, run: RunView) -> None:
        """Write a checkpoint if one is due after this step, or a callback requested one."""
        self.writer.watch()
        every_s = self._plan.every_seconds
        due = every_s is not None and clock.monotonic() - self._last >= every_s
        if run.wants_checkpoint or (due and not self.writer.busy):  # skipped while the last one is being written
            run.wants_checkpoint = False
            self._write(run)

    def after_epoch(self, run: RunView, finished: bool) -> None:
        """Write a checkpoint if one is due after this epoch; `finished`: it was the last epoch."""
        every = self._plan.every_epochs
        if (every is not None and (run.epoch % every == 0 or finished)) or run.wants_checkpoint:
            self._write(run, run.best_of)

    def _write(self, run: RunView, best_of: Sequence[str] = ()) -> None:
        """Copy the state and queue it for writing. Raises `RunTakenError` if another driver has taken over the run."""
        if run.rank != 0:
            return
        if self.writer.fenced is not None:
            raise self.writer.fenced
        self._last = clock.monotonic()
        at = run.at
        make_files = self._engine.copies(at)
        document = {"at": at.to_json(), "callbacks": callback_states(self._callbacks), "settings": self._settings}
        if conditions := self._engine.conditions():
            document["conditions"] = conditions
        token = 0 if self._training.fence is None else self._training.fence.token
        facts = CheckpointFacts(name_of(at.serial, token), at.step, at.epoch, at.position, tuple(best_of), token)
        self.writer.submit(lambda: Contents(facts, document, make_files()), at.step, tuple(best_of))
        if self._training.verbose > 1:
            print(f"writing a checkpoint of step {at.step}", flush=True)

    def first_progress(self) -> Progress:
        """Return the progress to resume from, or of the start. Raise `CheckpointError` for an unusable checkpoint."""
        if self._training.resume_from is None or loops.kept(loops.entered + 1) is not None:
            return Progress()  # in a further call of the function, the state of the one before is taken over
        try:
            at = self._restore(self._training.resume_from)
        except CheckpointError as error:
            # A worker that joins a running world gets the state from the others, so it needs no checkpoint. But if the
            # others are lost before their first step, nobody has a state, and the error counts.
            if not process.provisional:
                raise
            log.info("%s; the state comes from the other workers", error)
            return Progress()
        # A training that had finished continues if there are more epochs now; one that has done them all finishes.
        epochs = self._training.epochs
        if at.phase is TrainingPhase.FINISH and at.epoch < epochs and not at.stopped:
            return replace(at, phase=TrainingPhase.TRAIN)
        if at.phase is TrainingPhase.TRAIN and at.position == 0 and at.epoch >= epochs:
            return replace(at, phase=TrainingPhase.FINISH)
        return at

    def _restore(self, name: str) -> Progress:
        contents = self.checkpoints.load(name)
        then = contents.document["settings"]
        for key, value in self._settings.items():
            if then.get(key) != value:
                raise CheckpointError(
                    f"checkpoint {name} was written with {key}={then.get(key)!r}, but {key} is {value!r} now; use "
                    "another run_id to start over"
                )
        self._engine.check_conditions(contents.document.get("conditions", {}))
        try:
            at = Progress.from_json(contents.document["at"], *self._engine.load(contents.files))
        except CheckpointError:
            raise
        except (KeyError, ValueError, RuntimeError, TypeError) as error:
            raise CheckpointError(f"checkpoint {name} is of another model or optimizer: {error}") from error
        states = contents.document["callbacks"]
        have, written = [_class_name(each) for each in self._callbacks], [state["class"] for state in states]
        if have != written:
            raise CheckpointError(
                f"the checkpoint was written with the callbacks {written}, but the callbacks are {have}"
            )
        for callback, state in zip(self._callbacks, states, strict=True):
            callback.load_state_dict(state["state"])
        return at


class CallbackStates:
    """The states of all callbacks, as one value of the elastic state."""

    def __init__(self, callbacks: Sequence[Callback]) -> None:
        self._callbacks = callbacks

    def state_dict(self) -> dict[str, Any]:
        return {str(number): callback.state_dict() for number, callback in enumerate(self._callbacks)}

    def load_state_dict(self, states: Mapping[str, Any]) -> None:
        for number, callback in enumerate(self._callbacks):
            callback.load_state_dict(states[str(number)])


def callback_states(callbacks: Sequence[Callback]) -> list[dict[str, Any]]:
    return [{"class": _class_name(each), "state": dict(each.state_dict())} for each in callbacks]


def _class_name(callback: Callback) -> str:
    """Return the class of a callback; of an adapter, that of the framework's callback in it."""
    return type(getattr(callback, "wrapped", callback)).__qualname__


def save_timeout_s(environment: Mapping[str, str]) -> float:
    """Return the timeout for writing the result. Raises `InvalidSettingsError` if the variable holds no duration."""
    text = environment.get(SAVE_TIMEOUT_VARIABLE, "")
    try:
        seconds = float(text or SAVE_TIMEOUT_S)
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds < float("inf"):
        raise InvalidSettingsError(f"{SAVE_TIMEOUT_VARIABLE} must be a number of seconds, at least 0, not {text!r}")
    return seconds


class ResultWriter:
    """Writes the result of a training on its own thread, with retries: hours of work must survive a storage failure.

    Files that could not be written within `timeout_s` are in `unsaved`. A write that does not return is given up after
    twice that time. `before` is called before the first file; `check` raises `RunTakenError`, which is not retried, if
    this process must not write any more.
    """

    def __init__(
        self,
        store: Store,
        files: Mapping[str, bytes],
        check: Callable[[], None],
        notify: Callable[[str], None],
        *,
        before: Callable[[], None] = lambda: None,
        timeout_s: float = SAVE_TIMEOUT_S,
        now: Callable[[], float] = clock.monotonic,
        wait: Callable[[float], bool] | None = None,
    ) -> None:
        self.unsaved: dict[str, bytes] = {}
        self._store = store
        self._before = before
        self._left = dict(files)  # files that were not written yet, in the order of writing
        self._check = check
        self._notify = notify
        self._timeout_s = timeout_s
        self._now = now
        self._began = self._notified = now()
        self._closing = threading.Event()
        self._wait = self._closing.wait if wait is None else wait
        self._error: Exception | None = None
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._work, name="spark_elastic-saving", daemon=True)
        self._thread.start()

    def is_done(self, timeout_s: float) -> bool:
        """Wait up to `timeout_s` for the end, and return whether it has come. Raises what `_work` failed with."""
        done = self._done.wait(timeout_s)
        if self._error is not None:
            raise self._error
        seconds = self._now() - self._began
        if done or self._closing.is_set():
            return True
        limit_s = 2 * max(self._timeout_s, NOTIFY_INTERVAL_S)  # for the last checkpoint, and then for the result
        if seconds > limit_s and self._left:
            self._closing.set()
            self.unsaved = dict(self._left)
            names = ", ".join(self.unsaved)
            self._notify(
                f"{names}: {self._store.url} has not answered for {_in_words(seconds)}; what is not written is sent to "
                "the driver with the results of the job instead"
            )
            return True
        if self._now() - self._notified >= NOTIFY_INTERVAL_S:
            self._notified = self._now()
            self._notify(
                f"the result has been being written to {self._store.url} for {_in_words(seconds)}; without an answer "
                f"after {_in_words(limit_s)} it is sent to the driver instead"
            )
        return False

    def close(self) -> None:
        self._closing.set()
        self._done.wait(CLOSE_S)

    def _work(self) -> None:
        try:
            self._before()
            deadline = self._now() + self._timeout_s
            for file, data in list(self._left.items()):
                if not self._write(file, data, deadline) and not self._closing.is_set():
                    self.unsaved[file] = data
                del self._left[file]
        except Exception as error:  # raised by is_done
            self._error = error
        finally:
            self._done.set()

    def _write(self, file: str, data: bytes, deadline: float) -> bool:
        notified_at, attempts = -NOTIFY_INTERVAL_S, 0
        while True:
            try:
                self._check_run()
                # A large file takes long to write, and all drivers of a run write it under the same name.
                self._store.write_bytes(file, data, check=self._check_run)
            except RunTakenError:
                raise
            except Exception as error:  # each kind of storage has its own
                left_s = deadline - self._now()
                failed = f"{file} could not be written to {self._store.url} ({class_and_first_line(error)})"
            else:
                if attempts:
                    self._notify(f"{file} is written to {self._store.url} now, after {attempts} failed attempts")
                return True
            if left_s <= 0:
                tried = _in_words(self._timeout_s)
                self._notify(f"{failed} for {tried}; it is sent to the driver with the results of the job instead")
                return False
            if deadline - left_s - notified_at >= NOTIFY_INTERVAL_S or not attempts:
                notified_at = deadline - left_s
                self._notify(f"{failed}; retrying for {_in_words(left_s)}, then it is sent to the driver instead")
            if self._wait(min(RETRY_PAUSES_S[min(attempts, len(RETRY_PAUSES_S) - 1)], left_s)):
                return False
            attempts += 1

    def _check_run(self) -> None:
        try:
            self._check()
        except (RunTakenError, RunMissingError):
            raise
        except Exception as error:  # each kind of storage has its own: a storage that fails reads refuses writes, too
            log.info("the lease on the run %s could not be checked: %s", self._store.url, redacted(error))


def _in_words(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 90 else f"{seconds / 60:.0f} minutes"
