"""The fork server of an executor, with the test in the role of its agents and of the executor."""

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from spark_elastic.task.fork_server import ForkServer
from spark_elastic.task.worker_process import WorkerProcess
from spark_elastic.wire.messages import LaunchSpec
from tests.integration.processes import is_running, wait_until
from tests.unit.task.test_worker_process import Watcher

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="fork servers are for Linux")

WAIT_S = 30.0
NO_AGENT = 76
"""The exit code of a worker whose agent lets go of it before it has a function."""


@pytest.fixture
def executor():
    """A process in the role of an executor's JVM: its fork servers end with it."""
    process = sleeping()
    yield process
    process.kill()
    process.wait()


def sleeping():
    return subprocess.Popen([sys.executable, "-c", "import time; time.sleep(300)"])


class Agent:
    """Starts workers through the fork server of an executor."""

    def __init__(self, executor, keep_s=20.0, env=None, modules=("json",), daemon=None):
        self._guardians = [executor.pid] if daemon is None else [executor.pid, daemon.pid]
        self._env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), **(env or {})}
        self._spec = LaunchSpec("job", (), b"", b"", 1.0, "", preimport=modules, keep_workers_s=keep_s)

    def start(self):
        watcher = Watcher()
        return WorkerProcess(self._spec, self._env, watcher, self._guardians), watcher

    async def started(self):
        """Return a worker that has been forked, its server, and the watcher of its end; None: it was started."""
        worker, watcher = self.start()
        while worker._process.pid is None:
            await asyncio.sleep(0.01)
        return worker, server_of(worker._process.pid), watcher


def parent_of(pid):
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def server_of(worker):
    """Return the parent of the worker's keeper; None if this process has started the worker."""
    keeper = parent_of(worker)
    return None if keeper == os.getpid() else parent_of(keeper)


def live(coroutine):
    return asyncio.run(asyncio.wait_for(coroutine, WAIT_S))


async def ended(watcher):
    return await watcher.exit_code


def wait_for_end(pid):
    wait_until(lambda: not is_running(pid), WAIT_S, f"process {pid} is gone")


def test_workers_of_one_job_and_of_the_next_have_the_same_server(executor):
    async def jobs():
        found = []
        for _ in range(2):
            (one, parent, first), (two, other, second) = await asyncio.gather(
                Agent(executor).started(), Agent(executor).started()
            )
            found += [parent, other]
            for worker, watcher in ((one, first), (two, second)):
                worker.release()
                assert await ended(watcher) == NO_AGENT
        return found

    parents = live(jobs())
    assert len(set(parents)) == 1
    assert parents[0] is not None
    executor.kill()
    wait_for_end(parents[0])


def test_server_ends_when_nobody_has_needed_it_for_the_given_time(executor):
    async def job():
        worker, server, watcher = await Agent(executor, keep_s=0.2).started()
        await asyncio.sleep(0.6)
        assert is_running(server), "it has a worker"
        worker.release()
        await ended(watcher)
        return server

    wait_for_end(live(job()))


def test_killed_worker_is_reported_with_its_signal_and_leaves_the_server(executor):
    async def job():
        worker, server, watcher = await Agent(executor).started()
        worker.kill()
        assert await ended(watcher) == -signal.SIGKILL
        worker, again, watcher = await Agent(executor).started()
        os.kill(worker._process.pid, signal.SIGTERM)
        assert await ended(watcher) == -signal.SIGTERM
        return server, again

    server, again = live(job())
    assert server == again


def test_worker_dies_with_its_server(executor):
    async def job():
        worker, server, watcher = await Agent(executor).started()
        os.kill(server, signal.SIGKILL)
        assert await ended(watcher) == -signal.SIGKILL
        return worker._process.pid

    wait_for_end(live(job()))


AGENT = """
import asyncio, json, os, sys
from tests.unit.task.test_fork_server import Agent
class Executor: pid = int(sys.argv[1])
async def main():
    worker, server, _ = await Agent(Executor).started()
    os.kill(worker._process.pid, 19)  # stopped: it cannot notice anything itself
    print(worker._process.pid, server, flush=True)
    await asyncio.sleep(300)
asyncio.run(main())
"""


def agent_with_stopped_worker(executor):
    agent = subprocess.Popen([sys.executable, "-c", AGENT, str(executor.pid)], stdout=subprocess.PIPE, text=True)
    worker, server = map(int, agent.stdout.readline().split())
    return agent, worker, server


@pytest.mark.parametrize("killed", ["agent", "executor"])
def test_worker_dies_with_its_agent_and_the_server_with_the_executor_alone(executor, killed):
    agent, worker, server = agent_with_stopped_worker(executor)
    (agent if killed == "agent" else executor).kill()
    wait_for_end(worker)
    if killed == "agent":
        assert is_running(server)
    else:
        wait_for_end(server)
    agent.kill()
    agent.wait()
    agent.stdout.close()


def test_worker_outlives_sparks_daemon_and_the_server_ends_with_it(executor):
    daemon, next_daemon = sleeping(), sleeping()

    async def job():
        worker, old, watcher = await Agent(executor, daemon=daemon).started()
        daemon.kill()
        daemon.wait()
        other, new, watcher_of_other = await Agent(executor, daemon=next_daemon).started()
        for each, its_watcher in ((worker, watcher), (other, watcher_of_other)):
            each.release()
            assert await ended(its_watcher) == NO_AGENT, "the worker was killed, and did not end by itself"
        return old, new

    try:
        old, new = live(job())
        assert old != new
        wait_for_end(old)
    finally:
        for each in (daemon, next_daemon):
            each.kill()
            each.wait()


