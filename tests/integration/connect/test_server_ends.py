"""The server of Spark Connect dies while a job runs."""

import pytest

import spark_elastic
from spark_elastic.errors import SessionLostError
from tests.integration.connect.server import ConnectServer
from tests.integration.connect.test_run import PROMPT
from tests.integration.processes import GONE_S, assert_gone, wait_until
from tests.integration.spark.conftest import nothing_imported_ahead
from tests.leftovers import Before

pytestmark = pytest.mark.nightly


def test_job_ends_with_its_reason_when_the_server_is_killed(connect_mode):
    with ConnectServer("local[1]") as server:
        before = Before()

        def wait():
            import time

            time.sleep(600)

        with nothing_imported_ahead():
            job = spark_elastic.run_async(wait, num_proc=1, spark=server.session(), **PROMPT)
        wait_until(lambda: job.status().size == 1 or server.workers(), 60, "the worker runs")
        server.kill_server()
        with pytest.raises(SessionLostError, match=r"Spark Connect server.* while the job ran"):
            job.result(60)
        assert_gone(server.workers, GONE_S)
        before.assert_no_threads_left(60.0)
