"""The document of the status page: what it says of a job, and that it stays small."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from typing import Any

import pytest

from spark_elastic.membership import events as seen
from spark_elastic.membership.reasons import LossCause, LossKind, Wait, WaitKind, WorldChange, WorldChangeKind
from spark_elastic.membership.timeline import JobEnded, WaitChanged, WorkerLeft, WorldStarted
from spark_elastic.membership.topology import Place, StateVersion
from spark_elastic.reporting.event_log import MembershipChange
from spark_elastic.reporting.job_status import JobStatus, StatusModel, WorkerStatus
from spark_elastic.reporting.prometheus import metrics_text
from spark_elastic.settings import ElasticSettings
from spark_elastic.wire.messages import EpochEnded, LiveProgress
from tests.unit.reporting.exposition import read

HOSTILE = '<script>alert("x")</script>\\ \n\x07"}'
TOTALS = JobStatus("running", 1, 2, 10, "", 2)
WALL = 1_000_000.0


def model(**settings: Any) -> StatusModel:
    return StatusModel("7-1", ElasticSettings(4, 2, 4, **settings), now=0.0)


def worker(number: int, host: str = "a", rank: int | None = None, state: str = "training") -> WorkerStatus:
    return WorkerStatus(number, host, f"e{number}", rank, state, None)


def document(made: StatusModel, now: float, workers: Any = (), changes: Any = (), totals: JobStatus = TOTALS) -> Any:
    found = made.document(totals, workers, changes, now, WALL + now)
    return json.loads(json.dumps(found, allow_nan=False))


def epoch(number: int, loss: float, epochs: int = 10) -> EpochEnded:
    return EpochEnded(number, epochs, 2.0, {"loss": loss})


def started(at: float, size: int) -> WorldStarted:
    return WorldStarted(at, 1, size, 0, None, False, None, WorldChange(WorldChangeKind.JOB_STARTS))


def waiting(at: float, have: int, deadline: float) -> WaitChanged:
    return WaitChanged(at, Wait(WaitKind.REPLACEMENTS, have=have, need=2), deadline)


def test_rates_and_heartbeats_come_from_the_workers_own_messages() -> None:
    made = model()
    for second in range(5):
        for number in (1, 2):
            made.observe(seen.WorkerAlive(number, StateVersion(1, 10 * number * second)), float(second))
    found = document(made, 4.5, [worker(1, "a", 0), worker(2, "b", 1)])
    by_host = {row["host"]: row for row in found["hosts"]["rows"]}
    assert (by_host["a"]["steps_per_s"], by_host["b"]["steps_per_s"]) == (10.0, 20.0)
    assert by_host["a"]["heartbeat_age_s"] == 0.5
    assert [row["rank"] for row in found["workers"]["rows"]] == [0, 1]
    silent = document(made, 60.0, [worker(1, "a", 0)])["hosts"]["rows"][0]
    assert (silent["steps_per_s"], silent["heartbeat_age_s"]) == (None, 56.0)


def test_world_history_is_a_step_function_that_ends_with_the_present_size() -> None:
    made = model()
    made.record(started(5.0, 4), 4)
    lost = WorkerLeft(8.0, 1, Place("a", "1", 0), 0, LossCause(LossKind.EXITED, code=-9), False)
    made.record(lost, 3)
    world = document(made, 9.0)["world"]
    assert world["history"] == [[WALL, 0], [WALL + 5, 4], [WALL + 8, 3]]
    assert (world["size"], world["num_proc"], world["min_num_proc"]) == (3, 4, 2)


def test_wait_counts_from_its_begin_and_ends_with_the_world() -> None:
    made = model()
    made.record(waiting(1.0, 0, 61.0), 0)
    made.record(waiting(3.0, 1, 61.0), 0)
    found = document(made, 11.0)["wait"]
    assert (found["seconds"], found["left_s"]) == (10.0, 50.0)
    assert "1" in found["reason"]
    made.record(started(12.0, 2), 2)
    assert document(made, 13.0)["wait"] is None


def test_progress_is_of_the_epoch_that_runs_and_then_of_the_last() -> None:
    made = model()
    for tenth in range(5):
        made.live(LiveProgress(0, 3, "train", 100 * tenth, 1000, {"loss": 1.0}), tenth / 10)
    running = document(made, 0.5)["progress"]
    assert (running["epoch"], running["epochs"], running["rows"], running["rows_per_s"]) == (0, 3, 400, 1000.0)
    assert running["left_s"] == pytest.approx(2.6)
    made.epoch(epoch(0, 0.5, 3))
    assert document(made, 0.5)["progress"]["values"] == {"loss": 0.5}
    made.epoch(epoch(0, 0.7, 3))  # a new rank 0 sends it again
    assert document(made, 0.5)["epochs"] == {
        "count": 1,
        "rows": [{"epoch": 0, "seconds": 2.0, "values": {"loss": 0.5}}],
    }


def test_workers_have_the_seconds_of_a_step_that_they_work_and_wait() -> None:
    made = model()
    made.live(LiveProgress(0, 3, "train", 1, 10, {}, 0.03, (0.01, 0.03)), 1.0)
    both = [worker(1, "a", 0), worker(2, "b", 1)]
    rows = document(made, 2.0, both)["workers"]["rows"]
    assert [(row["work_s"], row["wait_s"]) for row in rows] == [(0.01, 0.02), (0.03, 0.0)]
    other = document(made, 2.0, both[:1], totals=replace(TOTALS, size=1))["workers"]["rows"]
    assert [(row["work_s"], row["wait_s"]) for row in other] == [(None, None)], "of another world"


def test_live_progress_of_a_lost_rank_0_does_not_turn_back_the_epoch() -> None:
    made = model()
    made.live(LiveProgress(2, 3, "train", 1, 10, {}), 1.0)
    made.live(LiveProgress(1, 3, "train", 9, 10, {}), 2.0)
    assert document(made, 2.0)["progress"]["epoch"] == 2


def test_end_of_the_job_is_kept_with_its_first_line() -> None:
    made = model()
    made.record(JobEnded(7.0, "failed", f"{HOSTILE}\nTraceback ..."), 0)
    made.record(JobEnded(8.0, "failed", "the same again"), 0)
    found = document(made, 9.0)
    assert (found["phase"], found["ended"]) == ("failed", WALL + 7)
    assert found["reason"] == HOSTILE.partition("\n")[0]


def test_values_that_are_not_finite_are_null() -> None:
    made = model()
    made.epoch(EpochEnded(0, 1, 1.0, {"loss": math.nan, "m": math.inf}))
    assert document(made, 1.0)["epochs"]["rows"][0]["values"] == {"loss": None, "m": None}


def test_metrics_are_in_the_text_format_whatever_names_contain() -> None:
    made = model()
    made.observe(seen.WorkerAlive(1, StateVersion(1, 5)), 0.0)
    made.epoch(EpochEnded(0, 3, 1.5, {HOSTILE: 0.25, "loss": math.nan}))
    change = MembershipChange(WALL, "lost", HOSTILE, HOSTILE, 4, 3, pause_s=1.5, steps_lost=2)
    found = read(metrics_text(document(made, 1.0, [worker(1, HOSTILE, 0)], [change])))
    values = {dict(labels)["name"]: value for labels, value in found["spark_elastic_epoch_value"].samples.items()}
    assert values.pop(HOSTILE.replace("\x07", "\N{REPLACEMENT CHARACTER}")) == 0.25
    assert math.isnan(values.pop("loss"))
    assert not values
    counts = {dict(labels)["kind"]: value for labels, value in found["spark_elastic_events_total"].samples.items()}
    assert (counts["lost"], counts["joined"]) == (1, 0)
    assert list(found["spark_elastic_steps_lost_total"].samples.values()) == [2]
    assert list(found["spark_elastic_pause_seconds_total"].samples.values()) == [1.5]
    phases = {dict(labels)["phase"]: value for labels, value in found["spark_elastic_phase"].samples.items()}
    assert [phase for phase, value in phases.items() if value] == ["running"]


def test_steps_lost_are_not_known_of_a_function_that_started_again() -> None:
    change = MembershipChange(WALL, "lost", "rank 1", "killed", 2, 1, pause_s=1.5, restarted=True)
    found = document(model(), 1.0, [], [change])
    assert (found["events"]["steps_lost"], found["events"]["restarts"]) == (None, 1)
    assert "no elastic loop" in found["events"]["rows"][0]["text"]
    metrics = read(metrics_text(found))
    assert "spark_elastic_steps_lost_total" not in metrics
    assert list(metrics["spark_elastic_restarts_total"].samples.values()) == [1]
