"""A worker subprocess as its agent sees it: pipes, output, result and exit, and whether it was killed for its memory.

Runs on the agent's event loop, without threads.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import logging
import os
import re
import signal
import subprocess
import sys
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from spark_elastic.membership.topology import WorkerId
from spark_elastic.settings import DEVICE_SETTING
from spark_elastic.task.reaper import exit_code_of, open_pidfd, process_state
from spark_elastic.task.worker_template import Ends, ForkedProcess, TemplateAddress, TemplateUnavailableError
from spark_elastic.wire.messages import LaunchSpec

logger = logging.getLogger("spark_elastic.task")

STDERR_TAIL_LINES = 40
THREAD_VARIABLES = ("OMP_NUM_THREADS", "TF_NUM_INTRAOP_THREADS")
"""Variables that limit torch and TensorFlow to as many threads as the task has cores."""
NCCL_WATCHDOG = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "0", "TORCH_NCCL_ENABLE_MONITORING": "0"}
"""By default torch's watchdog ends the process when a collective on GPUs fails; here a lost peer is survived."""
QUIET_TENSORFLOW = ("TF_CPP_MIN_LOG_LEVEL", "1")
"""Without it each worker prints six lines about its processor and oneDNN. Warnings and errors are still printed."""
MAX_LINE_BYTES = 64 * 1024
_LAST_CHARACTER = re.compile(rb"[\xc0-\xff][\x80-\xbf]*$")  # of several bytes, of which some may be still to come
"""Longer lines are split, so that progress bars and binary dumps do not accumulate in memory."""
_READ_BYTES = 64 * 1024
_PIPE_CAPACITY = 1024 * 1024
"""Upper bound of a pipe's content: Linux's default /proc/sys/fs/pipe-max-size. A new pipe holds 64 KiB."""
_POLL_S = 0.02
_NOT_RUNNING = ("", "T", "t", "Z", "X")
"""States of `process_state`: unknown, stopped by a signal, stopped by a debugger, zombie, dead."""


class WorkerObserver(Protocol):
    """The methods of the agent that a worker process calls with its output, its result and its exit."""

    def output(self, process: WorkerProcess, stream: str, lines: tuple[str, ...]) -> None: ...

    def output_may_flow(self) -> bool:
        """Return False while the channel has too much unsent data; the worker's prints then block in its pipe."""
        ...

    def result_stored(self, process: WorkerProcess) -> None: ...

    def dying(self, process: WorkerProcess, exit_code: int | None) -> None:
        """Called when the process dies, up to 50 ms before `exited`, where the system tells.

        Args:
            process: The process. What it has written last may not have been read yet.
            exit_code: As in `exited`; None if it is not known yet.
        """
        ...

    def exited(self, process: WorkerProcess, exit_code: int) -> None:
        """Called once, after the process has ended and its pipes have been read to the end."""
        ...


