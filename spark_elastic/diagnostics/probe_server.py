"""The doctor's side of its probes: the function of their Spark tasks, and the connections on which it asks them.

Executors may lack the package, so each task carries the sources of the modules that a probe needs (`SHIPPED`).
"""

from __future__ import annotations

import contextlib
import inspect
import socket
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from spark_elastic import clock, errors, redaction
from spark_elastic.data import store
from spark_elastic.diagnostics import probe
from spark_elastic.diagnostics.probe import JsonConnection, ProbeReport, start_thread
from spark_elastic.driver.admission import IDLE_S, OUT_OF_RESOURCES
from spark_elastic.errors import ChannelClosedError, ProtocolError
from spark_elastic.task import executor_process
from spark_elastic.wire import framing, interfaces, ports
from spark_elastic.wire.ports import ANY, Ports, listen

SHIPPED = (redaction, errors, framing, interfaces, ports, store, executor_process, probe)
"""Modules whose sources travel with the tasks; at their top they import the standard library and one another alone."""
_HANDSHAKE_S = 5.0
MAX_HANDSHAKES = 64
"""Connections whose handshake runs at a time; others wait in the listening socket's queue."""
Question = tuple[str, dict[str, Any]]


# --- connections --------------------------------------------------------------------------------------


@dataclass(eq=False)
class ConnectedProbe:
    """A probe that has connected and sent its report."""

    report: ProbeReport
    connection: JsonConnection
    lost: str = ""
    """The reason why it is not asked any more; empty while it answers."""
    lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def number(self) -> int:
        return int(self.report["number"])

    @property
    def name(self) -> str:
        return f"executor {self.report['executor']} on {self.report['host']}"

    @property
    def machine(self) -> tuple[str, str]:
        """The host name and the address that Spark uses; equal for probes on the same machine."""
        return self.report["hostname"], self.report["host"]

    def ask(self, name: str, arguments: dict[str, Any], timeout_s: float) -> Any:
        """Return the probe's answer to one question.

        Raises:
            OSError, ProtocolError: there is no answer, now or to an earlier question.
            RuntimeError: the question failed on the probe's machine.
        """
        with self.lock:
            if self.lost:
                raise ChannelClosedError(self.lost)
            try:
                self.connection.send((name, arguments), timeout_s)
                reply = self.connection.receive(timeout_s)
            except (OSError, ProtocolError, ValueError) as error:
                # never asked again: a late answer would be taken for the answer to the next question
                self.lost = f"no answer to {name!r}: {error}"
                raise
        if "error" in reply:
            raise RuntimeError(reply["error"])
        return reply["answer"]


