"""`run` on a Spark Connect server: kills, cancellation, large functions and results, errors."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytest.importorskip("grpc")

import spark_elastic
from spark_elastic.errors import DriverUnreachableError, JobCancelledError
from spark_elastic.membership.timeline import WorldStarted
from spark_elastic.spark.session import checked_cluster
from tests.integration.connect.server import ConnectServer
from tests.integration.processes import GONE_S, assert_gone, wait_until
from tests.integration.spark.conftest import finished, nothing_imported_ahead
from tests.integration.spark.diary import Diary
from tests.integration.spark.training import train
from tests.leftovers import Before

pytestmark = pytest.mark.nightly

PROMPT = {"start_timeout": 120, "elastic_timeout": 90, "heartbeat_timeout": 20, "cooldown_range": (0.05, 1.0)}


@pytest.fixture(scope="module")
def server():
    with ConnectServer("local[3]") as server:
        yield server


@pytest.fixture(scope="module")
def session(server):
    return server.session()


@pytest.fixture(autouse=True)
def nothing_left(server, session):
    before = Before()
    yield
    assert_gone(server.workers, GONE_S)
    before.assert_no_threads_left()


def start_training(session, folder, **settings):
    job = spark_elastic.run_async(train, (str(folder),), spark=session, **{**PROMPT, **settings})
    return job, Diary(folder)


def test_training_survives_the_kill_of_a_worker_and_of_an_agent(session, tmp_path):
    job, diary = start_training(session, tmp_path, num_proc=2, min_num_proc=1)
    world = diary.wait_for_world(2)
    os.kill(world[0]["pid"], signal.SIGKILL)
    world = diary.wait_for_world(2, after=world[0]["round"])
    agent = int(Path(f"/proc/{world[1]['pid']}/stat").read_text().rpartition(")")[2].split()[1])
    os.kill(agent, signal.SIGKILL)  # the Python worker of the Spark task; its query fails with it
    diary.wait_for_world(2, after=world[0]["round"])
    assert len(finished(job, diary)) == 2
    assert len([each for each in job.timeline() if isinstance(each, WorldStarted)]) >= 3


def test_cancelled_training_ends_within_seconds(server, session, tmp_path):
    job, diary = start_training(session, tmp_path, num_proc=2)
    diary.wait_for_world(2)
    began = time.monotonic()
    job.cancel()
    assert_gone(server.workers, 5.0)
    assert job.done()
    assert time.monotonic() - began < 5.0
    with pytest.raises(JobCancelledError):
        job.result(1)


def test_user_who_interrupts_all_queries_of_the_session_does_not_end_the_job(session, tmp_path):
    def wait_for_a_file():
        import spark_elastic.torch as hvd

        hvd.init()
        while not Path(tmp_path, "go").exists():
            time.sleep(0.05)
        return hvd.rank()

    def worlds():
        return [each for each in job.timeline() if isinstance(each, WorldStarted)]

    job = spark_elastic.run_async(wait_for_a_file, num_proc=2, spark=session, **PROMPT)
    wait_until(lambda: session.interruptAll() or job.done(), 60, "the query that looks for slots is cancelled")
    wait_until(lambda: worlds() or job.done(), 60, "the first world")
    session.interruptAll()  # all slots end at the same moment
    wait_until(lambda: len(worlds()) > 1 or job.done(), 60, "the second world")
    Path(tmp_path, "go").touch()
    assert job.result(60) == [0, 1]


def test_large_function_and_large_results_do_not_travel_in_one_message(session):
    given = os.urandom(8 << 20)  # the server puts at most 4 MiB of rows into a message

    def reverse():
        return given[::-1]

    with nothing_imported_ahead():
        assert spark_elastic.run(reverse, num_proc=2, spark=session, verbose=0) == [given[::-1]] * 2


def test_address_that_executors_do_not_reach_is_an_error_within_10_s(session):
    began = time.monotonic()
    with pytest.raises(DriverUnreachableError, match=r"192\.0\.2\.1: .*name the address .*driver_host="):
        spark_elastic.run(lambda: None, num_proc=1, spark=session, driver_host="192.0.2.1", verbose=0)
    assert time.monotonic() - began < 10.0


_PROGRAM = """
import sys, time
import spark_elastic
from pyspark.sql import SparkSession

def wait():
    time.sleep(600)

spark = SparkSession.builder.remote(sys.argv[1]).getOrCreate()
spark_elastic.run(wait, num_proc=2, verbose=0)
"""


def test_interrupted_program_leaves_no_query_behind(server, session):
    program = subprocess.Popen([sys.executable, "-c", _PROGRAM, server.url], stderr=subprocess.PIPE, text=True)
    try:
        wait_until(lambda: len(server.workers()) >= 2, 60, "the workers run")
        program.send_signal(signal.SIGINT)
        assert "KeyboardInterrupt" in program.communicate(timeout=15)[1]
    finally:
        program.kill()
        program.wait()
    assert_gone(server.workers, GONE_S)
    with nothing_imported_ahead():  # in all slots, so no query has kept one
        assert spark_elastic.run(lambda: 1, num_proc=3, spark=session, start_timeout=10, verbose=0) == [1, 1, 1]


def test_active_connect_session_is_used_without_spark(session, monkeypatch):
    monkeypatch.setattr(type(session), "_default_session", session)
    assert checked_cluster().context is session
