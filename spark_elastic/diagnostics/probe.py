"""The probe: runs in a Spark task, reports facts about its executor and answers the doctor's questions.

This source and the modules that it imports at the top are sent to executors that may lack the package, so they use the
standard library alone. `serve` raises nothing, because Spark would run a failed task again.
"""

from __future__ import annotations

import collections
import contextlib
import glob
import json
import multiprocessing
import os
import platform
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from importlib import metadata
from typing import Any

from spark_elastic.data.store import Store
from spark_elastic.errors import ChannelClosedError, PortsTakenError
from spark_elastic.task.executor_process import accelerators_in_task, executor_id_in_task, host_name_in_task
from spark_elastic.wire.framing import Connection
from spark_elastic.wire.interfaces import every_address, interface_addresses
from spark_elastic.wire.ports import ANY, Ports, ephemeral_ports, listen, with_port

PACKAGES = ("torch", "numpy", "cloudpickle", "pyspark", "pandas", "pyarrow", "tensorflow", "tensorflow-cpu", "keras")
CONNECT_TIMEOUT_S = 5.0
_VISIBILITY_TIMEOUT_S = 3.0
"""Time for a file written on another machine to appear: network file systems cache for a while that it was absent."""
_MAX_FRAME_BYTES = 4 * 2**20

ProbeReport = Mapping[str, Any]
"""The result of `collect_facts`, with the port, identity and connection attempts that `serve` adds."""


def collect_facts(number: int, package: str) -> dict[str, Any]:
    """Return the facts that need no other machine. Takes milliseconds, except for the import of the package.

    Args:
        number: the probe's number; -1 for the driver.
        package: name of the package to import: `spark_elastic`.
    """
    temporary = tempfile.gettempdir()
    report: dict[str, Any] = {
        "number": number,
        "executor": executor_id_in_task(),
        "host": host_name_in_task() or socket.gethostname(),
        "hostname": socket.gethostname(),
        "python": platform.python_version(),
        "executable": sys.executable,
        "system": f"{platform.system()} {platform.machine()}",
        "addresses": interface_addresses(),
        "ephemeral_ports": str(ephemeral_ports() or "unknown"),
        "packages": {name: version for name in PACKAGES if (version := installed_version(name))},
        "start_method": multiprocessing.get_start_method(allow_none=True) or multiprocessing.get_all_start_methods()[0],
        "descriptors": _limit("RLIMIT_NOFILE"),
        "processes": _limit("RLIMIT_NPROC"),
        "temporary": {"path": temporary, "free": _free_bytes(temporary)},
        "nvidia_devices": len(glob.glob("/dev/nvidia[0-9]*")),
        "gpus": list(accelerators_in_task()),
    }
    try:
        report["package"] = __import__(package).__version__
    except Exception as error:
        report["package"] = None
        report["package_error"] = _describe(error)
    return report


def serve(order: Mapping[str, Any], report: dict[str, Any]) -> dict[str, Any]:
    """Connect to the doctor, send the report and answer questions until the doctor is done or the time is over.

    Args:
        order: `addresses` of the doctor, in the order to try; the `key`; `seconds` for everything; `connect_s` for
            each address; `agent_ports`, the first and the last.
        report: from `collect_facts`.

    Returns:
        The report, with the outcome of each attempt to reach the doctor.
    """
    until = time.monotonic() + order["seconds"]
    identity = f"{report['hostname']}/{report['executor']}/{report['number']}/{os.urandom(8).hex()}"
    with contextlib.ExitStack() as listening:

        def listen_at(ports: Ports) -> int:
            listener = listening.enter_context(listen(every_address(), ports, "agent_ports", backlog=64))
            start_thread(_send_identity, listener, identity)
            return int(listener.getsockname()[1])

        # the first is a port of the system's choice, as Gloo's are; the second one that an agent would take
        report |= {"port": listen_at(ANY), "identity": identity, "attempts": []}
        if not (agent_ports := Ports(*order.get("agent_ports", ANY))).are_any:
            try:
                report["agent_port"] = listen_at(agent_ports)
            except (OSError, PortsTakenError) as error:
                report["agent_ports_error"] = str(error)
        for host, port in order["addresses"]:
            began = time.monotonic()
            try:
                sock = socket.create_connection((host, port), order["connect_s"])
                connection = JsonConnection(sock, order["key"], server=False, timeout_s=order["connect_s"])
            except Exception as error:
                report["attempts"].append({"to": with_port(host, port), "error": _describe(error)})
                continue
            report["attempts"].append({"to": with_port(host, port), "ms": _ms_since(began)})
            _answer_questions(connection, report, until)
            break
    return report


