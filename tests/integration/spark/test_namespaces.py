"""Standalone Workers on hosts with a network of their own: links that go down without a word."""

import pytest

from tests.integration import network
from tests.integration.clusters import module_fixture, namespaced
from tests.integration.processes import wait_until
from tests.integration.spark.conftest import finished
from tests.integration.spark.diary import WAIT_S, is_alive

pytestmark = [
    pytest.mark.nightly,
    pytest.mark.cluster,
    pytest.mark.skipif(network.why_unavailable() is not None, reason=str(network.why_unavailable())),
]
cluster = module_fixture(namespaced, workers=2, cores=1)


def test_a_host_whose_link_is_down_is_left_behind_and_ends_its_worker_itself(jobs, cluster):
    job, diary = jobs.train(2, heartbeat_timeout=4, elastic_timeout=12)  # the latter for a driver that may be paused
    world = diary.wait_for_world(2)
    assert {member.place.host for member in job._driver._peers.world.members} == set(cluster.worker_hosts())
    cut_off = world[0]
    host = next(m.place.host for m in job._driver._peers.world.members if m.rank == 0)
    cluster.link_down(host)
    try:
        alone = diary.wait_for_world(1, after=cut_off["round"])
        assert alone[0]["pid"] == world[1]["pid"]
        wait_until(lambda: not is_alive(cut_off["pid"]), WAIT_S, "the worker behind the link has ended")
    finally:
        cluster.link_up(host)
    diary.wait_for_world(2, after=alone[0]["round"])
    assert len(finished(job, diary)) == 2