def test_job_with_another_environment_gets_another_server(executor):
    async def jobs():
        first, old, watcher_of_first = await Agent(executor).started()
        worker, new, watcher = await Agent(executor, env={"OMP_NUM_THREADS": "7"}).started()
        environment = Path(f"/proc/{new}/environ").read_bytes().split(b"\0")
        assert is_running(old), "it has a worker"
        for each, its_watcher in ((worker, watcher), (first, watcher_of_first)):
            each.release()
            assert await ended(its_watcher) == NO_AGENT
        return old, new, environment

    old, new, environment = live(jobs())
    assert old != new
    assert b"OMP_NUM_THREADS=7" in environment


def name_for(**env):
    return ForkServer((os.getpid(),), 20.0, {"PATH": "/bin", "CUDA_VISIBLE_DEVICES": "0", **env}, ()).name()


def test_variables_that_are_read_late_do_not_need_another_server():
    assert name_for() == name_for(CUDA_VISIBLE_DEVICES="1", SPARK_ELASTIC_DEVICE="cpu")
    assert name_for() != name_for(OMP_NUM_THREADS="1")


def test_framework_with_threads_has_no_server():
    assert ForkServer([1], 60.0, {}, ["torch", "spark_elastic.torch"]).is_possible()
    assert not ForkServer([1], 60.0, {}, ["torch", "tensorflow", "keras"]).is_possible()
    assert not ForkServer([1], 0.0, {}, ["torch"]).is_possible()


def test_packages_that_are_installed_need_another_server(tmp_path):
    packages, results = tmp_path / "site-packages", tmp_path / "results"
    packages.mkdir()
    results.mkdir()
    path = os.pathsep.join(map(str, (packages, results)))
    before = name_for(PYTHONPATH=path)
    os.utime(results, (1, 1))
    assert name_for(PYTHONPATH=path) == before
    os.utime(packages, (1, 1))
    assert name_for(PYTHONPATH=path) != before


def test_module_that_starts_a_thread_is_not_forked(executor, tmp_path):
    (tmp_path / "threaded.py").write_text(
        "import threading, time\nthreading.Thread(target=time.sleep, args=(60,)).start()"
    )
    path = os.pathsep.join([str(tmp_path), *sys.path])

    async def job():
        worker, parent, watcher = await Agent(executor, env={"PYTHONPATH": path}, modules=("threaded",)).started()
        worker.kill()
        await ended(watcher)
        return parent

    assert live(job()) is None


def test_worker_is_started_without_a_server_that_does_not_come_up(executor, tmp_path):
    packages = tmp_path / "site-packages"
    packages.mkdir()
    (packages / "fatal.py").write_text("import os, sys\nif sys.argv[0].endswith('fork_server.py'): os._exit(3)")
    path = os.pathsep.join([str(packages), *sys.path])

    async def job():
        worker, parent, watcher = await Agent(executor, env={"PYTHONPATH": path}, modules=("fatal",)).started()
        worker.release()
        assert await ended(watcher) == NO_AGENT
        return parent

    assert live(job()) is None


def test_server_holds_no_pipe_of_a_worker(executor):
    """What goes through those pipes is the job's key, among others."""

    async def job():
        worker, server, watcher = await Agent(executor).started()
        open_there = []
        for name in os.listdir(f"/proc/{server}/fd"):
            with contextlib.suppress(OSError):
                open_there.append(os.readlink(f"/proc/{server}/fd/{name}"))
        worker.release()
        await ended(watcher)
        return open_there

    assert [each for each in live(job()) if each.startswith("pipe:")] == []


def shown_by_workers(executor, folder, shown, count=1):
    """Return the words that workers of one server print, each when it is about to wait for its function."""
    (folder / "showing.py").write_text(f"""
import os, random, signal, sys
import numpy
def show():
    print("shown", {shown}, flush=True)
from spark_elastic.task import main
load, main._take_stdin = main._take_stdin, lambda: (lambda control: (show(), control)[1])(load())
""")
    env = {"PYTHONPATH": os.pathsep.join([str(folder), *sys.path]), "PYTHONUNBUFFERED": ""}

    async def job():
        lines = []
        for _ in range(count):
            worker, _, watcher = await Agent(executor, env=env, modules=("showing",)).started()
            worker.release()
            await ended(watcher)
            lines += [line.split() for line in watcher.lines]
        return lines

    return live(job())


def test_forked_workers_draw_other_random_numbers(executor, tmp_path):
    shown = "os.getpid(), random.random(), numpy.random.rand()"
    one, two = shown_by_workers(executor, tmp_path, shown, count=2)
    assert one[1] != two[1]
    assert one[2] != two[2]
    assert one[3] != two[3]


def test_forked_worker_takes_signals_as_one_that_its_agent_starts(executor, tmp_path):
    shown = "signal.getsignal(signal.SIGINT) is signal.default_int_handler, signal.getsignal(signal.SIGQUIT).name"
    assert shown_by_workers(executor, tmp_path, shown) == [["shown", "True", "SIG_DFL"]]


def test_module_that_was_changed_since_the_last_job_is_imported_anew(executor, tmp_path):
    assert shown_by_workers(executor, tmp_path, "'old'") == [["shown", "old"]]
    assert shown_by_workers(executor, tmp_path, "'newer'") == [["shown", "newer"]]


def test_server_holds_no_late_variable_of_the_job_that_has_started_it(executor):
    async def job():
        worker, server, watcher = await Agent(executor, env={"MLFLOW_TRACKING_TOKEN": "of this job"}).started()
        environment = Path(f"/proc/{server}/environ").read_bytes()
        worker.release()
        await ended(watcher)
        return environment

    assert b"of this job" not in live(job())
