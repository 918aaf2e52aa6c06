"""A host discovery end to end, in the names that people write."""

import pytest

from spark_elastic.driver.hosts import FixedHosts, HostDiscoveryScript
from spark_elastic.errors import NotEnoughSlotsError
from tests.integration.local import loops
from tests.integration.local.test_jobs import WAIT_S, pid_of, wait_for_round, worlds
from tests.integration.processes import wait_until


@pytest.mark.nightly
def test_fixed_hosts_may_be_given_by_name(start_job):
    job = start_job(loops.rank_and_size, num_proc=2, discovery=FixedHosts("localhost:2"))
    assert job.result(60) == [(0, 2), (1, 2)]


def test_hosts_that_nobody_runs_on_fail_the_job_with_what_was_asked_for(start_job):
    job = start_job(loops.rank_and_size, num_proc=1, start_timeout=2, discovery=FixedHosts("192.0.2.7:4"))
    with pytest.raises(NotEnoughSlotsError, match=r"127\.0\.0\.1 is not among the hosts to use \(192\.0\.2\.7:4\)"):
        job.result(60)


def test_a_script_that_prints_names_narrows_and_widens_a_running_job(start_job, tmp_path):
    hosts = tmp_path / "hosts"
    script = tmp_path / "discover.sh"
    script.write_text(f"#!/bin/sh\ncat {hosts}\n")
    script.chmod(0o755)
    hosts.write_text("localhost:1\n127.0.0.2:1\n")
    job = start_job(
        loops.steps,
        (str(tmp_path), 100_000),
        num_proc=2,
        min_num_proc=1,
        hosts=("127.0.0.1", "127.0.0.2"),
        discovery=HostDiscoveryScript(str(script)),
    )
    pid_of(tmp_path, 1, 1)
    hosts.write_text("localhost:1\n")
    wait_for_round(job, 2, 1)
    wait_until(lambda: worlds(job)[-1].size == 1, WAIT_S, "the narrowed world")
    hosts.write_text("127.0.0.2:1\nlocalhost:1\n")
    wait_for_round(job, 3, 2)
    job.cancel()
