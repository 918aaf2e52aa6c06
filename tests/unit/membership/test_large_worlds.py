"""What is announced of many workers, and how often they send heartbeats."""

from __future__ import annotations

import pytest

from spark_elastic.membership import events as e
from spark_elastic.membership.commands import Announce, PublishWorld
from spark_elastic.membership.machine import Membership
from spark_elastic.membership.reasons import LossCause, LossKind, Wait, WaitKind
from spark_elastic.membership.timeline import Waiting
from spark_elastic.membership.topology import Place
from spark_elastic.settings import ElasticSettings
from tests.unit.membership.script import step_at

SIZE = 500


def test_survivors_of_a_large_world_are_announced_a_few_times_and_not_one_by_one() -> None:
    machine = Membership(ElasticSettings(num_proc=SIZE, min_num_proc=1, max_num_proc=SIZE))
    machine.handle(e.JobStarted(), 0.0)
    told = []
    for number in range(1, SIZE + 1):
        machine.handle(e.AgentJoined(number, Place(f"h{number // 8}", str(number), number - 1)), 1.0)
    for number in range(1, SIZE + 1):
        told += machine.handle(e.WorkerReady(number, 0, None, at_init=True), 2.0)
    gathering = [each for each in told if isinstance(each, Announce) and isinstance(each.record, Waiting)]
    assert 10 < len(gathering) < 40
    for number in range(1, SIZE + 1):
        machine.handle(e.WorkerAlive(number, step_at(10)), 3.0)
    told = machine.handle(e.WorkerLost(1, LossCause(LossKind.CONNECTION_CLOSED)), 4.0)
    for number in range(2, SIZE + 1):
        told += machine.handle(e.WorkerReady(number, 1, step_at(10)), 4.0 + number / 1000)
    waits = [each.record for each in told if isinstance(each, Announce) and isinstance(each.record, Waiting)]
    assert waits[0].wait.have == SIZE - 1
    assert [wait.wait.have for wait in waits[-16:]] == list(range(16, 0, -1))
    assert len(waits) < 40
    assert isinstance(told[-2], PublishWorld)


@pytest.mark.parametrize(
    ("mine", "theirs", "alike"),
    [
        (Wait(WaitKind.SURVIVORS, have=100), Wait(WaitKind.SURVIVORS, have=120, left_s=3.0), True),
        (Wait(WaitKind.SURVIVORS, have=100), Wait(WaitKind.SURVIVORS, have=134), False),
        (Wait(WaitKind.SURVIVORS, have=16), Wait(WaitKind.SURVIVORS, have=17), False),
        (Wait(WaitKind.SURVIVORS, have=16), Wait(WaitKind.SURVIVORS, have=16), True),
        (Wait(WaitKind.SURVIVORS, have=100), Wait(WaitKind.MINIMUM, have=100), False),
        (Wait(WaitKind.SURVIVORS, have=100), Wait(WaitKind.SURVIVORS, have=101, finishing=1), False),
        (Wait(WaitKind.MINIMUM, have=100, need=200), Wait(WaitKind.MINIMUM, have=101, need=300), False),
    ],
)
def test_waits_are_alike_if_only_large_counts_differ_a_little(mine: Wait, theirs: Wait, alike: bool) -> None:
    assert mine.is_much_like(theirs) is alike
    assert theirs.is_much_like(mine) is alike


@pytest.mark.parametrize(
    ("workers", "timeout_s", "interval_s"),
    [(2, 30.0, 2.0), (300, 30.0, 2.0), (600, 30.0, 4.0), (3000, 30.0, 6.0), (3000, 5.0, 1.0)],
)
def test_heartbeats_of_many_workers_are_further_apart(workers: int, timeout_s: float, interval_s: float) -> None:
    settings = ElasticSettings(1, 1, workers, heartbeat_timeout_s=timeout_s)
    assert settings.heartbeat_interval_s == interval_s
