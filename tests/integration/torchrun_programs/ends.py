"""The ends of programs, by the first argument.

groups: three groups, each with a model. uneven: rank 0 is left alone. late FOLDER: a thread and a child process end
after the program. exit: with `os._exit(0)`. killed: by a signal from outside, each time.
"""

import multiprocessing
import os
import signal
import sys
import threading
import weakref
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel


def one_group(number):
    os.environ["MASTER_PORT"] = str(int(os.environ["MASTER_PORT"]) + number)
    dist.init_process_group("gloo")
    model = DistributedDataParallel(torch.nn.Linear(20, 1))
    model(torch.rand(8, 20)).sum().backward()
    dist.barrier()
    group = weakref.ref(dist.group.WORLD)
    dist.destroy_process_group()
    return group


def write_late(name):
    folder, rank = Path(sys.argv[2]), os.environ["RANK"]
    if name == "thread":
        threading.main_thread().join()  # it stops when Python begins to end the process
    while name == "child" and not (folder / f"thread-{rank}").exists():
        threading.Event().wait(0.01)
    (folder / f"{name}-{rank}").touch()


if __name__ == "__main__":
    if sys.argv[1] == "groups":
        one_group(0)  # torch itself keeps the first
        second = one_group(1)
        assert second() is not None
        one_group(2)
        assert second() is None
    elif sys.argv[1] == "late":
        threading.Thread(target=write_late, args=("thread",)).start()
        multiprocessing.get_context("fork").Process(target=write_late, args=("child",)).start()
    elif sys.argv[1] == "exit":
        os._exit(0)
    elif sys.argv[1] == "killed":
        dist.init_process_group("gloo")
        if dist.get_rank():
            os.kill(os.getpid(), signal.SIGTERM)
        dist.barrier()
    else:
        dist.init_process_group("gloo")
        for _ in range(3 - dist.get_rank()):
            dist.all_reduce(torch.ones(1))
