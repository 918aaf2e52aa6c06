"""The worker template: a process of an executor that has imported what workers need, and forks them.

With `keep_workers` an agent does not start its worker itself. It asks the template of its executor for one, through a
socket whose name is made from the executor's process id; the first agent starts the template. The request carries the
worker's ends of the agent's pipes and nothing else: the job's key and function go through those pipes, so the template
never holds them. Each forked worker serves one job.

The template stays for `keep_workers` seconds after its last worker has ended. It ends at once with the executor's JVM,
and forks no more workers after the end of Spark's Python daemon. An agent's death closes its connection, and the
template then kills its worker. The kernel kills all workers of a template that dies.

A process that has several threads is not forked safely. The template has one: it imports, and calls nothing. If one of
the modules starts a thread, the template refuses, and agents start their workers themselves.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import gc
import hashlib
import importlib
import json
import os
import selectors
import signal
import socket
import struct
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from spark_elastic import clock
from spark_elastic.settings import DEVICE_SETTING
from spark_elastic.task.reaper import open_pidfd

LEAST_FREE_BYTES = 512 << 20
"""With less memory free on the machine or in the container, a template without workers ends at once."""
_LOOK_S = 2.0
"""Seconds between two looks at the free memory."""
_START_S = 120.0
"""Time for the first request after the start."""
_LATE = ("CUDA_VISIBLE_DEVICES", DEVICE_SETTING)
_LATE_PREFIXES = ("SPARK_ELASTIC_", "MLFLOW_")
"""Variables that are read after the imports, so that a worker can get other ones than its template was started with."""
_INSTALLED = ("site-packages", "dist-packages")
_THREADED = {"tensorflow", "keras"}
"""Packages that start threads when they are imported: keras imports TensorFlow, or may."""
_BACKLOG = 128
_TRIES = 3
"""Templates with other settings that a request for a worker may meet."""
_CONNECT_TRIES = 100
_CONNECT_PAUSE_S = 0.01
_MESSAGE_BYTES = 64 * 1024
_CREDENTIALS = struct.Struct("3i")
_DETACHED = '"$@" </dev/null >/dev/null 2>&1 &'
"""The shell's command that starts a program which is not the caller's child."""


class TemplateUnavailableError(OSError):
    """No template can be asked for a worker."""


@dataclass(frozen=True)
class Ends:
    """The worker's ends of the pipes between it and its agent."""

    stdin: int
    stdout: int
    stderr: int
    result: int
    death: int

    def all(self) -> tuple[int, ...]:
        return dataclasses.astuple(self)

    def close(self) -> None:
        for descriptor in self.all():
            os.close(descriptor)


