"""What a worker frees stays mapped, each case in a process of its own."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys

import pytest

import spark_elastic

glibc = pytest.mark.skipif(
    sys.platform != "linux" or not hasattr(ctypes.CDLL(None), "gnu_get_libc_version"), reason="needs glibc"
)
pytestmark = glibc

STEPS = """
import ctypes, resource
libc = ctypes.CDLL(None)
libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
libc.free.argtypes, libc.memset.argtypes = [ctypes.c_void_p], [ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t]

def step(megabytes):
    blocks = [libc.malloc(size << 20) for size in megabytes]
    for block, size in zip(blocks, megabytes):
        libc.memset(block, 1, size << 20)
    for block in blocks:
        libc.free(block)

def pages_mapped(megabytes, steps=5):
    step(megabytes)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(steps):
        step(megabytes)
    return (resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before) / steps
"""
PROGRAM = (
    STEPS
    + """
from spark_elastic.task.freed_memory import keep_freed_memory
print(keep_freed_memory(), pages_mapped([24, 24, 24]))
"""
)
PAGES = (72 << 20) // os.sysconf("SC_PAGE_SIZE")


def printed(**environment: str) -> list[str]:
    environment = {**os.environ, **environment}
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=60, env=environment)
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


def test_freed_blocks_are_used_again_without_being_mapped():
    changed, pages = printed()
    assert changed == "True"
    assert float(pages) < PAGES / 100


@pytest.mark.parametrize(
    "own", [{"MALLOC_TRIM_THRESHOLD_": "131072"}, {"GLIBC_TUNABLES": "glibc.malloc.trim_threshold=131072"}]
)
def test_settings_of_the_environment_stay(own):
    changed, pages = printed(**own)
    assert changed == "False"
    assert float(pages) > PAGES * 0.9


def pages_mapped_in_a_worker() -> float:
    names: dict = {}
    exec(STEPS, names)
    return names["pages_mapped"]([24, 24, 24])


def test_workers_keep_what_they_free():
    launcher = spark_elastic.LocalLauncher()
    (pages,) = spark_elastic.run(pages_mapped_in_a_worker, launcher=launcher, num_proc=1, verbose=0)
    assert pages < PAGES / 100
