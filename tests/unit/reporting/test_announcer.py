"""The announcer: records in, the timeline in wall-clock time and lines for people out."""

from __future__ import annotations

from spark_elastic import clock
from spark_elastic.membership import events as e
from spark_elastic.membership.reasons import LossCause, LossKind, Wait, WaitKind
from spark_elastic.membership.timeline import CooldownStarted, HostExcluded, JobEnded, WaitChanged, WorkerLeft
from spark_elastic.membership.topology import Place
from spark_elastic.reporting.announcer import CAUSE_S, Announcer


def test_all_times_of_a_record_are_turned_into_wall_clock_time():
    announcer = Announcer("job", print, verbose=0)
    wait = Wait(WaitKind.SLOTS, have=1, need=2)
    for record in (
        HostExcluded(10.0, "a", 3, until=70.0),
        CooldownStarted(10.0, "slot", "1", 2, until=70.0),
        WaitChanged(10.0, wait, deadline=70.0),
    ):
        announcer.announce(record)
    to_wall = clock.wall() - clock.monotonic()
    for record in announcer.timeline:
        end = record.deadline if isinstance(record, WaitChanged) else record.until
        assert abs(record.at - 10.0 - to_wall) < 1.0
        assert abs(end - record.at - 60.0) < 1e-3
    assert str(announcer.timeline[0]) == "host a is left alone for 60 s: 3 worlds in a row crashed there"


def test_loss_is_printed_once_its_cause_is_known_or_the_wait_for_it_is_over():
    lines: list[str] = []
    announcer = Announcer("job", lines.append, verbose=1)
    closed = LossCause(LossKind.CONNECTION_CLOSED, detail="reset")
    announcer.announce(WorkerLeft(5.0, 7, Place("a", "3", 0), None, closed, graceful=False))
    assert announcer.print_changes(5.0) == 5.0 + CAUSE_S
    assert lines == []
    exit = e.WorkerLost(7, LossCause(LossKind.EXITED, code=-9))
    announcer.observe(exit, [], 5.1)
    assert announcer.print_changes(5.1) is None
    assert lines == ["spark_elastic: a starting worker on executor 3 lost (killed by signal 9): still 0 workers"]


def test_end_of_the_job_ends_the_wait():
    announcer = Announcer("job", print, verbose=0)
    announcer.announce(WaitChanged(1.0, Wait(WaitKind.SLOTS, have=1, need=2, left_s=9.0), 10.0))
    assert announcer.waiting == "1 of 2 slots; waiting up to 9 s for more executors"
    announcer.announce(JobEnded(2.0, "finished", "1 worker is done"))
    assert announcer.waiting == ""


def test_interrupted_job_is_told_in_one_line_and_not_as_failed() -> None:
    lines: list[str] = []
    announcer = Announcer("job", lines.append, verbose=1)
    announcer.observe(e.CancelRequested("interrupted by KeyboardInterrupt"), [], 1.0)
    announcer.announce(JobEnded(1.0, "failed", "cancelled"))
    announcer.print_changes(1.0, last=True)
    assert lines == ["spark_elastic: the job was cancelled (interrupted by KeyboardInterrupt)"]