@dataclass(frozen=True)
class TemplateAddress:
    """Where the template of an executor is reached, and when it ends.

    Attributes:
        guardians: Processes with which the template ends: at once with the first, which gives it its name, and with the
            others as soon as it has no worker.
        keep_s: Seconds for which it stays after its last worker.
    """

    guardians: tuple[int, ...]
    keep_s: float

    @staticmethod
    def of(guardians: Sequence[int], keep_s: float, modules: Sequence[str] = ()) -> TemplateAddress | None:
        """Return the address; None without a template: nothing to keep, not Linux, an old kernel, modules with threads.

        Args:
            guardians: See the attribute.
            keep_s: See the attribute.
            modules: What workers import.
        """
        if not guardians or keep_s <= 0 or sys.platform != "linux" or not _THREADED.isdisjoint(modules):
            return None
        if (pidfd := open_pidfd(os.getpid())) < 0:
            return None
        os.close(pidfd)
        return TemplateAddress(tuple(guardians), keep_s)

    def name(self) -> bytes:
        """Return the name of the socket.

        Process ids are used again, so the time of the process's start is in it. Containers can share a network, and
        with it the names of sockets, but not their process ids, so the number of the namespace of those is in it too.

        Raises:
            OSError: The executor is gone.
        """
        with open(f"/proc/{self.guardians[0]}/stat", encoding="utf-8", errors="replace") as stat:
            started = stat.read().rpartition(")")[2].split()[19]
        namespace = os.stat("/proc/self/ns/pid").st_ino
        return f"\0spark_elastic-template-{os.getuid()}-{self.guardians[0]}-{started}-{namespace}".encode()

    def connect(self, env: Mapping[str, str], modules: Sequence[str]) -> socket.socket:
        """Return a connection to the template. Starts one if there is none.

        Args:
            env: The environment of a worker.
            modules: What it has to import.

        Raises:
            TemplateUnavailableError: There is none, and none can be started.
        """
        try:
            for _ in range(_CONNECT_TRIES):
                connection = _unix_socket()
                try:
                    connection.connect(self.name())
                except ConnectionRefusedError:
                    connection.close()
                    if not self._start(env, modules):
                        time.sleep(_CONNECT_PAUSE_S)  # another agent has the name, and does not listen yet
                    continue
                if _peer_uid(connection) != os.getuid():
                    connection.close()
                    raise TemplateUnavailableError("another user has taken the name of the executor's template")
                return connection
        except (OSError, subprocess.SubprocessError) as error:
            raise TemplateUnavailableError(f"no template: {error}") from error
        raise TemplateUnavailableError("the template does not start")

    def prepare(self, env: Mapping[str, str], modules: Sequence[str]) -> None:
        """Have a template import the modules now, before a worker is asked for. Does not wait for it.

        Raises:
            TemplateUnavailableError: As of `connect`.
        """
        try:
            with self.connect(env, modules) as connection:
                connection.send(self.request(env, modules))
        except TemplateUnavailableError:
            raise
        except OSError as error:  # it has just ended
            raise TemplateUnavailableError(f"the template takes no request: {error}") from error

    def request(self, env: Mapping[str, str], modules: Sequence[str]) -> bytes:
        """Return the request for a worker."""
        late = {name: value for name, value in env.items() if _is_late(name)}
        request = {"settings": settings_of(env), "modules": list(modules), "env": late, "keep_s": self.keep_s}
        return json.dumps(request).encode()

    def _start(self, env: Mapping[str, str], modules: Sequence[str]) -> bool:
        """Start a template. Returns False if another agent does so at the same time."""
        with _unix_socket() as listener:
            try:
                listener.bind(self.name())
            except OSError:
                return False
            listener.listen(_BACKLOG)
            arguments = [
                str(listener.fileno()),
                settings_of(env),
                ",".join(map(str, self.guardians)),
                *modules,
            ]
            program = [sys.executable, "-m", "spark_elastic.task.main", "template", *arguments]
            not_of_a_job = {name: value for name, value in env.items() if not name.startswith(_LATE_PREFIXES)}
            subprocess.run(
                ["/bin/sh", "-c", _DETACHED, "sh", *program],
                pass_fds=[listener.fileno()],
                env=not_of_a_job,
                start_new_session=True,
                check=True,
            )
        return True


def settings_of(env: Mapping[str, str]) -> str:
    """Return a digest of what a template cannot change any more for its workers.

    That is the Python, the packages that are installed as far as the time of their folder tells, the working directory,
    and the environment without variables that are read late. Modules can be imported later.
    """
    paths = {*env.get("PYTHONPATH", "").split(os.pathsep), *sys.path}
    installed = [(path, _modified(path)) for path in sorted(paths) if os.path.basename(path) in _INSTALLED]
    fixed = sorted((name, value) for name, value in env.items() if not _is_late(name))
    described = [sys.executable, sys.version, os.getcwd(), installed, fixed]
    return hashlib.sha256(json.dumps(described).encode()).hexdigest()


def _is_late(name: str) -> bool:
    return name in _LATE or name.startswith(_LATE_PREFIXES)


