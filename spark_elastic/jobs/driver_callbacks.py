"""Callbacks that run on the driver: the protocol, and the session that calls them.

All events of one fit are called on the thread that called `fit` (or `run`), which otherwise only waits. So the active
run of a tracker, a trial of a tuner and Ctrl-C work as they do around `fit`, and two fits in two threads do not mix.

The workers do not wait for that thread, with one exception: at the end of an epoch, rank 0 waits for the decision of
`on_epoch_end`, for at most `decides_within_s`, so that a stop takes effect after that very epoch. A callback that is
slower, or hangs, delays one epoch by that time. Later epochs are not delayed while it is busy: their rows queue up, and
a stop takes effect at the end of the epoch that is then running. `fit` itself returns when all callbacks have returned.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType, TracebackType
from typing import Any

from spark_elastic.errors import InvalidSettingsError
from spark_elastic.reporting.event_log import MembershipChange
from spark_elastic.reporting.history import History, Row

log = logging.getLogger("spark_elastic.callbacks")

Stop = bool | str | None
"""The return value of an event. None and False: continue. True, or the reason as a str: stop."""
MOST_WAIT_S = 300.0
"""Largest `decides_within_s`: workers must not be taken for stuck meanwhile."""


@dataclass(frozen=True)
class DriverRun:
    """A fit, or a job of `run`, that is about to start.

    Attributes:
        name: Class of the estimator, or name of the function.
        settings: The settings as plain values for people: without those that are not set, without credentials.
        epochs: The number of epochs to train; None for `run`.
        run_id: The setting `run_id`; None if it is not set.
        resumed: True if a fit resumes from a checkpoint; only its new epochs are reported.
    """

    name: str
    settings: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))
    epochs: int | None = None
    run_id: str | None = None
    resumed: bool = False


@dataclass(frozen=True)
class DriverResult:
    """The outcome of a fit, or of a job of `run`.

    Attributes:
        error: The error that ended it; None if it succeeded.
        model: The trained model; None for `run`, and if there is an error.
        returned: What the function of `run` returned in each worker, by rank; None for a fit.
        history: The model's history; if there is an error, the epochs that were reported.
        events: The events of the workers, as in `model.events`.
        stopped: Why the training ended before the last epoch; "" if it did not.
    """

    error: BaseException | None = None
    model: Any = None
    returned: list[Any] | None = None
    history: History = field(default_factory=History)
    events: tuple[Mapping[str, Any], ...] = ()
    stopped: str = ""


class DriverCallback:
    """Base of callbacks that run on the driver: override the events that you need.

    They are given in the same list as the callbacks of the workers, `callbacks=[...]`. They are never pickled or sent
    anywhere, so they may hold connections, trials and files. One object may serve several fits; fits in several
    threads call it at the same time, each on its own thread.

    Every event may raise: that ends the fit, and `fit` raises this very error once the workers are gone.

    Attributes:
        decides_within_s: The longest time that the workers wait at the end of each epoch for `on_epoch_end`; the
            largest of all callbacks counts. 0, for callbacks that never stop a training: they do not wait.
    """

    decides_within_s: float = 10.0

    def on_fit_start(self, run: DriverRun) -> Stop:
        """Called once before the workers start, when settings and rows have been checked."""
        return None

    def on_epoch_end(self, row: Row) -> Stop:
        """Called once for each epoch, in order, with its row of the history (`epoch` counts from 0).

        Returns:
            True, or the reason as a str, to end the training after this epoch with the model that it has.
        """
        return None

    def on_membership_change(self, change: MembershipChange) -> Stop:
        """Called once for each change of the workers, as soon as its cause is known; `str(change)` is its sentence.

        Returns:
            As `on_epoch_end`; the training then ends after the epoch that is running.
        """
        return None

    def on_fit_end(self, result: DriverResult) -> None:
        """Called once at the end, also after an error, if `on_fit_start` returned. The workers are gone by then."""


class CallbackSession:
    """Calls the driver's callbacks during one fit, in their order: a `driver.peers.JobObserver`.

    The job's thread hands events in; the thread that called `fit` takes them out, in order, and calls the callbacks.
    """

    def __init__(self, callbacks: DriverCallback | Sequence[DriverCallback]) -> None:
        self._callbacks = (callbacks,) if isinstance(callbacks, DriverCallback) else tuple(callbacks)
        for each in self._callbacks:
            limit = each.decides_within_s
            if isinstance(limit, bool) or not isinstance(limit, (int, float)) or not 0 <= limit <= MOST_WAIT_S:
                raise InvalidSettingsError(
                    f"decides_within_s of {type(each).__name__} must be a number of seconds from 0 to "
                    f"{MOST_WAIT_S:g}, not {limit!r}"
                )
        self._started: list[DriverCallback] = []
        #: Events to call on the fit's thread; None: the job is over.
        self._events: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._rows: dict[int, Row] = {}
        """The rows that were handed in, by epoch. An epoch counts once, however often workers send it."""
        self._asking: dict[int, list[Callable[[str], None]]] = {}
        """The workers that wait for the decision about an epoch. Its callbacks have not returned."""
        self._behind = False
        """True once it was said that the callbacks are slower than the epochs."""
        self.stop_reason = ""
        """Why a callback has requested the end of the training; "" if none has."""
        self.raised: BaseException | None = None
        """What a callback has raised while the job ran."""
        self._result = DriverResult()

    def __bool__(self) -> bool:
        return bool(self._callbacks)

    @property
    def decides_within_s(self) -> float | None:
        """The time that workers wait for a decision at the end of an epoch; None: epochs need not be reported."""
        return max((each.decides_within_s for each in self._callbacks), default=None)

    # --- the job's thread -------------------------------------------------------------------------

    def epoch_ended(self, row: Row, answer: Callable[[str], None] | None) -> None:
        """Take the row of an epoch that a worker reports.

        `answer` is to be called, on any thread, with the reason to stop, or "" to continue; None: the worker does not
        wait.
        """
        epoch = int(row["epoch"])
        answers = [answer] if answer is not None else []
        with self._lock:
            busy = bool(self._asking)
            if epoch in self._asking:
                self._asking[epoch] += answers  # a new rank 0 asks again
                return
            if epoch not in self._rows:
                self._rows[epoch] = row
                waits = answers and not busy and not self.stop_reason
                self._asking[epoch] = answers if waits else []
                self._events.put(lambda: self._call_epoch(epoch, row))
                if waits:
                    return
            tell, self._behind = busy and not self._behind and bool(answers), self._behind or busy
        if tell:
            log.warning(
                "on_epoch_end of the driver's callbacks takes longer than an epoch; the training continues without "
                "waiting for it, and a stop takes effect after the epoch that is then running"
            )
        for call in answers:
            call(self.stop_reason)

    def membership_changed(self, change: MembershipChange) -> None:
        """Take a change of the workers."""

        def call() -> None:
            for each in self._callbacks:
                self._note_stop(each, "on_membership_change", each.on_membership_change(change))

        self._events.put(call)

    def job_over(self) -> None:
        """End `deliver` once it has called the events that are there. No event may come after this."""
        self._events.put(None)

    # --- the fit's thread -------------------------------------------------------------------------

    def fit(self, run: DriverRun) -> CallbackSession:
        """Return this session, whose block calls `on_fit_start` and, with its result or error, `on_fit_end`."""
        self._run = run
        return self

    # no generator, from which a StopIteration of a callback would not come out
    def __enter__(self) -> None:
        try:
            for each in self._callbacks:
                self._note_stop(each, "on_fit_start", each.on_fit_start(self._run))
                self._started.append(each)
        except BaseException as error:
            self.__exit__(type(error), error, None)
            raise

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        """Call `on_fit_end` of all callbacks that have begun. Raises the first error of these if the block has none."""
        if error is not None:
            with self._lock:
                history = History([self._rows[epoch] for epoch in sorted(self._rows)])
            self._result = replace(self._result, error=error, model=None, history=history)
        first: BaseException | None = None
        for each in self._started:
            try:
                each.on_fit_end(self._result)
            except BaseException as problem:
                if error is not None or first is not None:
                    log.exception("on_fit_end of %s failed", type(each).__name__)
                first = first or problem
        if error is None and first is not None:
            raise first

    def succeeded(self, result: DriverResult) -> None:
        """Set the result for `on_fit_end`."""
        # Only the rank that asked knows the reason; a reason that came after the last epoch has stopped nothing.
        self._result = replace(result, stopped=result.stopped and (self.stop_reason or result.stopped))

    def note_events(self, events: Sequence[Mapping[str, Any]]) -> None:
        """Set the events for `on_fit_end` in case that the fit fails."""
        self._result = replace(self._result, events=tuple(events))

    def deliver(self, *, until_stop: bool = False) -> None:
        """Call the callbacks until the job is over, or, with `until_stop`, until one of them requests the end."""
        while not (until_stop and self.stop_reason) and (event := self._events.get()) is not None:
            try:
                event()
            except BaseException as error:
                self.raised = error
                raise

    def _call_epoch(self, epoch: int, row: Row) -> None:
        try:
            for each in self._callbacks:
                self._note_stop(each, "on_epoch_end", each.on_epoch_end(dict(row)))  # one may change its row
        finally:
            # After an error too: the job is ended next, and workers that wait would only take longer to end.
            with self._lock:
                answers = self._asking.pop(epoch)
            for answer in answers:
                answer(self.stop_reason)

    def _note_stop(self, callback: DriverCallback, event: str, returned: Any) -> None:
        name, is_bool = type(callback).__name__, type(returned).__name__ in ("bool", "bool_")  # numpy's too
        if returned is None or (is_bool and not returned):
            return
        if not is_bool and not isinstance(returned, str):
            raise InvalidSettingsError(
                f"{event} of {name} returned {returned!r:.200} ({type(returned).__name__}); return None or False to "
                "continue the training, True or the reason as a str to stop it"
            )
        if not callback.decides_within_s:
            raise InvalidSettingsError(
                f"{event} of {name} returned {returned!r:.200} to stop the training, but its decides_within_s is 0, so "
                "no worker waits for it; give it the seconds that the workers may wait for each epoch"
            )
        reason = returned if isinstance(returned, str) and returned else f"{name} requested the end of the training"
        self.stop_reason = self.stop_reason or reason