def _answer_questions(connection: JsonConnection, report: ProbeReport, until: float) -> None:
    memory = _MemoryFile()
    answers: dict[str, Callable[..., Any]] = {**ANSWERS, "offer memory": memory.offer, "open memory": memory.open}
    try:
        connection.send(report, CONNECT_TIMEOUT_S)
        while (left := until - time.monotonic()) > 0:
            name, arguments = connection.receive(left)
            if name == "done":
                return
            try:
                reply = {"answer": answers[name](**arguments)}
            except Exception as error:
                reply = {"error": _describe(error)}
            connection.send(reply, max(until - time.monotonic(), 0.1))
    except Exception:  # the doctor is gone, or its time is over
        return
    finally:
        memory.close()
        connection.close()


def start_thread(target: Callable[..., object], *args: Any) -> threading.Thread:
    """Start a daemon thread, because a hanging JVM or executor may block it for ever."""
    thread = threading.Thread(target=target, args=args, name="spark_elastic-doctor", daemon=True)
    thread.start()
    return thread


# --- connections --------------------------------------------------------------------------------------


class JsonConnection:
    """One end of the connection between doctor and probe: JSON in the frames of `wire.framing`, with timeouts.

    Every method raises OSError (TimeoutError included) if the peer is gone or silent, and ProtocolError if the peer
    does not hold the key.
    """

    def __init__(self, sock: socket.socket, key: bytes, *, server: bool, timeout_s: float) -> None:
        self._socket = sock
        self._connection = Connection(key, server=server, max_frame_bytes=_MAX_FRAME_BYTES)
        self._bodies: collections.deque[bytes] = collections.deque()
        until = time.monotonic() + timeout_s
        sock.settimeout(timeout_s)
        sock.sendall(self._connection.start())
        while not self._connection.authenticated:
            self._read(until)

    def send(self, message: Any, timeout_s: float) -> None:
        self._socket.settimeout(timeout_s)
        self._socket.sendall(self._connection.send(json.dumps(message).encode()))

    def receive(self, timeout_s: float) -> Any:
        until = time.monotonic() + timeout_s
        while not self._bodies:
            self._read(until)
        return json.loads(self._bodies.popleft())

    def close(self) -> None:
        self._socket.close()

    def _read(self, until: float) -> None:
        self._socket.settimeout(max(until - time.monotonic(), 0.001))
        data = self._socket.recv(65536)
        if not data:
            raise ChannelClosedError("the connection was closed")
        bodies, reply = self._connection.receive(data)
        self._bodies += bodies
        if reply:
            self._socket.sendall(reply)


def _send_identity(listener: socket.socket, identity: str) -> None:
    """Send the probe's identity to every connection until the socket is closed.

    Without it, a connection to an address that another machine has too would look like success.
    """
    while True:
        try:
            connection, _ = listener.accept()
        except OSError:
            return
        with contextlib.suppress(OSError), connection:
            connection.settimeout(1.0)
            connection.sendall(identity.encode())


def try_connections(targets: list[list[Any]], timeout_s: float) -> list[dict[str, Any]]:
    """Connect to the identity servers of other probes, all at the same time.

    Args:
        targets: an address, a port and the expected identity for each.
        timeout_s: seconds for a connection.

    Returns:
        `{"ms": …}` or `{"error": …}` for each target.
    """
    results: list[dict[str, Any]] = [{} for _ in targets]

    def attempt(index: int) -> None:
        address, port, identity = targets[index]
        began = time.monotonic()
        try:
            with socket.create_connection((address, port), timeout_s) as connection:
                same = connection.recv(4096).decode(errors="replace") == identity
            results[index] = {"ms": _ms_since(began)} if same else {"error": "another machine answers there"}
        except Exception as error:
            results[index] = {"error": _describe(error)}

    threads = [
        threading.Thread(target=attempt, args=(index,), name="spark-elastic-doctor", daemon=True)
        for index in range(len(targets))
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout_s + 2.0)
    return [result or {"error": f"no answer within {timeout_s:.0f} s"} for result in results]


# --- storage ------------------------------------------------------------------------------------------


def write_file(url: str, options: dict[str, Any] | None, name: str, text: str) -> dict[str, Any]:
    """Write a small file. If that fails, the file system's own exception is raised."""
    began = time.monotonic()
    store = Store.create(url, options)
    store.write_bytes(name, text.encode(), durable=False)
    return {"ms": _ms_since(began), "free": _free_bytes(url) if store.is_local else None}


