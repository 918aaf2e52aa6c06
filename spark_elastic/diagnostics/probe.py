"""What looks around on an executor: runs in a Spark task, tells what it finds, and does what the doctor asks.

Standard library only, and no import of the package at the top: this source travels to executors that may not have it.
Nothing here raises: a task that fails would be run again by Spark.
"""

from __future__ import annotations

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
from collections.abc import Callable
from importlib import metadata
from typing import Any

PACKAGES = ("torch", "numpy", "cloudpickle", "pyspark", "pandas", "pyarrow", "tensorflow", "tensorflow-cpu", "keras")
CONNECT_TIMEOUT_S = 5.0
_NOT_VISIBLE_YET_S = 3.0
"""How long a file that another machine has written may take to be seen: network file systems remember for a while that
there was none."""


def look_around(
    number: int, *, addresses: dict[str, str], executor: str, host: str | None, package: str
) -> dict[str, Any]:
    """What can be told at once. Takes milliseconds, but for the import of the package."""
    found: dict[str, Any] = {
        "number": number,
        "executor": executor,
        "host": host or socket.gethostname(),
        "hostname": socket.gethostname(),
        "pid": os.getpid(),
        "uid": os.getuid() if hasattr(os, "getuid") else None,
        "python": platform.python_version(),
        "executable": sys.executable,
        "system": f"{platform.system()} {platform.machine()}",
        "addresses": addresses,
        "packages": {name: version for name in PACKAGES if (version := _version(name))},
        "start_method": multiprocessing.get_start_method(allow_none=True) or multiprocessing.get_all_start_methods()[0],
        "descriptors": _limit("RLIMIT_NOFILE"),
        "processes": _limit("RLIMIT_NPROC"),
        "temporary": {"path": tempfile.gettempdir(), "free": _free(tempfile.gettempdir())},
        "nvidia_devices": len(glob.glob("/dev/nvidia[0-9]*")),
        "cores": 1,
        "gpus": [],
    }
    try:
        found["package"] = __import__(package).__version__
    except Exception as error:
        found["package"] = None
        found["package_error"] = _said(error)
    context = _task_context()
    if context is not None:
        found["cores"] = int(context.cpus())
        gpus = context.resources().get("gpu")
        found["gpus"] = [str(address) for address in gpus.addresses] if gpus is not None else []
    return found


def serve(order: dict[str, Any], report: dict[str, Any], open_line: Callable[..., Any]) -> dict[str, Any]:
    """Report to the doctor and answer its questions until it has no more, or the time is over.

    order: addresses: of the doctor; key; seconds: how long all may take; connect_s: for one address.
    Returns: the report, with what became of each attempt to reach the doctor.
    """
    until = time.monotonic() + order["seconds"]
    doorbell = _Doorbell(f"{report['executor']}/{report['number']}/{report['pid']}")
    report["port"], report["identity"] = doorbell.port, doorbell.identity
    report["attempts"] = []
    try:
        for host, port in order["addresses"]:
            began = time.monotonic()
            try:
                connection = socket.create_connection((host, port), order["connect_s"])
                line = open_line(connection, order["key"], server=False, timeout_s=order["connect_s"])
            except Exception as error:
                report["attempts"].append({"to": f"{host}:{port}", "error": _said(error)})
                continue
            report["attempts"].append({"to": f"{host}:{port}", "ms": _ms(began)})
            _answer(line, report, until)
            break
    finally:
        doorbell.close()
    return report


def _answer(line: Any, report: dict[str, Any], until: float) -> None:
    memory = _Memory()
    questions: dict[str, Callable[..., Any]] = {
        "clock": time.time,
        "connect": connect,
        "write": write,
        "read": read,
        "remove": remove,
        "torch": torch_in_a_process,
        "offer memory": memory.offer,
        "open memory": memory.open,
    }
    try:
        line.send(report, CONNECT_TIMEOUT_S)
        while (left := until - time.monotonic()) > 0:
            name, arguments = line.receive(left)
            if name == "done":
                return
            try:
                answer = {"is": questions[name](**arguments)}
            except Exception as error:
                answer = {"error": _said(error)}
            line.send(answer, max(until - time.monotonic(), 0.1))
    except Exception:  # the doctor is gone, or its time is over
        return
    finally:
        memory.close()
        line.close()


# --- connections --------------------------------------------------------------------------------------


class _Doorbell:
    """Says who is here to everybody who connects, on all interfaces: the same address may be another machine's too."""

    def __init__(self, identity: str) -> None:
        self.identity = f"{socket.gethostname()}/{identity}/{os.urandom(8).hex()}"
        self._socket = socket.create_server(("0.0.0.0", 0), backlog=64)
        self.port = self._socket.getsockname()[1]
        threading.Thread(target=self._serve, name="spark-elastic-doorbell", daemon=True).start()

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self._socket.accept()
            except OSError:
                return
            try:
                with connection:
                    connection.settimeout(1.0)
                    connection.sendall(self.identity.encode())
            except OSError:
                continue

    def close(self) -> None:
        self._socket.close()


