"""Functions that fork, shout, shut their streams and ignore signals."""

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from tests.integration.clusters import local, module_fixture
from tests.integration.local import loops
from tests.integration.processes import GONE_S, children, wait_until
from tests.integration.spark.conftest import finished
from tests.integration.spark.diary import WAIT_S, is_alive

pytestmark = [pytest.mark.nightly, pytest.mark.cluster]
cluster = module_fixture(local, 3)


def test_data_loader_processes_go_with_their_worker(jobs):
    job, diary = jobs.train(2, training={"ballast": 0, "commit_every": 1, "loader_workers": 2})
    world = diary.wait_for_world(2)
    for victim, dies in (("pid", 1), ("agent", 0)):
        diary.hold("step", dies)
        pid = diary.held("step", dies)
        forked = children(pid)
        assert len(forked) == 2
        os.kill(world[dies][victim], signal.SIGKILL)
        wait_until(lambda left=[pid, *forked]: not any(map(is_alive, left)), GONE_S, f"the worker of {victim} is gone")
        world = diary.wait_for_world(2, after=world[dies]["round"])
    assert len(finished(job, diary)) == 2


def test_a_worker_that_shuts_its_streams_and_ignores_signals_still_works_and_still_ends(jobs, tmp_path):
    def unruly(folder):
        rank, size = loops.rank_and_size()
        for name in ("SIGTERM", "SIGINT", "SIGHUP", "SIGPIPE"):
            signal.signal(getattr(signal, name), signal.SIG_IGN)
        sys.stdin.close()
        for fd in (0, 1, 2):
            os.close(fd)
        try:
            os.setsid()
        except PermissionError:
            pass  # it leads a group already
        if folder is None:
            return rank, size
        child = subprocess.Popen(["sleep", "1000"], stdin=subprocess.DEVNULL)
        Path(folder, f"{os.getpid()}.tmp").write_text(str(child.pid))
        Path(folder, f"{os.getpid()}.tmp").rename(Path(folder, f"{os.getpid()}"))
        return threading.Event().wait()

    assert jobs.start(unruly, (None,), num_proc=2).result(120) == [(0, 2), (1, 2)]
    job = jobs.start(unruly, (str(tmp_path),), num_proc=2)
    wait_until(lambda: len(list(tmp_path.glob("*[0-9]"))) == 2, WAIT_S, "both wait")
    pids = [int(pid) for path in tmp_path.glob("*[0-9]") for pid in (path.name, path.read_text())]
    job.cancel()
    assert job.done()
    wait_until(lambda: not any(map(is_alive, pids)), GONE_S, "workers and their children are gone")
