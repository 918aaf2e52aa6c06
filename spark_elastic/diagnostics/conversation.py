"""The doctor's end of the lines to its probes: listens, counts who has come, asks many at the same time."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from spark_elastic import clock
from spark_elastic.diagnostics.line import Line, LineError

_HANDSHAKE_S = 5.0
Question = tuple[str, dict[str, Any]]


@dataclass(eq=False)
class Probe:
    """A probe that has reported. `report` is `probe.look_around`'s; peer: the address that it came from."""

    report: dict[str, Any]
    line: Line
    peer: str
    lost: str = ""
    lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def number(self) -> int:
        return int(self.report["number"])

    @property
    def name(self) -> str:
        return f"executor {self.report['executor']} on {self.report['host']}"

    def ask(self, name: str, arguments: dict[str, Any], timeout_s: float) -> Any:
        """Raises: OSError, LineError: no answer. RuntimeError: what went wrong over there."""
        with self.lock:
            if self.lost:
                raise LineError(self.lost)
            try:
                self.line.send((name, arguments), timeout_s)
                answer = self.line.receive(timeout_s)
            except (OSError, LineError, ValueError) as error:
                # for good: an answer that comes late would be taken for that to another question
                self.lost = f"no answer to {name!r}: {error}"
                raise
        if "error" in answer:
            raise RuntimeError(answer["error"])
        return answer["is"]


class Conversation:
    """Lines to probes, from the moment they connect until `close`."""

    def __init__(self, bind: str, key: bytes) -> None:
        self._key = key
        self._changed = threading.Condition()
        self._probes: dict[int, Probe] = {}
        self._closed = False
        self._listening = socket.create_server((bind, 0), backlog=256)
        self.port: int = self._listening.getsockname()[1]
        threading.Thread(target=self._accept, name="spark_elastic-doctor", daemon=True).start()

    @property
    def probes(self) -> list[Probe]:
        with self._changed:
            return [self._probes[number] for number in sorted(self._probes)]

    def wait_for(self, count: int, timeout_s: float, over: threading.Event) -> int:
        """Until so many have come, or `over` is set. Returns: how many have."""
        until = clock.monotonic() + timeout_s
        with self._changed:
            while len(self._probes) < count and not over.is_set() and (left := until - clock.monotonic()) > 0:
                self._changed.wait(min(left, 0.1))
            return len(self._probes)

    def ask(self, questions: Mapping[Probe, Question], timeout_s: float) -> dict[Probe, Any]:
        """Ask each its own question, all at the same time. Returns: the answers, or the exceptions in their place."""
        answers: dict[Probe, Any] = {}

        def ask(probe: Probe, name: str, arguments: dict[str, Any]) -> None:
            try:
                answers[probe] = probe.ask(name, arguments, timeout_s)
            except Exception as error:
                answers[probe] = error

        threads = [
            threading.Thread(target=ask, args=(probe, *question), name="spark_elastic-doctor", daemon=True)
            for probe, question in questions.items()
        ]
        for thread in threads:
            thread.start()
        until = clock.monotonic() + timeout_s + 1.0
        for thread in threads:
            thread.join(max(until - clock.monotonic(), 0.0))
        return {probe: answers.get(probe, LineError("no answer")) for probe in questions}

    def ask_all(self, probes: Sequence[Probe], name: str, timeout_s: float, **arguments: Any) -> dict[Probe, Any]:
        return self.ask(dict.fromkeys(probes, (name, arguments)), timeout_s)

    def close(self) -> None:
        """Let all probes go; harmless to repeat."""
        with self._changed:
            self._closed = True
        with contextlib.suppress(OSError):
            self._listening.shutdown(socket.SHUT_RDWR)  # closing alone does not wake `accept`
        self._listening.close()
        for probe in self.probes:
            with contextlib.suppress(OSError, LineError):
                if not probe.lost:
                    probe.line.send(("done", {}), 0.5)
            probe.line.close()

    def _accept(self) -> None:
        while True:
            try:
                connection, peer = self._listening.accept()
            except OSError:
                return
            threading.Thread(
                target=self._greet, args=(connection, peer[0]), name="spark_elastic-doctor", daemon=True
            ).start()

    def _greet(self, connection: socket.socket, peer: str) -> None:
        try:
            line = Line(connection, self._key, server=True, timeout_s=_HANDSHAKE_S)
            report = line.receive(_HANDSHAKE_S)
        except (OSError, LineError, ValueError):
            connection.close()
            return
        with self._changed:
            if self._closed:
                line.close()
                return
            probe = Probe(report, line, peer)
            self._probes[probe.number] = probe
            self._changed.notify_all()
