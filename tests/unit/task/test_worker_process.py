"""A worker process, with the test in the role of its agent."""

from __future__ import annotations

import asyncio
import os
import signal

from spark_elastic.task.worker_process import WorkerProcess, process_state, worker_environment
from spark_elastic.wire.messages import LaunchSpec

WAIT_S = 20.0


class Watcher:
    def __init__(self):
        self.exit_code = asyncio.get_running_loop().create_future()
        self.lines = []

    def output(self, process, stream, lines):
        self.lines += lines

    def output_may_flow(self):
        return True

    def result_stored(self, process):
        pass

    def exited(self, process, exit_code):
        self.exit_code.set_result(exit_code)


CHATTERBOX = """
import os, subprocess, sys
subprocess.Popen(["sh", "-c", "echo child $$; exec yes"], start_new_session={own_group})
sys.stdout.flush()
"""


def kill_worker_with_endlessly_writing_child(tmp_path, own_group):
    """Kill such a worker; return its exit code as the agent sees it, and the child's process id."""
    (tmp_path / "chatterbox.py").write_text(CHATTERBOX.format(own_group=own_group))
    order = LaunchSpec("job", (), b"", b"", 1.0, "", preimport=("chatterbox",))
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", ".")])}

    async def live():
        watcher = Watcher()
        process = WorkerProcess(order, env, watcher)
        while not any(line.startswith("child ") for line in watcher.lines):
            await asyncio.sleep(0.01)
        os.kill(process._process.pid, signal.SIGKILL)
        code = await asyncio.wait_for(watcher.exit_code, WAIT_S)
        child = next(line for line in watcher.lines if line.startswith("child "))
        return code, int(child.split()[1])

    return asyncio.run(asyncio.wait_for(live(), WAIT_S))


def test_child_that_writes_for_ever_does_not_delay_the_workers_end(tmp_path):
    code, _ = kill_worker_with_endlessly_writing_child(tmp_path, own_group=False)
    assert code == -signal.SIGKILL


def test_writing_child_outside_of_the_process_group_does_not_delay_it_either(tmp_path):
    code, child = kill_worker_with_endlessly_writing_child(tmp_path, own_group=True)
    os.kill(child, signal.SIGKILL)
    assert code == -signal.SIGKILL


def test_stopped_process_is_not_seen_running():
    order = LaunchSpec("job", (), b"", b"", 1.0, "", preimport=())

    async def live():
        watcher = Watcher()
        process = WorkerProcess(order, dict(os.environ), watcher)
        seen = [process.is_seen_running]
        for number, letter in ((signal.SIGSTOP, "T"), (signal.SIGCONT, "RS"), (signal.SIGKILL, "Z")):
            os.kill(process._process.pid, number)
            while process_state(process._process.pid) not in (letter if number != signal.SIGKILL else ("Z", "")):
                await asyncio.sleep(0.01)
            seen.append(process.is_seen_running)
        await watcher.exit_code
        return seen

    assert asyncio.run(asyncio.wait_for(live(), WAIT_S)) == [True, False, True, False]


def test_openmp_threads_wait_passively_unless_the_user_sets_otherwise():
    order = LaunchSpec("job", (), b"", b"", 1.0, "")
    assert worker_environment(order, {}, [], 2, ())["OMP_WAIT_POLICY"] == "passive"
    assert worker_environment(order, {"OMP_WAIT_POLICY": "active"}, [], 2, ())["OMP_WAIT_POLICY"] == "active"


def test_newest_of_several_results_counts(tmp_path):
    (tmp_path / "twice.py").write_text("""
import os, sys
fd = int(sys.argv[2])
first, second = b"1" * 100_000, b"22\\n"
for run, data in ((1, first), (2, second)):
    os.write(fd, b'{"size": %d, "in_loop": true, "run": %d}\\n' % (len(data), run))
    while data:
        data = data[os.write(fd, data[:70_000]):]
os._exit(0)
""")
    order = LaunchSpec("job", (), b"", b"", 1.0, "", preimport=("twice",))
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", ".")])}

    async def live():
        watcher = Watcher()
        stored = []
        watcher.result_stored = lambda process: stored.append((process.run, len(process.result)))
        process = WorkerProcess(order, env, watcher)
        await asyncio.wait_for(watcher.exit_code, WAIT_S)
        return stored, process.result, process.run

    stored, result, run = asyncio.run(asyncio.wait_for(live(), WAIT_S))
    assert stored == [(1, 100_000), (2, 3)]
    assert (result, run) == (b"22\n", 2)
