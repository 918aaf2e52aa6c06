"""A worker subprocess as its agent sees it: pipes, output, result and exit.

Runs on the agent's event loop, without threads.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import pickle
import re
import signal
import socket
import subprocess
import sys
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from spark_elastic.membership.topology import WorkerId
from spark_elastic.settings import DEVICE_SETTING
from spark_elastic.task.fork_server import MESSAGE_BYTES, Ends, ForkServer
from spark_elastic.task.memory_kills import memory_kills
from spark_elastic.task.reaper import exit_code_of, kill_group, open_pidfd, process_state
from spark_elastic.wire.messages import RESULT_HEAD, LaunchSpec

if TYPE_CHECKING:
    from spark_elastic.task.agent import TaskAgent

logger = logging.getLogger("spark_elastic.task")

STDERR_TAIL_LINES = 40
THREAD_VARIABLES = ("OMP_NUM_THREADS", "TF_NUM_INTRAOP_THREADS")
"""Variables that limit torch and TensorFlow to as many threads as the task has cores."""
NCCL_WATCHDOG = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "0", "TORCH_NCCL_ENABLE_MONITORING": "0"}
"""By default torch's watchdog ends the process when a collective on GPUs fails; here a lost peer is survived."""
QUIET_TENSORFLOW = {"TF_CPP_MIN_LOG_LEVEL": "1"}
"""Without it each worker prints six lines about its processor and oneDNN. Warnings and errors are still printed."""
MAX_LINE_BYTES = 64 * 1024
"""Longer lines are split, so that progress bars and binary dumps do not accumulate in memory."""
_LAST_CHARACTER = re.compile(rb"[\xc0-\xff][\x80-\xbf]*$")  # of several bytes, of which some may be still to come
_READ_BYTES = 64 * 1024
_PIPE_CAPACITY = 1024 * 1024
"""Upper bound of a pipe's content: Linux's default /proc/sys/fs/pipe-max-size. A new pipe holds 64 KiB."""
_POLL_S = 0.02
_NOT_RUNNING = ("", "T", "t", "Z", "X")
"""States of `process_state`: unknown, stopped by a signal, stopped by a debugger, zombie, dead."""


class WorkerProcess:
    """A process that imports a worker's modules while its agent connects, then waits for its id and the function."""

    def __init__(self, spec: LaunchSpec, env: dict[str, str], agent: TaskAgent, guardians: Sequence[int] = ()) -> None:
        """Start the process, or have it forked by the fork server with these guardians."""
        self._agent = agent
        self._loop = asyncio.get_running_loop()
        spec_read, self._spec_fd = os.pipe()
        stdout, stdout_write = os.pipe()
        stderr, stderr_write = os.pipe()
        self._result_fd, result_write = os.pipe()
        self._death_fd, death_write = os.pipe()
        ends = Ends(spec_read, stdout_write, stderr_write, result_write, death_write)
        self._process: SpawnedProcess | ForkedProcess
        server = ForkServer(guardians, spec.keep_workers_s, env, spec.preimport)

        def spawn() -> None:
            self._process = SpawnedProcess(spec.preimport, env, ends, self._gone)

        def spawn_instead() -> None:  # of the fork server, which has forked none
            try:
                spawn()
            except OSError as error:
                logger.warning("a worker cannot be started: %s", error)
                self._gone(-signal.SIGKILL)

        try:
            if server.is_possible():
                self._process = ForkedProcess(server, ends, self._gone, spawn_instead)
            else:
                spawn()
        except OSError as error:
            logger.info("a worker is started without a fork server: %s", error)
            spawn()
        self.memory_before = memory_kills()
        """The counters before the process started; see `exited`."""
        self.worker: WorkerId | None = None
        self.result: bytes | None = None
        """The newest pickled return value of the function; None until it returns."""
        self.has_loop = False
        self.run = 0
        """Number of the function's call that returned `result`."""
        self._result_buffer = bytearray()
        self._partial = {"stdout": bytearray(), "stderr": bytearray()}
        self._stderr_tail: deque[str] = deque(maxlen=STDERR_TAIL_LINES)
        self._unwritten_spec = memoryview(b"")
        self.is_running = True
        self._streams = {stdout: "stdout", stderr: "stderr"}
        for fd in (*self._streams, self._result_fd):
            os.set_blocking(fd, False)
            self._loop.add_reader(fd, self._readable, fd)
        os.set_blocking(self._spec_fd, False)
        self._loop.add_reader(self._death_fd, self._dying)

    @property
    def stderr_tail(self) -> str:
        """The last lines that the process wrote to stderr."""
        return "\n".join(self._stderr_tail)

    @property
    def is_seen_running(self) -> bool:
        """True if the process exists and is not stopped; False if the system does not show its state."""
        pid = self._process.pid
        return self.is_running and (pid is None or process_state(pid) not in _NOT_RUNNING)

    def assign(self, worker: WorkerId, spec: LaunchSpec) -> None:
        """Send the process its id and the function; it then connects to the driver and runs the function."""
        self.worker = worker
        self._unwritten_spec = memoryview(pickle.dumps((worker, spec)))
        self._write_spec()

    def kill(self) -> None:
        """SIGKILL the process and its whole process group."""
        if self.is_running:
            self._process.kill()

    def release(self) -> None:
        """Close the lifeline; a worker whose function has returned then exits."""
        if self._spec_fd >= 0:
            self._loop.remove_writer(self._spec_fd)
            os.close(self._spec_fd)
            self._spec_fd = -1

    # --- pipes --------------------------------------------------------------------------------------

    def _write_spec(self) -> None:
        try:
            written = os.write(self._spec_fd, self._unwritten_spec)
        except BlockingIOError:
            written = 0
        except OSError:
            written = len(self._unwritten_spec)  # the process died, which is reported
        self._unwritten_spec = self._unwritten_spec[written:]  # of a memoryview, this copies nothing
        if self._unwritten_spec:
            self._loop.add_writer(self._spec_fd, self._write_spec)
        else:
            self._loop.remove_writer(self._spec_fd)

    def _readable(self, fd: int) -> None:
        """Read once from a pipe; stop watching it at its end, and pause while the channel has too much unsent data."""
        if fd != self._result_fd and not self._agent.output_may_flow():
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
        self._received(fd, data)
        if not data:
            self._loop.remove_reader(fd)

    def _resume(self, fd: int) -> None:
        if self.is_running:
            self._loop.add_reader(fd, self._readable, fd)

    def _received(self, fd: int, data: bytes) -> None:
        if fd == self._result_fd:
            self._received_result(data)
            return
        stream = self._streams[fd]
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
            self._agent.output(self, stream, lines)

    def _received_result(self, data: bytes) -> None:
        """Parse results, each with a `RESULT_HEAD`; the newest replaces the one before."""
        buffer = self._result_buffer
        buffer += data
        while len(buffer) >= RESULT_HEAD.size:
            has_loop, run, size = RESULT_HEAD.unpack_from(buffer)
            end = RESULT_HEAD.size + size
            if len(buffer) < end:
                return
            self.result, self.has_loop, self.run = bytes(buffer[RESULT_HEAD.size : end]), has_loop, run
            del buffer[:end]
            self._agent.result_stored(self)

    # --- the end ------------------------------------------------------------------------------------

    def _dying(self) -> None:
        """Pass on the reaper's word, or stop to listen if the reaper is gone or has nothing to say."""
        self._loop.remove_reader(self._death_fd)
        if os.read(self._death_fd, 1):
            pid = self._process.pid
            self._agent.dying(self, None if pid is None else exit_code_of(pid))

    def _gone(self, exit_code: int) -> None:
        if not self.is_running:
            return
        self._drain()
        self.is_running = False
        self.release()
        for fd in (self._result_fd, self._death_fd, *self._streams):
            self._loop.remove_reader(fd)
            os.close(fd)
        self._agent.exited(self, exit_code)

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
                self._received(fd, data)
                if not data:
                    break


