"""Train with two workers, kill one, and print the results and the losses, on a system that tells no end of a process.

Arguments: a folder, and "seccomp" (the kernel refuses pidfds) or "SIGCHLD" (it is ignored).
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
from pathlib import Path

from spark_elastic import LocalLauncher, run_async
from tests.integration.local import loops
from tests.integration.processes import wait_until

PIDFD_SEND_SIGNAL, PIDFD_OPEN = 424, 434
_SET_SECCOMP, _FILTER_MODE, _SET_NO_NEW_PRIVS = 22, 2, 38
_LOAD_NUMBER, _IS_EQUAL, _RETURN = 0x20, 0x15, 0x06
_REFUSE, _ALLOW = 0x00050001, 0x7FFF0000
"""With EPERM, as Docker did before 20.10."""


class _Instruction(ctypes.Structure):
    _fields_ = (("code", ctypes.c_uint16), ("yes", ctypes.c_uint8), ("no", ctypes.c_uint8), ("k", ctypes.c_uint32))


class _Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_uint16), ("instructions", ctypes.POINTER(_Instruction)))


def refuse_pidfds() -> None:
    """Have the kernel refuse them to this process, and to all that it starts."""
    instructions = (_Instruction * 5)(
        _Instruction(_LOAD_NUMBER, 0, 0, 0),
        _Instruction(_IS_EQUAL, 1, 0, PIDFD_OPEN),
        _Instruction(_IS_EQUAL, 0, 1, PIDFD_SEND_SIGNAL),
        _Instruction(_RETURN, 0, 0, _REFUSE),
        _Instruction(_RETURN, 0, 0, _ALLOW),
    )
    prctl = ctypes.CDLL(None, use_errno=True).prctl
    for arguments in (
        (_SET_NO_NEW_PRIVS, 1, 0, 0, 0),
        (_SET_SECCOMP, _FILTER_MODE, ctypes.byref(_Program(len(instructions), instructions))),
    ):
        if prctl(*arguments):
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    try:
        os.pidfd_open(os.getpid())
    except PermissionError:
        return
    raise AssertionError("the kernel does not refuse pidfds")


def main(folder: str, how: str) -> None:
    if how == "seccomp":
        refuse_pidfds()
    else:  # as a program inherits it from a supervisor that does not wait for its children
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    launcher = LocalLauncher(preimport=())
    sizes = {"num_proc": 2, "min_num_proc": 1, "keep_workers": 5.0 if how == "seccomp" else 0.0}
    sizes |= {"start_timeout": 20, "elastic_timeout": 20}
    job = run_async(loops.steps, (folder, 150), launcher=launcher, **sizes)
    wait_until(lambda: job.done() or Path(folder, "step-20").exists(), 30, "step 20")
    if not job.done():
        os.kill(int(Path(folder, "pid-1-1").read_text()), signal.SIGKILL)
    results = job.result(60)
    lost = [change.reason for change in job.changes() if change.kind == "lost"]
    kept = signal.getsignal(signal.SIGCHLD) is signal.SIG_IGN
    print(json.dumps({"results": results, "lost": lost, "ignored": kept}))


if __name__ == "__main__":
    main(*sys.argv[1:])