def _modified(folder: str) -> int:
    try:
        return os.stat(folder).st_mtime_ns
    except OSError:
        return 0


def _unix_socket() -> socket.socket:
    return socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)


def _peer_uid(connection: socket.socket) -> int:
    given = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return int(_CREDENTIALS.unpack(given)[1])


# --- the agent's end ------------------------------------------------------------------------------


class ForkedProcess:
    """A worker that the template forks, as its agent sees it. Used on the agent's event loop.

    Args:
        ended: Called once, with the exit code, after the worker has ended.
        failed: Called instead if the template does not fork a worker. The ends are still open then.

    Raises:
        TemplateUnavailableError: The template cannot be asked.
    """

    def __init__(
        self,
        template: TemplateAddress,
        env: Mapping[str, str],
        modules: Sequence[str],
        ends: Ends,
        ended: Callable[[int], None],
        failed: Callable[[], None],
    ) -> None:
        self._template = template
        self._env = env
        self._modules = modules
        self._ends = ends
        self._ended = ended
        self._failed = failed
        self._loop = asyncio.get_running_loop()
        self._tries = 0
        self._pidfd = -1
        self._is_over = False
        self.pid: int | None = None
        """The worker's process id; None before it is forked."""
        self._ask()

    def _ask(self) -> None:
        self._tries += 1
        self._connection = self._template.connect(self._env, self._modules)
        self._connection.setblocking(False)
        try:
            request = self._template.request(self._env, self._modules)
            socket.send_fds(self._connection, [request], list(self._ends.all()))
        except OSError as error:
            self._connection.close()
            raise TemplateUnavailableError(f"the template takes no request: {error}") from error
        self._loop.add_reader(self._connection, self._heard)

    def kill(self) -> None:
        """SIGKILL the worker and its process group; before it is forked, take the request back."""
        if self._is_over:
            return
        if self.pid is not None:
            kill_group(self.pid)
        else:
            self._is_over = True
            self._disconnect()
            self._ends.close()
            self._loop.call_soon(self._ended, -signal.SIGKILL)

    def _heard(self) -> None:
        try:
            data = self._connection.recv(_MESSAGE_BYTES)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        answer = json.loads(data) if data else {}
        if "exit" in answer:
            self._disconnect()
            self._end(int(answer["exit"]))
        elif "pid" in answer:
            self.pid = int(answer["pid"])
            self._ends.close()
        elif self.pid is not None:  # the template is dead, and the kernel kills the worker
            self._disconnect()
            self._watch(self.pid)
        else:
            self._disconnect()
            self._not_forked(again=not answer or bool(answer.get("retry")))

    def _not_forked(self, again: bool) -> None:
        if again and self._tries < _TRIES:
            try:
                self._ask()
                return
            except TemplateUnavailableError:
                pass
        self._failed()

    def _watch(self, pid: int) -> None:
        kill_group(pid)
        self._pidfd = open_pidfd(pid)
        if self._pidfd < 0:
            self._end(-signal.SIGKILL)
            return
        self._loop.add_reader(self._pidfd, self._end, -signal.SIGKILL)

    def _end(self, exit_code: int) -> None:
        if self._is_over:
            return
        self._is_over = True
        if self._pidfd >= 0:
            self._loop.remove_reader(self._pidfd)
            os.close(self._pidfd)
        self._ended(exit_code)

    def _disconnect(self) -> None:
        self._loop.remove_reader(self._connection)
        self._connection.close()


def kill_group(pid: int) -> None:
    """SIGKILL a worker and its process group."""
    for kill in (os.killpg, os.kill):  # it may not have made its group yet
        with contextlib.suppress(ProcessLookupError, PermissionError):
            kill(pid, signal.SIGKILL)


# --- the template's end ---------------------------------------------------------------------------


Begin = Callable[[int, int, int], NoReturn]
"""Runs a worker in a forked process. Takes the template's process id, and the descriptors of result and death."""


