"""The fork server: a process of an executor that has imported what workers need, and forks them.

With `keep_workers` an agent asks the fork server of its executor for a worker, through a socket; the first agent starts
the server. The server imports installed packages, and forks a keeper for each request. The keeper imports what is not
installed and may change, forks the worker, tells the agent its process id and its exit code, and kills it when the
agent's connection closes. A request carries the worker's ends of the agent's pipes: the job's key and function go
through those. The kernel kills keepers with their server, and workers with their keeper.

See docs/decisions/07-fork-server.md for when a server ends, and why it has one thread.
"""

from __future__ import annotations

import contextlib
import gc
import hashlib
import importlib
import importlib.util
import json
import os
import select
import socket
import struct
import subprocess
import sys
import time
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, NoReturn

from spark_elastic import clock
from spark_elastic.task.reaper import kill_group, open_pidfd, stat_of

_LATE = ("CUDA_VISIBLE_DEVICES", "SPARK_ELASTIC_", "MLFLOW_")
"""Beginnings of variables that are read after the imports: a worker can get others than its server was started with."""
_THREADED = {"tensorflow", "keras"}
"""Packages that start threads when they are imported: keras imports TensorFlow, or may."""
_TRIES, _PAUSE_S = 100, 0.01
MESSAGE_BYTES = 64 * 1024

_started_here: list[Any] = []
"""The servers that this process has started; nobody waits for their ends."""


class Ends(NamedTuple):
    """The worker's ends of the pipes between it and its agent."""

    stdin: int
    stdout: int
    stderr: int
    result: int
    death: int

    def close(self) -> None:
        for descriptor in self:
            os.close(descriptor)


@dataclass(frozen=True)
class ForkServer:
    """The fork server for workers of one kind, as agents see it."""

    guardians: Sequence[int]  # processes with which it ends: with the first at once, with the others after its workers
    keep_s: float  # seconds for which it stays after its last worker
    env: Mapping[str, str]  # of a worker
    modules: Sequence[str]  # what a worker imports

    def is_possible(self) -> bool:
        """Return False if there is nothing to keep, or modules have threads, or the system has no such servers."""
        if not self.guardians or self.keep_s <= 0 or sys.platform != "linux" or not _THREADED.isdisjoint(self.modules):
            return False
        if (pidfd := open_pidfd(os.getpid())) < 0:
            return False
        os.close(pidfd)
        return True

    def name(self) -> bytes:
        """Return the name of the socket: a digest of what a server cannot change, so other jobs start another one.

        Containers can share a network, and with it the names of sockets, but not their process ids.

        Raises:
            OSError: A guardian is gone.
        """
        paths = {*self.env.get("PYTHONPATH", "").split(os.pathsep), *sys.path}
        packages = [path for path in sorted(paths) if path.endswith("-packages") and os.path.isdir(path)]
        installed = [(path, os.stat(path).st_mtime_ns) for path in packages]
        variables = sorted(each for each in self.env.items() if not each[0].startswith(_LATE))
        guardians = [(pid, stat_of(pid)[19]) for pid in self.guardians]
        kind = [sys.executable, sys.version, os.getcwd(), os.getuid(), os.stat("/proc/self/ns/pid").st_ino, self.keep_s]
        digest = hashlib.sha256(json.dumps([kind, guardians, variables, installed]).encode())
        return f"\0spark_elastic-{digest.hexdigest()}".encode()

    def connect(self) -> socket.socket:
        """Return a connection to the server, starting one (it imports at once) if needed. Raises OSError."""
        name = self.name()
        for _ in range(_TRIES):
            connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            with contextlib.suppress(ConnectionRefusedError):
                connection.connect(name)
                if not _is_own(connection):
                    connection.close()
                    raise PermissionError("another user has taken the name of the executor's fork server")
                return connection
            connection.close()
            self._start(name)
            time.sleep(_PAUSE_S)  # another agent may have the name, and not listen yet
        raise TimeoutError("the fork server does not start")

    def request(self) -> bytes:
        """Return the request for a worker, which is sent with its `Ends`."""
        late = {name: value for name, value in self.env.items() if name.startswith(_LATE)}
        return json.dumps([late, list(self.modules)]).encode()

    def _start(self, name: bytes) -> None:
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
            try:
                listener.bind(name)
            except OSError:
                return  # another agent does so at the same time
            listener.listen(128)
            arguments = [str(listener.fileno()), str(self.keep_s), ",".join(map(str, self.guardians)), *self.modules]
            command = [sys.executable, "-m", "spark_elastic.task.fork_server", *arguments]
            env = {name: value for name, value in self.env.items() if not name.startswith(_LATE[1:])}
            null = subprocess.DEVNULL
            pipes: dict[str, Any] = {"stdin": null, "stdout": null, "stderr": null, "pass_fds": [listener.fileno()]}
            _started_here.append(subprocess.Popen(command, env=env, start_new_session=True, **pipes))