def read_files(url: str, options: dict[str, Any] | None, names: list[str], text: str) -> dict[str, Any]:
    """Check that each file exists and holds `text`; wait up to 3 s in total for files that are not there yet."""
    began = time.monotonic()
    store = Store.create(url, options)
    missing: dict[str, str] = {}
    for name in names:
        while problem := _problem_of(store, name, text):
            if time.monotonic() - began > _VISIBILITY_TIMEOUT_S:
                missing[name] = problem
                break
            time.sleep(0.1)
    return {"ms": _ms_since(began), "missing": missing}


def _problem_of(store: Store, name: str, text: str) -> str:
    """Return why a file cannot be read, or does not hold `text`; empty if it does."""
    try:
        return "" if store.read_bytes(name).decode() == text else "it holds something else"
    except Exception as error:
        return _describe(error)


def remove_folder(url: str, options: dict[str, Any] | None, folder: str) -> None:
    """Delete the doctor's folder as this machine sees it."""
    Store.create(url, options).delete(folder)


# --- torch, memory ------------------------------------------------------------------------------------

_TORCH = """
import json, torch, torch.distributed as dist
cuda = torch.cuda.is_available()
print("\\n" + json.dumps({
    "torch": torch.__version__,
    "gloo": bool(dist.is_available() and dist.is_gloo_available()),
    "cuda_build": torch.version.cuda,
    "gpus": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())] if cuda else [],
    "nccl": list(torch.cuda.nccl.version()) if cuda and dist.is_nccl_available() else None,
}))
"""


def import_torch(gpus: list[str], timeout_s: float) -> dict[str, Any]:
    """Import torch as a worker would, in a separate process because the import may crash or hang.

    Raises:
        RuntimeError: the import failed, or took longer than `timeout_s`.
    """
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(dict.fromkeys(path for path in sys.path if path))}
    if gpus:
        env["CUDA_VISIBLE_DEVICES"] = ",".join(gpus)
    command = [sys.executable, "-c", _TORCH]
    try:
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=timeout_s, errors="replace")
    except subprocess.TimeoutExpired:
        raise RuntimeError(f"`import torch` took longer than {timeout_s:.0f} s") from None
    if done.returncode != 0:
        raise RuntimeError((done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1][:500])
    facts: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return facts


class _MemoryFile:
    """Nameless memory that another process of the same user opens, as in `collective.shared_memory`."""

    def __init__(self) -> None:
        self._descriptor = -1

    def offer(self, text: str) -> dict[str, int]:
        self._descriptor = os.memfd_create("spark-elastic-doctor")
        os.write(self._descriptor, text.encode())
        return {"pid": os.getpid(), "descriptor": self._descriptor}

    def open(self, pid: int, descriptor: int, text: str) -> bool:
        path = f"/proc/{pid}/fd/{descriptor}"
        if "spark-elastic-doctor" not in os.readlink(path):
            raise RuntimeError(f"{path} is not the other process's memory: process {pid} is another one here")
        with open(path) as stream:
            if stream.read() != text:
                raise RuntimeError(f"{path} does not contain what the other process wrote to it")
        return True

    def close(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)


ANSWERS: Mapping[str, Callable[..., Any]] = {
    "clock": time.time,
    "connect": try_connections,
    "write": write_file,
    "read": read_files,
    "remove": remove_folder,
    "torch": import_torch,
}
"""The functions that answer the doctor's questions, by the name of the question."""


# --- facts --------------------------------------------------------------------------------------------


def installed_version(distribution: str) -> str | None:
    """Return the version of a distribution; None if it is not installed."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def _limit(name: str) -> int | None:
    """Return the soft limit; None if it is unlimited or unknown."""
    try:
        import resource

        soft = resource.getrlimit(getattr(resource, name))[0]
        return None if soft == resource.RLIM_INFINITY else int(soft)
    except (ImportError, AttributeError, OSError):
        return None


def _free_bytes(path: str) -> int | None:
    """Return the bytes free on the disk of `path`, which need not exist yet."""
    while path and not os.path.exists(path):
        path = os.path.dirname(path)
    try:
        return shutil.disk_usage(path or "/").free
    except OSError:
        return None


def _ms_since(began: float) -> float:
    return round((time.monotonic() - began) * 1000, 2)


def _describe(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0][:300]}" if lines else type(error).__name__