class ProbeServer:
    """Accepts the connections of probes until `close`, and asks many probes at the same time.

    Args:
        bind: the address to listen at.
        key: the key that probes prove to have.
        ports: those of `driver_port`.

    Raises:
        PortsTakenError: all of them are in use.
    """

    def __init__(self, bind: str, key: bytes, ports: Ports = ANY) -> None:
        self._key = key
        self._changed = threading.Condition()
        self._probes: dict[int, ConnectedProbe] = {}
        self._closed = False
        self._greeting: dict[socket.socket, float] = {}
        """Connections in their handshake and when they were accepted; the oldest first."""
        self._listener = listen(bind, ports, "driver_port", backlog=256)
        self.port: int = self._listener.getsockname()[1]
        start_thread(self._accept)

    @property
    def probes(self) -> list[ConnectedProbe]:
        with self._changed:
            return [self._probes[number] for number in sorted(self._probes)]

    def wait_for(self, count: int, timeout_s: float, job_ended: threading.Event) -> int:
        """Wait until `count` probes are connected or the job has ended; return how many are connected."""
        until = clock.monotonic() + timeout_s
        with self._changed:
            while len(self._probes) < count and not job_ended.is_set() and (left := until - clock.monotonic()) > 0:
                self._changed.wait(min(left, 0.1))
            return len(self._probes)

    def ask(self, questions: Mapping[ConnectedProbe, Question], timeout_s: float) -> dict[ConnectedProbe, Any]:
        """Put a question to each probe, all at the same time; return the answers, or exceptions in their place."""
        answers: dict[ConnectedProbe, Any] = {}

        def ask(probe: ConnectedProbe, name: str, arguments: dict[str, Any]) -> None:
            try:
                answers[probe] = probe.ask(name, arguments, timeout_s)
            except Exception as error:
                answers[probe] = error

        threads = [start_thread(ask, probe, *question) for probe, question in questions.items()]
        until = clock.monotonic() + timeout_s + 1.0
        for thread in threads:
            thread.join(max(until - clock.monotonic(), 0.0))
        return {probe: answers.get(probe, ChannelClosedError("no answer")) for probe in questions}

    def close(self) -> None:
        """Tell all probes to end and close the port. May be called again."""
        with self._changed:
            self._closed = True
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # closing alone does not wake `accept`
        self._listener.close()
        for each in self.probes:
            with contextlib.suppress(OSError, ProtocolError):
                if not each.lost:
                    each.connection.send(("done", {}), 0.5)
            each.connection.close()

    def _accept(self) -> None:
        while not self._closed:
            self._make_room()
            try:
                sock = self._listener.accept()[0]
            except OSError as error:
                if error.errno not in OUT_OF_RESOURCES:
                    return
                with self._changed:
                    self._changed.wait(IDLE_S)
                continue
            with self._changed:
                self._greeting[sock] = clock.monotonic()
            start_thread(self._greet, sock)

    def _make_room(self) -> None:
        """Wait until there is room for one more handshake. Ends the oldest one if it has taken longer than `IDLE_S`."""
        with self._changed:
            while len(self._greeting) >= MAX_HANDSHAKES and not self._closed:
                oldest, since = next(iter(self._greeting.items()))
                left = since + IDLE_S - clock.monotonic()
                if left <= 0:
                    del self._greeting[oldest]
                    with contextlib.suppress(OSError):
                        oldest.shutdown(socket.SHUT_RDWR)  # wakes its thread, which closes it
                else:
                    self._changed.wait(left)

    def _greet(self, sock: socket.socket) -> None:
        try:
            connection = JsonConnection(sock, self._key, server=True, timeout_s=_HANDSHAKE_S)
            report = connection.receive(_HANDSHAKE_S)
        except (OSError, ProtocolError, ValueError):
            sock.close()
            return
        finally:
            with self._changed:
                self._greeting.pop(sock, None)
                self._changed.notify_all()
        with self._changed:
            if self._closed:
                connection.close()
                return
            self._probes[int(report["number"])] = ConnectedProbe(report, connection)
            self._changed.notify_all()


# --- the Spark task -----------------------------------------------------------------------------------


def probe_task(order: Mapping[str, Any], package: str) -> Callable[[Any], list[dict[str, Any]]]:
    """Return the function of the Spark tasks. It is pickled by value, so executors need no spark_elastic for it."""
    sources = {module.__name__: inspect.getsource(module) for module in SHIPPED}

    def task(rows: Any) -> list[dict[str, Any]]:
        import builtins
        import sys
        import types

        modules: dict[str, Any] = {}

        def import_shipped(name: str, *rest: Any) -> Any:
            """Replace `__import__` within the shipped modules, which leave nothing behind in `sys.modules`."""
            if name not in sources:
                return builtins.__import__(name, *rest)
            if name not in modules:
                module = modules[name] = types.ModuleType(f"doctor.{name}")
                vars(module)["__builtins__"] = {**vars(builtins), "__import__": import_shipped}
                sys.modules[module.__name__] = module  # dataclasses look up the module of a class there
                try:
                    exec(compile(sources[name], f"<{name}>", "exec"), vars(module))
                finally:
                    del sys.modules[module.__name__]
            return modules[name]

        shipped = import_shipped("spark_elastic.diagnostics.probe")
        return [shipped.serve(order, shipped.collect_facts(next(iter(rows)), package))]

    return task
