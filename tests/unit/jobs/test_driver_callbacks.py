"""The session that calls the driver's callbacks: what workers are told, and when."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from spark_elastic import DriverCallback, LocalLauncher, run_async
from spark_elastic.errors import InvalidSettingsError
from spark_elastic.jobs.driver_callbacks import CallbackSession, DriverResult, DriverRun


class Recording(DriverCallback):
    """Keeps what it is called with; `returns` by event or epoch."""

    def __init__(self, **returns: Any) -> None:
        self.returns = returns
        self.seen: list[Any] = []

    def on_fit_start(self, run: DriverRun) -> Any:
        self.seen.append("start")
        return self._return("start")

    def on_epoch_end(self, row: Any) -> Any:
        self.seen.append(row["epoch"])
        return self._return(f"epoch{row['epoch']}")

    def on_fit_end(self, result: DriverResult) -> None:
        self.seen.append(result.error)
        self._return("end")

    def _return(self, event: str) -> Any:
        value = self.returns.get(event)
        if isinstance(value, BaseException):
            raise value
        return value


def row(epoch: int) -> dict[str, Any]:
    return {"epoch": epoch, "loss": 1.0 / (epoch + 1)}


def deliver(session: CallbackSession) -> None:
    session.job_over()
    session.deliver()


@pytest.mark.parametrize(("returned", "reason"), [("pruned", "pruned"), (True, "Recording"), (np.bool_(True), "Rec")])
def test_stop_is_the_answer_to_the_worker_that_asks_about_this_epoch(returned: Any, reason: str) -> None:
    session = CallbackSession([Recording(epoch1=returned)])
    answers: list[str] = []
    for epoch in range(2):
        session.epoch_ended(row(epoch), answers.append)
        deliver(session)
    assert answers[0] == ""
    assert answers[1].startswith(reason)


@pytest.mark.parametrize("returned", [None, False, np.bool_(False)])
def test_nothing_and_false_continue(returned: Any) -> None:
    session = CallbackSession([Recording(epoch0=returned)])
    answers: list[str] = []
    session.epoch_ended(row(0), answers.append)
    deliver(session)
    assert answers == [""]


def test_other_return_value_is_an_error_that_says_what_to_return() -> None:
    session = CallbackSession([Recording(epoch0=3)])
    session.epoch_ended(row(0), None)
    with pytest.raises(InvalidSettingsError, match=r"on_epoch_end of Recording returned 3 \(int\); return None or"):
        deliver(session)


def test_epoch_that_a_new_rank_0_reports_again_is_delivered_once_and_answered_again() -> None:
    callback = Recording(epoch0="enough")
    session = CallbackSession([callback])
    first: list[str] = []
    second: list[str] = []
    session.epoch_ended(row(0), first.append)
    session.epoch_ended(row(0), second.append)  # while the callback is running
    deliver(session)
    session.epoch_ended(row(0), second.append)  # after it
    assert callback.seen == [0]
    assert (first, second) == (["enough"], ["enough", "enough"])


def test_workers_do_not_wait_for_a_callback_that_is_behind_and_stop_at_the_next_epoch(caplog: Any) -> None:
    callback = Recording(epoch0="late")
    session = CallbackSession([callback])
    answers: list[str] = []
    for epoch in range(3):
        session.epoch_ended(row(epoch), lambda stop, epoch=epoch: answers.append(f"{epoch}{stop}"))  # type: ignore[misc]
    assert answers == ["1", "2"], "epoch 0 is being decided; the others continue at once"
    deliver(session)
    assert answers == ["1", "2", "0late"]
    assert callback.seen == [0, 1, 2]
    session.epoch_ended(row(3), lambda stop: answers.append(f"3{stop}"))
    assert answers[-1] == "3late"
    assert len([record for record in caplog.records if "longer than an epoch" in record.message]) == 1


def test_error_of_a_callback_is_raised_as_itself_and_every_started_callback_sees_the_end() -> None:
    class Pruned(Exception):
        pass

    error = Pruned()
    callbacks = [Recording(), Recording(epoch0=error), Recording(end=OSError("disk full"))]
    session = CallbackSession(callbacks)
    session.epoch_ended(row(0), None)
    with pytest.raises(Pruned) as raised, session.fit(DriverRun("E")):
        deliver(session)
    assert raised.value is error
    assert [each.seen for each in callbacks] == [["start", 0, error], ["start", 0, error], ["start", error]]


def test_callback_that_raises_at_the_start_ends_the_fit_before_it_begins() -> None:
    callbacks = [Recording(), Recording(start=ValueError("no server")), Recording()]
    session = CallbackSession(callbacks)
    with pytest.raises(ValueError, match="no server"), session.fit(DriverRun("E")):
        raise AssertionError("the fit must not begin")
    assert callbacks[1].seen == ["start"]
    assert callbacks[2].seen == [], "what was not started is not ended"


def test_error_at_the_end_is_raised_after_all_callbacks_were_called() -> None:
    callbacks = [Recording(end=OSError("first")), Recording(end=OSError("second")), Recording()]
    session = CallbackSession(callbacks)
    with pytest.raises(OSError, match="first"), session.fit(DriverRun("E")):
        pass
    assert callbacks[2].seen == ["start", None]


def test_stop_of_a_callback_that_nobody_waits_for_is_an_error() -> None:
    callback = Recording(epoch0="stop")
    callback.decides_within_s = 0
    session = CallbackSession([callback])
    session.epoch_ended(row(0), None)
    with pytest.raises(InvalidSettingsError, match="decides_within_s is 0"):
        deliver(session)


@pytest.mark.parametrize("limit", [-1, 1e4, "5", True, float("nan")])
def test_impossible_time_for_a_decision_is_reported(limit: Any) -> None:
    callback = Recording()
    callback.decides_within_s = limit
    with pytest.raises(InvalidSettingsError, match="decides_within_s of Recording must be a number of seconds"):
        CallbackSession([callback])


def test_run_async_takes_no_callbacks() -> None:
    with pytest.raises(InvalidSettingsError, match="run_async takes no callbacks"):
        run_async(print, callbacks=[Recording()], num_proc=1, launcher=LocalLauncher())


def test_callbacks_of_run_must_be_of_this_kind() -> None:
    with pytest.raises(
        InvalidSettingsError, match=r"callbacks must be a list of spark_elastic.DriverCallback, not \[3"
    ):
        run_async(print, callbacks=[3], num_proc=1, launcher=LocalLauncher())  # type: ignore[list-item]