class WorkerProcess:
    """A process that imports the modules of a worker, then waits for its id and the function.

    It starts before its id is known, so that the slow imports overlap with connecting to the driver.
    """

    def __init__(
        self,
        order: LaunchSpec,
        env: dict[str, str],
        observer: WorkerObserver,
        template: TemplateAddress | None = None,
    ) -> None:
        """Start the process, or have it forked by a template."""
        self._observer = observer
        self._loop = asyncio.get_running_loop()
        order_read, self._order_fd = os.pipe()
        stdout, stdout_write = os.pipe()
        stderr, stderr_write = os.pipe()
        self._result_fd, result_write = os.pipe()
        self._death_fd, death_write = os.pipe()
        ends = Ends(order_read, stdout_write, stderr_write, result_write, death_write)
        self._process: SpawnedProcess | ForkedProcess
        start = functools.partial(SpawnedProcess, order.preimport, env, ends, self._gone)
        try:
            self._process = (
                start()
                if template is None
                else ForkedProcess(template, env, order.preimport, ends, self._gone, lambda: self._spawn_instead(start))
            )
        except TemplateUnavailableError as error:
            logger.info("a worker is started without a template: %s", error)
            self._process = start()
        self.memory_before = memory_kills()
        """The counters before the process started; see `exited`."""
        self.worker: WorkerId | None = None
        self.result: bytes | None = None
        """The newest pickled return value of the function; None until it returns."""
        self.in_loop = False
        self.run = 0
        """Number of the function's call that returned `result`."""
        self._result_buffer = bytearray()
        self._result_head: dict[str, Any] | None = None
        self._partial = {"stdout": bytearray(), "stderr": bytearray()}
        self._stderr_tail: deque[str] = deque(maxlen=STDERR_TAIL_LINES)
        self._pending_order = memoryview(b"")
        self.is_running = True
        self._streams = {stdout: "stdout", stderr: "stderr"}
        for fd in (*self._streams, self._result_fd):
            os.set_blocking(fd, False)
            self._loop.add_reader(fd, self._readable, fd)
        os.set_blocking(self._order_fd, False)
        self._loop.add_reader(self._death_fd, self._dying)

    def _spawn_instead(self, start: Callable[[], SpawnedProcess]) -> None:
        """Start a process as if there were no template: it has forked none."""
        try:
            self._process = start()
        except OSError as error:
            logger.warning("a worker cannot be started: %s", error)
            self._gone(-signal.SIGKILL)

    @property
    def stderr_tail(self) -> str:
        """The last lines that the process wrote to stderr."""
        return "\n".join(self._stderr_tail)

    @property
    def is_seen_running(self) -> bool:
        """True if the process exists and is not stopped; False if the system does not show its state."""
        pid = self._process.pid
        return self.is_running and (pid is None or process_state(pid) not in _NOT_RUNNING)

    def assign(self, worker: WorkerId, order: LaunchSpec) -> None:
        """Send the process its id and the function; it then connects to the driver and runs the function."""
        self.worker = worker
        head = {
            "worker": worker,
            "job": order.job,
            "driver_addresses": order.driver_addresses,
            "key": order.key.hex(),
            "encrypt": order.encrypt,
            "connect_timeout_s": order.connect_timeout_s,
            "made_by": order.made_by,
            "function_bytes": len(order.function),
        }
        self._pending_order = memoryview(json.dumps(head).encode() + b"\n" + order.function)
        self._write_order()

    def kill(self) -> None:
        """SIGKILL the process and its whole process group."""
        if self.is_running:
            self._process.kill()

    def release(self) -> None:
        """Close the lifeline; a worker whose function has returned then exits."""
        self._close_order_pipe()

    # --- pipes --------------------------------------------------------------------------------------

    def _write_order(self) -> None:
        try:
            written = os.write(self._order_fd, self._pending_order)
        except BlockingIOError:
            written = 0
        except OSError:
            self._loop.remove_writer(self._order_fd)
            return  # the process died, which is reported
        self._pending_order = self._pending_order[written:]  # of a memoryview, this copies nothing
        if self._pending_order:
            self._loop.add_writer(self._order_fd, self._write_order)
        else:
            self._loop.remove_writer(self._order_fd)

    def _close_order_pipe(self) -> None:
        if self._order_fd >= 0:
            self._loop.remove_writer(self._order_fd)
            os.close(self._order_fd)
            self._order_fd = -1

    def _readable(self, fd: int) -> None:
        """Read once from a pipe; stop watching it at its end, and pause while the channel has too much unsent data."""
        if fd != self._result_fd and not self._observer.output_may_flow():
            self._loop.remove_reader(fd)
            self._loop.call_later(_POLL_S, self._resume, fd)
            return
        try:
            data = os.read(fd, _READ_BYTES)
        except BlockingIOError:
            return
        except OSError:
            self._loop.remove_reader(fd)
            return
        self._take(fd, data)
        if not data:
            self._loop.remove_reader(fd)

    def _resume(self, fd: int) -> None:
        if self.is_running:
            self._loop.add_reader(fd, self._readable, fd)

    def _take(self, fd: int, data: bytes) -> None:
        if fd == self._result_fd:
            self._take_result(data)
        else:
            self._take_output(self._streams[fd], data)

    def _take_output(self, stream: str, data: bytes) -> None:
        partial = self._partial[stream]
        partial += data
        *whole, rest = bytes(partial).split(b"\n")
        if len(rest) > MAX_LINE_BYTES or (not data and rest):
            cut = _LAST_CHARACTER.search(rest, len(rest) - 4) if data else None
            end = cut.start() if cut else len(rest)
            whole.append(rest[:end])
            rest = rest[end:]
        partial[:] = rest
        lines = tuple(line.rstrip(b"\r").decode(errors="replace") for line in whole)
        if stream == "stderr":
            self._stderr_tail.extend(lines)
        if lines:
            self._observer.output(self, stream, lines)

    def _take_result(self, data: bytes) -> None:
        """Parse results, each a line of JSON and the pickled value; the newest replaces the one before."""
        buffer = self._result_buffer
        buffer += data
        while True:
            if self._result_head is None:
                end = buffer.find(b"\n")
                if end < 0:
                    return
                self._result_head = json.loads(buffer[:end])
                del buffer[: end + 1]
            size = int(self._result_head["size"])
            if len(buffer) < size:
                return
            head, self._result_head = self._result_head, None
            self.result, self.in_loop, self.run = bytes(buffer[:size]), bool(head["in_loop"]), int(head["run"])
            del buffer[:size]
            self._observer.result_stored(self)

    # --- the end ------------------------------------------------------------------------------------

    def _dying(self) -> None:
        """Pass on the reaper's word, or stop to listen if the reaper is gone or has nothing to say."""
        self._loop.remove_reader(self._death_fd)
        if os.read(self._death_fd, 1):
            pid = self._process.pid
            self._observer.dying(self, None if pid is None else exit_code_of(pid))

    def _gone(self, exit_code: int) -> None:
        if not self.is_running:
            return
        self._drain()
        self.is_running = False
        self._close_pipes()
        self._observer.exited(self, exit_code)

    def _drain(self) -> None:
        for fd in (self._result_fd, *self._streams):
            # bounded: a child that left the group may write for ever
            left = _PIPE_CAPACITY
            while left >= 0:
                try:
                    data = os.read(fd, _READ_BYTES)
                except OSError:
                    break
                left -= len(data)
                self._take(fd, data)
                if not data:
                    break

    def _close_pipes(self) -> None:
        self._close_order_pipe()
        for fd in (self._result_fd, self._death_fd, *self._streams):
            self._loop.remove_reader(fd)
            os.close(fd)


