"""What `keep_workers` keeps is gone with the session, and with the driver program, long before its time."""

import subprocess
import sys

import pytest

from spark_elastic import run
from tests.integration.clusters import ROOT, local
from tests.integration.processes import is_running
from tests.integration.spark.test_kept_workers import wait_for_end, where_it_runs

pytestmark = [pytest.mark.cluster, pytest.mark.skipif(sys.platform != "linux", reason="servers are for Linux")]

LONG_S = 600
KEPT = {"verbose": 0, "keep_workers": LONG_S}


def test_servers_end_with_the_session_in_local_mode():
    with local(2) as cluster:
        found = {server for server, *_ in run(where_it_runs, num_proc=2, spark=cluster.spark, **KEPT)}
        assert len(found) == 1
        cluster.spark.stop()
        wait_for_end(found)


PROGRAM = f"""
import sys, time
sys.path.insert(0, {str(ROOT)!r})
from spark_elastic import run
from tests.integration.clusters import local
from tests.integration.spark.test_kept_workers import where_it_runs
with local(2) as cluster:
    found = run(where_it_runs, num_proc=2, spark=cluster.spark, verbose=0, keep_workers={LONG_S})
    print(*[server for server, *_ in found], flush=True)
    time.sleep({LONG_S})
"""


def test_servers_end_with_the_driver_program():
    words = [sys.executable, "-c", PROGRAM]
    with subprocess.Popen(words, stderr=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True) as process:
        found = list(map(int, process.stdout.readline().split()))
        assert len(found) == 2
        assert all(map(is_running, found))
        process.kill()
        wait_for_end(found)
