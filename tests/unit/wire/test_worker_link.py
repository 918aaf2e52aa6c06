"""The worker's side of the channel to the driver: when it reports the version of its state."""

from __future__ import annotations

import inspect
import os

import pytest

from benchmarks._fixed_world import FixedLink
from spark_elastic.errors import UsageError
from spark_elastic.membership.topology import Member, Place, StateVersion, World
from spark_elastic.wire.messages import WorldAssigned
from spark_elastic.wire.worker_link import WorkerLink
from tests.unit.world_link import WorldLink

HELD = StateVersion(steps=7)


class Channel:
    """Takes every message."""

    def start(self, *_, **__):
        pass

    def send(self, message):
        pass


def in_a_world_of_four(rank: int, version: StateVersion | None) -> WorkerLink:
    """The link of the worker of that rank, which has joined a world with that version of its state."""
    members = tuple(Member(10 + r, Place("127.0.0.1", str(r), r), r, r, 4, 0, 1) for r in range(4))
    link = WorkerLink(10 + rank, Channel(), b"key", lambda why: None)
    link._on_message(WorldAssigned(World(1, members, 0, HELD, False), ("127.0.0.1",) * 4))
    link.join(0, version)
    return link


def reports_at_once(link: WorkerLink, version: StateVersion) -> bool:
    link._beat_now.clear()
    link.report_version(version)
    return link._beat_now.is_set()


@pytest.mark.parametrize("rank", range(4))
def test_two_members_report_at_once_that_a_world_has_begun_and_its_first_step(rank):
    link = in_a_world_of_four(rank, HELD)
    begun, first, second = HELD.marked(), HELD.stepped(), HELD.stepped(2)
    assert [reports_at_once(link, version) for version in (begun, first, second)] == [rank < 2, rank < 2, False]
    assert (link._version, link._begun) == (second, 1)  # the next heartbeat of each member has it


@pytest.mark.parametrize("rank", range(4))
def test_a_member_that_held_no_state_reports_its_first_version_at_once(rank):
    assert reports_at_once(in_a_world_of_four(rank, None), HELD.marked())


def test_a_forked_child_sends_nothing_on_its_parents_channel():
    link = in_a_world_of_four(0, HELD)
    link.start()
    child = os.fork()
    if child == 0:
        try:
            link.join(1, HELD)
        except UsageError as error:
            os._exit(0 if "forked child" in str(error) else 2)
        finally:
            os._exit(1)
    assert os.waitpid(child, 0)[1] == 0


@pytest.mark.parametrize("imitation", [WorldLink, FixedLink])
def test_links_of_tests_and_benchmarks_take_the_arguments_of_the_real_one(imitation: type) -> None:
    methods = {name: own for name, own in vars(imitation).items() if inspect.isfunction(own) and name[0] != "_"}
    shared = methods.keys() & vars(WorkerLink).keys()
    assert len(shared) > 10
    for name in shared:
        assert list(inspect.signature(methods[name]).parameters) == list(
            inspect.signature(getattr(WorkerLink, name)).parameters
        ), name