def _is_own(connection: socket.socket) -> bool:
    """Return True if the other end is a process of the same user."""
    given = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
    return int(struct.unpack("3i", given)[1]) == os.getuid()


# --- the server and its keepers -------------------------------------------------------------------


def serve(arguments: Sequence[str]) -> NoReturn:
    """Import modules, and fork keepers until the server has to end. The arguments are those of `ForkServer._start`."""
    from spark_elastic.task.main import import_modules

    listener, keep_s = socket.socket(fileno=int(arguments[0])), float(arguments[1])
    jvm, *others = [open_pidfd(int(pid)) for pid in arguments[2].split(",")]
    import_modules([module for module in arguments[3:] if _is_installed(module)])
    gc.collect()
    gc.freeze()  # the collector would write to pages that workers share
    server, keepers = os.getpid(), set[int]()
    until = clock.monotonic() + keep_s
    while min([jvm, *others]) >= 0 and (keepers or clock.monotonic() < until):
        watched: list[Any] = [listener, jvm, *others]
        ready, _, _ = select.select(watched, [], [], 0.2)
        if jvm in ready:
            break
        if keepers:
            until = clock.monotonic() + keep_s
            keepers -= {pid for pid in keepers if os.waitpid(pid, os.WNOHANG)[0]}
        if not set(others).isdisjoint(ready):
            others, keep_s, until = [], 0.0, 0.0
        if listener in ready:
            # without a process or a descriptor for it, the agent starts its worker itself
            with contextlib.suppress(OSError), listener.accept()[0] as connection:
                if _is_own(connection) and _can_fork():
                    keepers.add(os.fork() or _keep_worker(connection, server))
    os._exit(0)


def _is_installed(module: str) -> bool:
    """Return True if the module is of an installed package, as `ForkServer.name` covers them, or of this one."""
    package = module.partition(".")[0]
    found = importlib.util.find_spec(package)
    return package == "spark_elastic" or (found is not None and f"-packages{os.sep}" in str(found.origin))


def _keep_worker(connection: socket.socket, server: int) -> NoReturn:
    """Fork the worker that an agent asks for, and stay until its end. Runs in a process of its own."""
    from spark_elastic.task.main import die_with_parent, import_modules, run_worker

    try:
        die_with_parent(server)
        request, descriptors, _, _ = socket.recv_fds(connection, MESSAGE_BYTES, len(Ends._fields))
        if not request:  # the server was only to be started
            os._exit(0)
        env, modules = json.loads(request)
        ends, keeper = Ends(*descriptors), os.getpid()
        import_modules(modules)
        if not _can_fork():
            os._exit(1)
        pid = os.fork()
        if not pid:
            _become_blank(ends, env)
            run_worker(keeper, ends.result, ends.death)
        ends.close()  # first: only the agent and the worker hold the pipes once the agent knows of it
        connection.send(str(pid).encode())
        watched: list[Any] = [connection, os.pidfd_open(pid)]
        if connection in select.select(watched, [], [])[0]:
            kill_group(pid)  # the agent is gone, or has no use for the worker any more
        _, status = os.waitpid(pid, 0)
        kill_group(pid)  # what the worker has left behind
        connection.send(str(os.waitstatus_to_exitcode(status)).encode())
    except BaseException:  # of a keeper nobody hears; a worker has its agent's stderr
        traceback.print_exc()
        sys.stderr.flush()
    os._exit(1)


def _become_blank(ends: Ends, env: Mapping[str, str]) -> None:
    """Leave everything of server and keeper behind, for the agent's pipes and the worker's own variables."""
    for number, end in enumerate((ends.stdin, ends.stdout, ends.stderr)):
        os.dup2(end, number)
    for descriptor in map(int, os.listdir("/proc/self/fd")):
        if descriptor not in {0, 1, 2, ends.result, ends.death}:
            with contextlib.suppress(OSError):  # the listing's own
                os.close(descriptor)
    for name in [name for name in os.environ if name.startswith(_LATE)]:
        del os.environ[name]
    os.environ.update(env)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()  # Python's own generator does this by itself
    gc.unfreeze()
    del sys.argv[1:]
    importlib.invalidate_caches()


def _can_fork() -> bool:
    """Return True if this process has no thread but this one. What it has printed is not printed by its forks."""
    sys.stdout.flush()
    if len(os.listdir("/proc/self/task")) > 1:
        # OpenBLAS has threads from its import on. It ends them at a fork, and starts them again when it computes.
        pid = os.fork()
        if pid == 0:
            os._exit(0)
        os.waitpid(pid, 0)
    return len(os.listdir("/proc/self/task")) == 1


if __name__ == "__main__":
    from spark_elastic.task.freed_memory import keep_freed_memory

    keep_freed_memory()
    serve(sys.argv[1:])