class SpawnedProcess:
    """A worker that the agent has started itself. Used on the agent's event loop.

    Args:
        modules: What the process imports.
        env: Its environment.
        ends: Its ends of the pipes, which are closed here.
        ended: Called once, with the exit code, after the process has ended.
    """

    def __init__(self, modules: Sequence[str], env: dict[str, str], ends: Ends, ended: Callable[[int], None]) -> None:
        self._ended = ended
        self._loop = asyncio.get_running_loop()
        arguments = [str(os.getpid()), str(ends.result), str(ends.death), *modules]
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "spark_elastic.task.main", *arguments],
                stdin=ends.stdin,
                stdout=ends.stdout,
                stderr=ends.stderr,
                pass_fds=[ends.result, ends.death],
                env=env,
            )
        finally:
            ends.close()
        self.pid = self._process.pid
        self._pidfd = open_pidfd(self.pid)
        if self._pidfd >= 0:
            self._loop.add_reader(self._pidfd, self._gone)
        else:
            self._loop.call_later(_POLL_S, self._poll)

    def kill(self) -> None:
        """SIGKILL the process and its process group."""
        if self._process.returncode is None:
            self._kill_group()  # fails if the process has not created its own group yet
            self._process.kill()

    def _kill_group(self) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)

    def _poll(self) -> None:
        if self._process.poll() is None:
            self._loop.call_later(_POLL_S, self._poll)
        else:
            self._gone()

    def _gone(self) -> None:
        exit_code = self._process.wait()
        if self._pidfd >= 0:
            self._loop.remove_reader(self._pidfd)
            os.close(self._pidfd)
        self._kill_group()  # children left behind, which might still write
        self._ended(exit_code)


def worker_environment(
    order: LaunchSpec, base: dict[str, str], sys_path: Sequence[str], cores: int, accelerators: Sequence[str]
) -> dict[str, str]:
    """Return a worker's environment: the task's own, limited to the cores and GPUs of this slot."""
    env = {name: value for name, value in base.items() if not name.startswith("PYTHON_WORKER_FACTORY")}
    env["PYTHONPATH"] = os.pathsep.join(dict.fromkeys(path for path in sys_path if path))
    for name in THREAD_VARIABLES:
        env.setdefault(name, str(max(cores, 1)))
    # OpenMP threads that spin while they wait take the cores from the threads they wait for: with a second process on
    # the host, a step of a small network took 100-300 ms instead of 0.7. Remedy: passive waits.
    env.setdefault("OMP_WAIT_POLICY", "passive")
    # at least 2: one TensorFlow thread waits in the reduction while another feeds the next batch
    env.setdefault("TF_NUM_INTEROP_THREADS", str(max(cores, 2)))
    env.setdefault(*QUIET_TENSORFLOW)
    for name, value in NCCL_WATCHDOG.items():
        env.setdefault(name, value)
    if accelerators:
        env["CUDA_VISIBLE_DEVICES"] = ",".join(accelerators)
    if order.device == "cpu":
        env["CUDA_VISIBLE_DEVICES"] = ""
    env[DEVICE_SETTING] = order.device
    env.update(order.env)
    return env


