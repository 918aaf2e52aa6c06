"""What `keep_workers` keeps is gone with the session, long before its time."""

import sys

import pytest

from spark_elastic import run
from tests.integration.clusters import local
from tests.integration.spark.test_kept_workers import wait_for_end, where_it_runs

pytestmark = [
    pytest.mark.nightly,
    pytest.mark.cluster,
    pytest.mark.skipif(sys.platform != "linux", reason="servers are for Linux"),
]

LONG_S = 600
KEPT = {"verbose": 0, "keep_workers": LONG_S}


def test_servers_end_with_the_session_in_local_mode():
    with local(2) as cluster:
        found = {server for server, *_ in run(where_it_runs, num_proc=2, spark=cluster.spark, **KEPT)}
        assert len(found) == 1
        cluster.spark.stop()
        wait_for_end(found)
