"""`keep_workers`: a process of each executor that forks the workers of several jobs, and its end."""

import sys
import time

import pytest

from spark_elastic import run
from spark_elastic.jobs.settings import RunCall
from spark_elastic.jobs.start import prepare_workers
from tests.integration.clusters import local_cluster, module_fixture
from tests.integration.processes import GONE_S, is_running, wait_until, without_servers
from tests.integration.spark.conftest import job_processes

pytestmark = [
    pytest.mark.nightly,
    pytest.mark.cluster,
    pytest.mark.skipif(sys.platform != "linux", reason="fork servers are for Linux"),
]

KEEP_S = 8
cluster = module_fixture(local_cluster, 2, 1, 1024)


def where_it_runs(path=None):
    """Return this worker's fork server, its job's key, a variable and the working directory."""
    import os
    from pathlib import Path

    import spark_elastic.torch as hvd
    from spark_elastic.wire import worker_link

    hvd.init()
    link = worker_link.current()
    of_keeper = Path(f"/proc/{os.getppid()}/stat").read_text().rpartition(")")[2].split()
    return int(of_keeper[1]), link._key.hex(), os.environ.get("SPARK_ELASTIC_TEST_WORD"), os.getcwd(), os.getpid()


def servers(cluster):
    """Return the fork servers, whose keepers and workers have the same command line."""
    found = job_processes(cluster)
    return {pid for pid in found.keys() - without_servers(found).keys() if is_running(pid)}


def test_next_job_gets_workers_of_the_same_server_and_nothing_else_of_the_first(jobs, cluster):
    settings = {"num_proc": 2, "spark": cluster.spark, "verbose": 0, "keep_workers": KEEP_S}
    first = run(where_it_runs, env={"SPARK_ELASTIC_TEST_WORD": "first"}, **settings)
    assert len({server for server, *_ in first}) == 2, "each executor has one"
    began = time.monotonic()
    second = run(where_it_runs, **settings)
    print(f"the second call took {time.monotonic() - began:.2f} s")
    assert {server for server, *_ in second} == {server for server, *_ in first} == servers(cluster)
    assert {key for _, key, *_ in first}.isdisjoint({key for _, key, *_ in second})
    assert {word for _, _, word, *_ in first} == {"first"}
    assert {word for _, _, word, *_ in second} == {None}
    assert {pid for *_, pid in first}.isdisjoint({pid for *_, pid in second})
    wait_until(lambda: not servers(cluster), KEEP_S + GONE_S, "the servers end")


def test_workers_are_forked_from_what_was_prepared_before_the_job(jobs, cluster):
    settings = {"num_proc": 2, "spark": cluster.spark, "verbose": 0, "keep_workers": KEEP_S}
    prepare_workers(RunCall(where_it_runs, **settings))
    wait_until(lambda: len(servers(cluster)) == 2, GONE_S, "both executors have a server")
    prepared = servers(cluster)
    assert {server for server, *_ in run(where_it_runs, **settings)} == prepared