def run_template(
    arguments: Sequence[str],
    begin: Begin,
    import_modules: Callable[[Sequence[str]], None],
    memory_left: Callable[[], int | None],
) -> NoReturn:
    """Import the modules, and fork workers until the template has to end.

    Args:
        arguments: The listening socket, the settings, the guardians, and modules.
        begin: Runs a worker.
        import_modules: Imports modules that are not imported yet.
        memory_left: Returns the bytes of memory that are free; None if that is not known.
    """
    listener = socket.socket(fileno=int(arguments[0]))
    guardians = [int(pid) for pid in arguments[2].split(",")]
    template = _Template(listener, arguments[1], begin, import_modules, memory_left)
    template.watch(guardians)
    import_modules(arguments[3:])
    gc.collect()
    gc.freeze()  # the collector would write to pages that workers share
    template.serve()


class _Template:
    def __init__(
        self,
        listener: socket.socket,
        settings: str,
        begin: Begin,
        import_modules: Callable[[Sequence[str]], None],
        memory_left: Callable[[], int | None],
    ) -> None:
        self._listener: socket.socket | None = listener
        self._settings = settings
        self._begin = begin
        self._import_modules = import_modules
        self._memory_left = memory_left
        self._selector = selectors.DefaultSelector()
        self._connections: set[socket.socket] = set()
        """Of agents that are about to ask, or whose worker runs."""
        self._workers: dict[socket.socket, int] = {}
        """The worker of each connection, as long as it has not been reaped."""
        self._keep_s = 0.0
        self._until = clock.monotonic() + _START_S
        """When the template ends unless it has workers."""
        listener.setblocking(False)
        self._selector.register(listener, selectors.EVENT_READ, self._accept)

    def watch(self, guardians: Sequence[int]) -> None:
        """End with these processes; see `TemplateAddress`."""
        for number, pid in enumerate(guardians):
            pidfd = open_pidfd(pid)
            if pidfd < 0:
                self._end()
            ended = functools.partial(self._lost_daemon, pidfd) if number else self._end
            self._selector.register(pidfd, selectors.EVENT_READ, ended)

    def _lost_daemon(self, pidfd: int) -> None:
        """End with the last worker. Spark replaces a daemon that it has lost; agents go on without one."""
        self._selector.unregister(pidfd)
        os.close(pidfd)
        self._retire()

    def serve(self) -> NoReturn:
        while True:
            for key, _ in self._selector.select(_LOOK_S):
                key.data()
            is_idle = not self._workers and not self._connections
            if is_idle and (clock.monotonic() >= self._until or self._is_short_of_memory()):
                self._end()

    def _is_short_of_memory(self) -> bool:
        left = self._memory_left()
        return left is not None and left < LEAST_FREE_BYTES

    def _end(self) -> NoReturn:
        for pid in self._workers.values():
            kill_group(pid)
        os._exit(0)

    def _accept(self) -> None:
        if self._listener is None:  # closed in this turn of the loop
            return
        with contextlib.suppress(OSError):  # it has gone again
            connection, _ = self._listener.accept()
            if _peer_uid(connection) != os.getuid():
                connection.close()
                return
            self._selector.register(connection, selectors.EVENT_READ, lambda: self._heard(connection))
            self._connections.add(connection)

    def _heard(self, connection: socket.socket) -> None:
        with contextlib.ExitStack() as received:
            try:
                data, descriptors, _, _ = socket.recv_fds(connection, _MESSAGE_BYTES, len(dataclasses.fields(Ends)))
                for descriptor in descriptors:
                    received.callback(os.close, descriptor)
                if not data:  # the agent is gone, or has no use for its worker any more
                    self._forget(connection)
                elif connection not in self._workers:
                    self._answer(connection, json.loads(data), descriptors, received.close)
            except Exception:  # an invalid request or a failed import must not end the other workers
                self._forget(connection)

    def _forget(self, connection: socket.socket) -> None:
        if connection in self._workers:
            kill_group(self._workers[connection])  # its end is noticed like any other
        self._selector.unregister(connection)
        self._connections.discard(connection)
        connection.close()

    def _answer(
        self,
        connection: socket.socket,
        request: Mapping[str, Any],
        descriptors: Sequence[int],
        close_descriptors: Callable[[], None],
    ) -> None:
        if request["settings"] != self._settings:
            self._retire()
            _send(connection, {"retry": True})
            if not self._workers:
                self._end()
            return
        self._import_modules(request["modules"])
        self._keep_s = float(request["keep_s"])
        self._until = clock.monotonic() + self._keep_s
        if not descriptors:  # it was only to be prepared
            return
        if not _has_one_thread():
            _send(connection, {"refused": "an imported module has started a thread"})
            return
        pid = self._fork(Ends(*descriptors), request["env"])
        self._workers[connection] = pid
        close_descriptors()  # first, so that only the agent and the worker hold the pipes once the agent knows of it
        pidfd = os.pidfd_open(pid)
        self._selector.register(pidfd, selectors.EVENT_READ, functools.partial(self._reap, connection, pidfd))
        _send(connection, {"pid": pid})

    def _retire(self) -> None:
        """Leave the name to another template, and end once the workers have."""
        if self._listener is not None:
            self._selector.unregister(self._listener)
            self._listener.close()
            self._listener = None
        self._until = 0.0

    def _reap(self, connection: socket.socket, pidfd: int) -> None:
        pid = self._workers.pop(connection)
        self._selector.unregister(pidfd)
        os.close(pidfd)
        _, status = os.waitpid(pid, 0)
        kill_group(pid)  # what the worker has left behind
        _send(connection, {"exit": os.waitstatus_to_exitcode(status)})
        if self._listener is not None:
            self._until = clock.monotonic() + self._keep_s

    def _fork(self, ends: Ends, env: Mapping[str, str]) -> int:
        template = os.getpid()
        sys.stdout.flush()  # or the worker would show what an import of another job has printed
        pid = os.fork()
        if pid:
            return pid
        try:
            self._become_worker(ends, env, template)
        except BaseException:  # the worker's own: nothing of the template may go on in this process
            traceback.print_exc()
            sys.stderr.flush()
        finally:
            os._exit(1)

    def _become_worker(self, ends: Ends, env: Mapping[str, str], template: int) -> NoReturn:
        """Leave everything of the template behind, and run the worker."""
        for number, end in enumerate((ends.stdin, ends.stdout, ends.stderr)):
            os.dup2(end, number)
        kept = {0, 1, 2, ends.result, ends.death}
        for descriptor in map(int, os.listdir("/proc/self/fd")):
            if descriptor not in kept:
                with contextlib.suppress(OSError):  # the listing's own
                    os.close(descriptor)
        # a shell has started the template in the background, and has it ignore these
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.signal(signal.SIGQUIT, signal.SIG_DFL)
        for name in [name for name in os.environ if _is_late(name)]:
            del os.environ[name]
        os.environ.update(env)
        numpy = sys.modules.get("numpy")
        if numpy is not None:
            numpy.random.seed()  # Python's own generator does this by itself
        gc.unfreeze()
        del sys.argv[1:]
        importlib.invalidate_caches()
        self._begin(template, ends.result, ends.death)


def _has_one_thread() -> bool:
    """Return True if this process has no thread but this one."""
    if len(os.listdir("/proc/self/task")) > 1:
        # OpenBLAS has threads from its import on. It ends them at a fork, and starts them again when it computes.
        pid = os.fork()
        if pid == 0:
            os._exit(0)
        os.waitpid(pid, 0)
    return len(os.listdir("/proc/self/task")) == 1


def _send(connection: socket.socket, answer: Mapping[str, Any]) -> None:
    with contextlib.suppress(OSError):  # the agent is gone
        connection.send(json.dumps(answer).encode())
