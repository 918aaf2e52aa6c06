"""Forked processes that reduce through shared memory, with checked sums: a program for any machine that runs Linux.

    python -m tests.unit.torch.shared_memory_stress [processes [reductions]]

It needs torch and nothing else, so it runs under an emulator too: docs/decisions/a-lock-is-the-memory-fence.md.
"""

from __future__ import annotations

import os
import platform
import socket
import struct
import sys
import time

import torch
from torch.distributed import ReduceOp

from spark_elastic.collective import shared_memory
from spark_elastic.collective.shared_memory import HostPeers, OwnSegment, Peer
from spark_elastic.collective.shared_memory_reducer import SharedMemoryReducer, SpinWait

COUNTS = (3, 1000, 4096, 20_000, 300_000)
ROUND = 1
WAIT_S = 300.0


def identity(rank: int) -> bytes:
    return bytes([rank + 1]) * 32


def member(rank: int, size: int, reductions: int, line: socket.socket) -> None:
    """Reduce tensors of changing sizes, some at a time; raise if a sum is wrong."""
    torch.set_num_threads(1)
    own = OwnSegment()
    own.identify(identity(rank))
    own.begin(ROUND)
    line.sendall(struct.pack("<QQ", os.getpid(), own.descriptor))
    everyone = list(struct.iter_unpack("<QQ", line.recv(16 * size, socket.MSG_WAITALL)))
    peers = [Peer(r, *everyone[r], identity(r)) for r in range(size) if r != rank]
    line.sendall(b"open")
    line.recv(4, socket.MSG_WAITALL)  # all have opened all
    until = time.monotonic() + WAIT_S

    def check() -> None:
        assert time.monotonic() < until, f"rank {rank} waits for ever"

    wait = SpinWait(check, lambda begins: None)
    reducer = SharedMemoryReducer(HostPeers(own, rank, peers), ROUND, wait)
    flying = []
    for step in range(reductions + 4):
        if step < reductions:
            count = COUNTS[step % 7 % len(COUNTS)] if step % 50 else COUNTS[-1]
            tensor = torch.full((count,), float((step + rank) % 1024))
            flying.append((reducer.launch(tensor, ReduceOp.SUM), tensor, step))
        if len(flying) > 3 or step >= reductions:
            work, tensor, of = flying.pop(0)
            reducer.wait(work)
            expected = float(sum((of + r) % 1024 for r in range(size)))
            low, high = tensor.min().item(), tensor.max().item()
            assert low == high == expected, f"rank {rank}, reduction {of}: {low} to {high} in place of {expected}"
            if not flying and step >= reductions:
                break
    line.sendall(b"done")
    line.recv(4, socket.MSG_WAITALL)  # nobody leaves before all have read
    reducer.close()


def run(size: int, reductions: int) -> float:
    """Run `size` members; return the seconds that they took. Raises AssertionError if one fails."""
    lines, pids = [], []
    began = time.monotonic()
    for rank in range(size):
        ours, theirs = socket.socketpair()
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                for line in (ours, *lines):
                    line.close()
                member(rank, size, reductions, theirs)
                code = 0
            finally:
                sys.stderr.flush()
                if code:
                    import traceback

                    traceback.print_exc()
                os._exit(code)
        theirs.close()
        lines.append(ours)
        pids.append(pid)
    for length in (16, 4, 4):
        said = b"".join(line.recv(length, socket.MSG_WAITALL) for line in lines)
        for line in lines:
            try:
                line.sendall(said if length == 16 else said[:4].ljust(4))
            except OSError:
                pass  # its exit code says that it has failed
    failed = [rank for rank, pid in enumerate(pids) if os.waitpid(pid, 0)[1] != 0]
    for line in lines:
        line.close()
    assert not failed, f"ranks {failed} failed"
    return time.monotonic() - began


if __name__ == "__main__":
    size, reductions = (int(word) for word in (*sys.argv[1:3], *("2", "2000")[len(sys.argv) - 1 :]))
    fence = shared_memory.fence.__name__
    print(f"{platform.machine()}, Python {platform.python_version()}, torch {torch.__version__}, {fence}", flush=True)
    print(f"{size} processes, {reductions} reductions: {run(size, reductions):.1f} s", flush=True)