# --- workers that the kernel killed for lack of memory ------------------------------------------------
#
# Such a process ends by SIGKILL like any other killed process. The counters of its control group and of the machine
# tell the difference.

ROOT = Path("/")
_GIB = 2**30


@dataclass(frozen=True, slots=True)
class MemoryKills:
    """Numbers of processes killed for lack of memory so far; None if the system does not show the counter."""

    in_group: int | None
    """In this process's control group, such as a container or a Spark executor."""
    on_machine: int | None

    def since(self, before: MemoryKills) -> tuple[int, bool]:
        """Return how many were killed since `before`, and True if they belonged to this control group."""
        in_group = _more(self.in_group, before.in_group)
        return (in_group, True) if in_group else (_more(self.on_machine, before.on_machine), False)


def _more(now: int | None, before: int | None) -> int:
    return max(0, now - before) if now is not None and before is not None else 0


def memory_kills(root: Path = ROOT) -> MemoryKills:
    """Read the counters; takes tens of microseconds. `root` is the folder that holds /proc and /sys."""
    group = _group(root)
    counters = _numbers(group / "memory.events") if group is not None else {}
    if group is not None and "oom_kill" not in counters:
        counters = _numbers(group / "memory.oom_control")
    return MemoryKills(counters.get("oom_kill"), _numbers(root / "proc/vmstat").get("oom_kill"))


def describe_kills(before: MemoryKills, now: MemoryKills, root: Path = ROOT) -> str:
    """Return how many processes were killed for lack of memory, and the limits, in words; "" if none was killed."""
    kills, in_group = now.since(before)
    if not kills:
        return ""
    processes = "1 process" if kills == 1 else f"{kills} processes"
    where = "of its container (control group)" if in_group else "on its machine"
    return f"The kernel killed {processes} {where} for lack of memory while it ran{_limits(root)}"


def memory_left(root: Path = ROOT) -> int | None:
    """Return the bytes of memory that this process's container, or the machine, has left; None if not shown."""
    left = [int(kib) * 1024 for kib in [_numbers(root / "proc/meminfo").get("MemAvailable:")] if kib is not None]
    group = _group(root)
    for limit_file, used_file in _LIMITS:
        limit, used = (_number(group / name) if group is not None else None for name in (limit_file, used_file))
        if group is not None and limit is not None and used is not None:
            # the content of files that were read counts as used, and is given back when memory is needed
            left.append(limit - used + _numbers(group / "memory.stat").get("inactive_file", 0))
    return min(left, default=None)


_LIMITS = (("memory.max", "memory.current"), ("memory.limit_in_bytes", "memory.usage_in_bytes"))
"""Files of a control group with its limit and its use, of version 2 and 1."""


def _limits(root: Path) -> str:
    parts = []
    group = _group(root)
    for name, _ in _LIMITS:
        limit = _number(group / name) if group is not None else None
        if limit is not None and limit < 2**60:
            parts.append(f"limit {limit / _GIB:.1f} GiB")
            break
    free = _numbers(root / "proc/meminfo").get("MemAvailable:")
    if free is not None:
        parts.append(f"{free * 1024 / _GIB:.1f} GiB available on the machine now")
    return f" ({', '.join(parts)})" if parts else ""


def _group(root: Path) -> Path | None:
    """Return the folder of this process's control group (version 2, or version 1's memory controller)."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return None
    for line in lines:
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if controllers and "memory" not in controllers.split(","):
            continue
        mount = root / "sys/fs/cgroup" / ("memory" if controllers else "")
        for folder in (mount / path.lstrip("/"), mount):  # in a container, its own group is at the mount itself
            if (folder / "memory.events").exists() or (folder / "memory.oom_control").exists():
                return folder
    return None


def _numbers(path: Path) -> dict[str, int]:
    try:
        words = [line.split() for line in path.read_text().splitlines()]
    except OSError:
        return {}
    return {line[0]: int(line[1]) for line in words if len(line) > 1 and line[1].isdigit()}


def _number(path: Path) -> int | None:
    try:
        text = path.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None
