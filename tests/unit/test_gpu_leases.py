"""Leases of GPUs by real processes, which end as a killed worker does; the GPUs are numbers and names alone."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest

LEASES = """
import os, sys
from spark_elastic.collective.gpu.leases import lease_gpu
count, preferred, forks = map(int, sys.argv[1:])
number, reason = lease_gpu(count, preferred)
assert lease_gpu(count, preferred + 1)[0] == number  # it keeps its own
if forks and os.fork() == 0:
    sys.stdin.read()
    os._exit(0)
print(number, reason, flush=True)
sys.stdin.read()
"""


class Process:
    """A process that leases one of `count` GPUs, and ends with its stdin."""

    def __init__(self, folder: str, count: int, preferred: int, visible: str | None = None, forks: bool = False):
        env = {**os.environ, "TMPDIR": folder}
        env.pop("CUDA_VISIBLE_DEVICES", None)
        if visible is not None:
            env["CUDA_VISIBLE_DEVICES"] = visible
        arguments = map(str, (count, preferred, int(forks)))
        self._process = subprocess.Popen(
            [sys.executable, "-c", LEASES, *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=env
        )
        assert self._process.stdout is not None
        number, _, self.reason = self._process.stdout.readline().decode().strip().partition(" ")
        self.number = int(number)

    def kill(self) -> None:
        os.kill(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()


@pytest.fixture
def processes(tmp_path) -> Iterator[list[Process]]:
    made: list[Process] = []
    yield made
    for each in made:
        each.close()


def test_no_two_processes_have_one_gpu_while_another_is_free(tmp_path, processes):
    def lease(preferred: int, **more) -> Process:
        processes.append(Process(str(tmp_path), 3, preferred, **more))
        return processes[-1]

    first = [lease(preferred, forks=True) for preferred in (0, 1, 2)]
    assert [each.number for each in first] == [0, 1, 2]
    first[1].kill()  # its forked child lives on
    assert lease(0).number == 1  # a newcomer with the local rank of a survivor
    fourth, fifth = lease(0), lease(0)
    assert "with 1 other processes" in fourth.reason
    assert {fourth.number, fifth.number} == {0, 1}
    assert lease(0).number == 2  # the one with the fewest others
    assert "with 2 other processes" in lease(2).reason


def test_gpus_have_the_names_of_cuda_visible_devices(tmp_path, processes):
    for count, preferred, visible, number in (
        (2, 0, "2,GPU-5", 0),
        (2, 1, "GPU-5,2", 0),  # 2 is taken
        (2, 0, "GPU-5,3", 1),
        (4, 2, None, 0),  # 2 and 3 are taken
    ):
        processes.append(Process(str(tmp_path), count, preferred, visible))
        assert processes[-1].number == number


def test_the_local_rank_decides_where_nothing_can_be_locked(tmp_path, processes):
    (tmp_path / f"spark_elastic-gpus-{os.getuid()}").write_text("in the way")
    processes.append(Process(str(tmp_path), 3, 4))
    assert (processes[0].number, processes[0].reason[:13]) == (1, "by local rank")