class SpawnedProcess:
    """A worker that the agent has started itself, on its event loop; calls `ended(exit code)` once."""

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
            kill_group(self.pid)

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
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)  # children left behind, which might still write
        self._ended(exit_code)


class ForkedProcess:
    """A worker that a fork server forks, as its agent sees it. Used on the agent's event loop.

    `ended` is called once, with the exit code, after the worker has ended; `failed` instead if no worker is forked,
    while the ends are still open. Raises OSError if the server cannot be asked.
    """

    def __init__(
        self, server: ForkServer, ends: Ends, ended: Callable[[int], None], failed: Callable[[], None]
    ) -> None:
        self._ends, self._ended, self._failed = ends, ended, failed
        self._loop = asyncio.get_running_loop()
        self.pid: int | None = None
        """The worker's process id; None before it is forked."""
        self._connection = server.connect()
        try:
            self._connection.setblocking(False)
            socket.send_fds(self._connection, [server.request()], list(ends))
        except OSError:
            self._connection.close()
            raise
        self._loop.add_reader(self._connection, self._heard)

    def kill(self) -> None:
        """SIGKILL the worker and its process group; before it is forked, take the request back."""
        if self.pid is not None:
            kill_group(self.pid)
        elif self._connection.fileno() >= 0:
            self._disconnect()
            self._ends.close()
            self._loop.call_soon(self._ended, -signal.SIGKILL)

    def _heard(self) -> None:
        try:
            answer = self._connection.recv(MESSAGE_BYTES)
        except OSError:
            answer = b""
        if self.pid is None and answer:
            self.pid = int(answer)
            self._ends.close()
            return
        self._disconnect()
        if self.pid is None:
            self._failed()
            return
        kill_group(self.pid)  # without an answer the keeper is dead, and the worker with it
        self._ended(int(answer or -signal.SIGKILL))

    def _disconnect(self) -> None:
        self._loop.remove_reader(self._connection)
        self._connection.close()


def worker_environment(
    spec: LaunchSpec, base: dict[str, str], sys_path: Sequence[str], cores: int, accelerators: Sequence[str]
) -> dict[str, str]:
    """Return a worker's environment: the task's own, limited to the cores and GPUs of this slot."""
    env = {
        **dict.fromkeys(THREAD_VARIABLES, str(max(cores, 1))),
        # OpenMP threads that spin while they wait take the cores from the threads they wait for: with a second process
        # on the host, a step of a small network took 100-300 ms instead of 0.7. Remedy: passive waits.
        "OMP_WAIT_POLICY": "passive",
        # at least 2: one TensorFlow thread waits in the reduction while another feeds the next batch
        "TF_NUM_INTEROP_THREADS": str(max(cores, 2)),
        **QUIET_TENSORFLOW,
        **({} if spec.restarts_world else NCCL_WATCHDOG),
        **{name: value for name, value in base.items() if not name.startswith("PYTHON_WORKER_FACTORY")},
        "PYTHONPATH": os.pathsep.join(dict.fromkeys(path for path in sys_path if path)),
    }
    if accelerators:
        env["CUDA_VISIBLE_DEVICES"] = ",".join(accelerators)
    if spec.device == "cpu":
        env["CUDA_VISIBLE_DEVICES"] = ""
    env[DEVICE_SETTING] = spec.device
    env.update(spec.env)
    return env
