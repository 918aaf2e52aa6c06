"""A worker process, with the test in the role of its agent."""

import asyncio
import os
import signal
import subprocess
import sys
import threading
from types import SimpleNamespace

import pytest

from spark_elastic.task import reaper
from spark_elastic.task.worker_process import WorkerProcess, worker_environment
from spark_elastic.wire.messages import LaunchSpec

WAIT_S = 20.0


class Watcher:
    def __init__(self):
        self.exit_code = asyncio.get_running_loop().create_future()
        self.lines = []
        self.dying_with = []

    def output(self, process, stream, lines):
        self.lines += lines

    def output_may_flow(self):
        return True

    def result_stored(self, process):
        pass

    def dying(self, process, exit_code):
        assert not self.exit_code.done()
        self.dying_with.append(exit_code)

    def exited(self, process, exit_code):
        self.exit_code.set_result(exit_code)


CHATTERBOX = """
import os, subprocess, sys
subprocess.Popen(["sh", "-c", "echo child $$; exec yes"])
sys.stdout.flush()
"""


def test_child_that_writes_for_ever_does_not_delay_the_workers_end(tmp_path):
    (tmp_path / "chatterbox.py").write_text(CHATTERBOX)
    spec = LaunchSpec("job", (), b"", b"", 1.0, "", preimport=("chatterbox",))
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", ".")])}

    async def live():
        watcher = Watcher()
        process = WorkerProcess(spec, env, watcher)
        while not any(line.startswith("child ") for line in watcher.lines):
            await asyncio.sleep(0.01)
        os.kill(process._process.pid, signal.SIGKILL)
        return await watcher.exit_code

    assert asyncio.run(asyncio.wait_for(live(), WAIT_S)) == -signal.SIGKILL


def test_openmp_threads_wait_passively_unless_the_user_sets_otherwise():
    spec = LaunchSpec("job", (), b"", b"", 1.0, "")
    assert worker_environment(spec, {}, [], 2, ())["OMP_WAIT_POLICY"] == "passive"
    assert worker_environment(spec, {"OMP_WAIT_POLICY": "active"}, [], 2, ())["OMP_WAIT_POLICY"] == "active"


def test_newest_of_several_results_counts(tmp_path):
    (tmp_path / "twice.py").write_text("""
import os, sys
from spark_elastic.wire.messages import RESULT_HEAD
fd = int(sys.argv[2])
first, second = b"1" * 100_000, b"22\\n"
for run, data in ((1, first), (2, second)):
    os.write(fd, RESULT_HEAD.pack(True, run, len(data)))
    while data:
        data = data[os.write(fd, data[:70_000]):]
os._exit(0)
""")
    spec = LaunchSpec("job", (), b"", b"", 1.0, "", preimport=("twice",))
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", ".")])}

    async def live():
        watcher = Watcher()
        stored = []
        watcher.result_stored = lambda process: stored.append((process.run, len(process.result)))
        process = WorkerProcess(spec, env, watcher)
        await asyncio.wait_for(watcher.exit_code, WAIT_S)
        return stored, process.result, process.run

    stored, result, run = asyncio.run(asyncio.wait_for(live(), WAIT_S))
    assert stored == [(1, 100_000), (2, 3)]
    assert (result, run) == (b"22\n", 2)


def ending(tmp_path, module, number=None):
    """Run a worker that imports a module, and kill it with a signal; return the reported deaths and its exit code."""
    (tmp_path / "module_of_worker.py").write_text(module)
    spec = LaunchSpec("job", (), b"", b"", 1.0, "", preimport=("module_of_worker",))
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", ".")])}

    async def live():
        watcher = Watcher()
        process = WorkerProcess(spec, env, watcher)
        if number is not None:
            while "ready" not in watcher.lines:
                await asyncio.sleep(0.01)
            os.kill(process._process.pid, number)
        code = await watcher.exit_code
        return watcher.dying_with, code

    return asyncio.run(asyncio.wait_for(live(), WAIT_S))


READY = 'print("ready", flush=True)\n'
BIG = "memory = bytearray(300_000_000)\n"  # for the kernel to free
needs_robust_mutexes = pytest.mark.skipif(sys.platform != "linux", reason="only Linux releases a mutex before memory")


def reported(tmp_path, module, code, number=None):
    """Return True if a death is reported before the exit. A busy machine may run the reaper too late for that."""
    for _ in range(10):
        deaths, exit_code = ending(tmp_path, BIG + module, number)
        assert exit_code == code
        assert deaths in ([], [code])
        if deaths:
            return True
    return False


@needs_robust_mutexes
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_death_by_a_signal_is_reported_before_the_exit(tmp_path, number):
    assert reported(tmp_path, READY, -number, number)


@needs_robust_mutexes
@pytest.mark.parametrize(
    ("end", "code"), [("os._exit(3)", 3), ("os.abort()", -signal.SIGABRT), ("os.kill(os.getpid(), 9)", -9)]
)
def test_end_that_the_worker_does_not_announce_is_reported(tmp_path, end, code):
    assert reported(tmp_path, f"import os\n{end}\n", code)


def test_worker_that_ends_itself_reports_nothing_beforehand(tmp_path):
    module = "from spark_elastic.task.reaper import exit_now\nexit_now(5)\n"
    assert ending(tmp_path, module) == ([], 5)


def test_ends_of_children_and_threads_are_no_deaths_of_the_worker(tmp_path):
    module = """
import os, subprocess, sys, threading
child = os.fork()
if child == 0:
    os._exit(0)
os.waitpid(child, 0)
subprocess.run([sys.executable, "-c", ""])
thread = threading.Thread(target=print)
thread.start()
thread.join()
from spark_elastic.task.reaper import exit_now
exit_now(0)
"""
    assert ending(tmp_path, module) == ([], 0)


def test_without_robust_mutexes_a_death_is_still_seen(tmp_path):
    (tmp_path / "sitecustomize.py").write_text("import spark_elastic.task.reaper as r; r._ROBUST = 99\n")
    assert ending(tmp_path, BIG + READY, signal.SIGKILL) == ([], -signal.SIGKILL)


def test_end_of_a_worker_that_nobody_waits_for_is_noticed_without_pidfds(monkeypatch):
    monkeypatch.setattr(reaper, "open_pidfd", lambda pid: -1)
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    waiting = threading.Thread(target=reaper._wait_for_end_of, args=(child.pid,), daemon=True)
    waiting.start()
    waiting.join(0.3)
    assert waiting.is_alive()
    child.stdin.close()
    waiting.join(20)  # the process is a zombie now
    assert not waiting.is_alive()
    child.wait()


def test_long_line_is_cut_between_two_characters():
    lines = []
    process = SimpleNamespace(_partial={"stdout": bytearray()}, _agent=SimpleNamespace(), _streams={1: "stdout"})
    process._result_fd = 2
    process._agent.output = lambda process, stream, new: lines.extend(new)
    bar = "█" * 50_000  # three bytes each
    data = bar.encode() + b"\n"
    for at in range(0, len(data), 4096):
        WorkerProcess._received(process, 1, data[at : at + 4096])
    assert len(lines) == 3
    assert "".join(lines) == bar
