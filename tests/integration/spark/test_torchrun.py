"""A program for torchrun in the tasks of two executors."""

from pathlib import Path

import pytest

from tests.integration.clusters import local_cluster, module_fixture
from tests.integration.local.test_torchrun import assert_trained_as_undisturbed, lines
from tests.integration.torchrun_programs import ddp

pytestmark = pytest.mark.cluster
cluster = module_fixture(local_cluster, 2, 1)


@pytest.mark.nightly
def test_a_killed_program_resumes_in_spark(jobs, tmp_path):
    script, args = Path(ddp.__file__).with_name("ddp.py"), (str(tmp_path), "20", "1:13")
    assert jobs.start(script, args, num_proc=2, restart="world").result(240) == [None, None]
    assert_trained_as_undisturbed(tmp_path)
    assert {words[-1] for _, words in lines(tmp_path, "trains")} == {"0", "10"}