def connect(targets: list[list[Any]], timeout_s: float) -> list[dict[str, Any]]:
    """Try all doorbells at the same time. targets: [address, port, identity]."""
    results: list[dict[str, Any]] = [{} for _ in targets]

    def attempt(at: int) -> None:
        address, port, identity = targets[at]
        began = time.monotonic()
        try:
            with socket.create_connection((address, port), timeout_s) as connection:
                said = connection.recv(4096).decode(errors="replace")
            other = said != identity
            results[at] = {"error": "somebody else answers there"} if other else {"ms": _ms(began)}
        except Exception as error:
            results[at] = {"error": _said(error)}

    threads = [
        threading.Thread(target=attempt, args=(at,), name="spark-elastic-doctor", daemon=True)
        for at in range(len(targets))
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout_s + 2.0)
    return [result or {"error": f"no answer within {timeout_s:.0f} s"} for result in results]


# --- storage ------------------------------------------------------------------------------------------


def write(url: str, options: dict[str, Any] | None, name: str, text: str) -> dict[str, Any]:
    """A small file. Raises: whatever the file system has against it."""
    began = time.monotonic()
    store = _store(url, options)
    if store is None:
        os.makedirs(os.path.dirname(os.path.join(url, name)), exist_ok=True)
        with open(os.path.join(url, name), "w") as stream:
            stream.write(text)
    else:
        store.write_bytes(name, text.encode())
    return {"ms": _ms(began), "free": _free(url) if store is None or store.is_local else None}


def read(url: str, options: dict[str, Any] | None, names: list[str], text: str) -> dict[str, Any]:
    """Whether the files of the others are there, with what they are to hold. Waits a while for each."""
    began = time.monotonic()
    store = _store(url, options)
    missing: dict[str, str] = {}
    for name in names:
        while True:
            try:
                if store is None:
                    with open(os.path.join(url, name)) as stream:
                        held = stream.read()
                else:
                    held = store.read_bytes(name).decode()
                why = "" if held == text else "it holds something else"
            except Exception as error:
                why = _said(error)
            if not why or time.monotonic() - began > _NOT_VISIBLE_YET_S:
                break
            time.sleep(0.1)
        if why:
            missing[name] = why
    return {"ms": _ms(began), "missing": missing}


def remove(url: str, options: dict[str, Any] | None, folder: str) -> None:
    """The folder of a checkup, as this machine sees it."""
    store = _store(url, options)
    if store is None:
        shutil.rmtree(os.path.join(url, folder), ignore_errors=True)
    else:
        store.delete(folder)


def _store(url: str, options: dict[str, Any] | None) -> Any:
    """None: a plain folder, which needs no package."""
    if "://" not in url and not url.startswith(("dbfs:", "file:")):
        return None
    from spark_elastic.data.store import Store

    return Store.create(url, options)


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


def torch_in_a_process(gpus: list[str], timeout_s: float) -> dict[str, Any]:
    """Import torch as a worker would, in a process of its own: it may crash, or hang. Raises: RuntimeError."""
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(dict.fromkeys(path for path in sys.path if path))}
    if gpus:
        env["CUDA_VISIBLE_DEVICES"] = ",".join(gpus)
    words = [sys.executable, "-c", _TORCH]
    try:
        done = subprocess.run(words, env=env, capture_output=True, text=True, timeout=timeout_s, errors="replace")
    except subprocess.TimeoutExpired:
        raise RuntimeError(f"`import torch` took longer than {timeout_s:.0f} s") from None
    if done.returncode != 0:
        raise RuntimeError((done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1][:500])
    answer: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return answer


class _Memory:
    """Memory without a name that another process of the same user opens, as `collective.segment` does."""

    def __init__(self) -> None:
        self._descriptor = -1

    def offer(self, text: str) -> dict[str, int]:
        self._descriptor = os.memfd_create("spark-elastic-doctor")
        os.write(self._descriptor, text.encode())
        return {"pid": os.getpid(), "descriptor": self._descriptor}

    def open(self, pid: int, descriptor: int, text: str) -> bool:
        path = f"/proc/{pid}/fd/{descriptor}"
        if "spark-elastic-doctor" not in os.readlink(path):
            raise RuntimeError(f"process {pid} is another one here")
        with open(path) as stream:
            if stream.read() != text:
                raise RuntimeError(f"process {pid} holds something else there")
        return True

    def close(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)


# --- small facts --------------------------------------------------------------------------------------


def _task_context() -> Any:
    try:
        from pyspark import TaskContext
    except ImportError:
        return None
    return TaskContext.get()


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _limit(name: str) -> int | None:
    """The soft limit; None: there is none."""
    try:
        import resource

        soft = resource.getrlimit(getattr(resource, name))[0]
        return None if soft == resource.RLIM_INFINITY else int(soft)
    except (ImportError, AttributeError, OSError):
        return None


def _free(path: str) -> int | None:
    """Bytes free where this path is, or would be made."""
    while path and not os.path.exists(path):
        path = os.path.dirname(path)
    try:
        return shutil.disk_usage(path or "/").free
    except OSError:
        return None


def _ms(began: float) -> float:
    return round((time.monotonic() - began) * 1000, 2)


def _said(error: BaseException) -> str:
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0][:300]}" if text else type(error).__name__
