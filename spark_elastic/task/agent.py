"""The agent: the code in a Spark task that starts one worker process at a time, watches it and kills it.

Single-threaded, on its own event loop. It ends when the driver tells it to, when the channel to the driver breaks or
when the driver falls silent. In every case the worker process ends before the agent does.

The local launcher starts it as ``python -m spark_elastic.task.agent LAUNCHER_PID``, writes the pickled specification to
its stdin and reads the pickled outcome from its stdout.
"""

from __future__ import annotations

import asyncio
import dataclasses
import errno
import functools
import logging
import os
import pickle
import socket
import sys
from collections.abc import Iterable, Sequence

from spark_elastic import clock
from spark_elastic.membership.reasons import LossKind
from spark_elastic.membership.states import AgentOutcome
from spark_elastic.membership.topology import LaunchId, Place, SlotId, SlotReport, WorkerId
from spark_elastic.task.memory_kills import describe_kills, memory_kills
from spark_elastic.task.reaper import default_child_signal, open_pidfd
from spark_elastic.task.worker_process import WorkerProcess, worker_environment
from spark_elastic.wire import messages as wire
from spark_elastic.wire.channel import MessageStream, retry_pause_s
from spark_elastic.wire.interfaces import interface_addresses, is_ipv6
from spark_elastic.wire.ports import ANY, Ports, split_port, taken_in_words, with_port

logger = logging.getLogger("spark_elastic.task")

RELEASE_TIMEOUT_S = 2.0
"""Time for a worker whose function has returned to flush its output and exit."""
FIRST_TRY_S = 3.0
"""Time for a connection to one of several addresses of the driver; twice as long at each further attempt."""
PROBE_TIMEOUT_S = 2.0
"""Time for a connection to another agent's probe port."""
MAX_UNSENT_OUTPUT_BYTES = 4 * 2**20

_PROBE_BACKLOG = 64
_ACCEPTS_PER_TURN = 16
_ACCEPT_PAUSE_S = 0.1
"""Pause after `_ACCEPTS_PER_TURN` connections: a flood then costs little, and real probes wait in the queue."""
_BIND_ATTEMPTS = 20


class ProbePort:
    """A port, one of `ports`, where other agents find out which addresses of this host they can reach.

    Accepts connections and closes each at once, so none keeps a descriptor in use. Addresses that cannot be bound are
    left out. Used on the loop's thread only.
    """

    def __init__(self, addresses: Iterable[str], ports: Ports = ANY) -> None:
        addresses = list(dict.fromkeys(addresses))
        found = _bound(addresses, [0] * _BIND_ATTEMPTS if ports.are_any else ports.in_search_order())
        self._sockets = found or []
        self.ports_taken = found is None and not ports.are_any
        """No port of those to choose from is free."""
        self._paused: dict[socket.socket, asyncio.TimerHandle] = {}
        for sock in self._sockets:
            self._listen(sock)

    @property
    def port(self) -> int:
        """The port's number; 0 if no address could be bound."""
        return int(self._sockets[0].getsockname()[1]) if self._sockets else 0

    def close(self) -> None:
        for sock in self._sockets:
            asyncio.get_running_loop().remove_reader(sock)
            sock.close()
        for timer in self._paused.values():
            timer.cancel()
        self._sockets = []
        self._paused.clear()

    def _listen(self, sock: socket.socket) -> None:
        self._paused.pop(sock, None)
        asyncio.get_running_loop().add_reader(sock, self._accept, sock)

    def _accept(self, sock: socket.socket) -> None:
        for _ in range(_ACCEPTS_PER_TURN):
            try:
                connection, _ = sock.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:  # for example, no descriptor is left
                logger.debug("cannot accept a probe: %s", error)
                break
            connection.close()
        loop = asyncio.get_running_loop()
        loop.remove_reader(sock)
        self._paused[sock] = loop.call_later(_ACCEPT_PAUSE_S, self._listen, sock)


def _bound(addresses: list[str], ports: Iterable[int]) -> list[socket.socket] | None:
    """Return sockets that listen on the same port of as many of the addresses as possible; None if all are taken."""
    for port in ports:
        sockets: list[socket.socket] = []
        taken = False
        for address in addresses:
            family = socket.AF_INET6 if is_ipv6(address) else socket.AF_INET
            at = address, sockets[0].getsockname()[1] if sockets else port
            try:
                sock = socket.create_server(at, family=family, backlog=_PROBE_BACKLOG)
                sock.setblocking(False)
            except OSError as error:
                taken = error.errno == errno.EADDRINUSE
                if taken:
                    break
                logger.debug("cannot listen for probes on %s: %s", address, error)
            else:
                sockets.append(sock)
        if not taken:
            return sockets
        for sock in sockets:
            sock.close()
    return None


def run_agent(
    spec: wire.LaunchSpec, slot: SlotId, launch: LaunchId, report: SlotReport, guardians: Sequence[int] = ()
) -> AgentOutcome:
    """Run one agent to its end, on the calling (main) thread.

    A failure of the job is an outcome, not an exception: Spark would run a failed task again without the driver. The
    agent ends with its first guardian, the executor's JVM; a fork server ends with all of them, see `ForkServer`.
    """
    with default_child_signal():
        return asyncio.run(TaskAgent(spec, slot, launch, report, guardians).run())


@dataclasses.dataclass(eq=False)
class TaskAgent:
    _spec: wire.LaunchSpec
    _slot: SlotId
    _launch: LaunchId
    _report: SlotReport
    _guardians: Sequence[int]

    def __post_init__(self) -> None:
        report = self._report
        self._env = worker_environment(self._spec, dict(os.environ), sys.path, report.cores, report.accelerators)
        self._stream: MessageStream | None = None
        self._process: WorkerProcess | None = None
        self._running: set[WorkerProcess] = set()
        """The current process, and killed ones that have not been reaped yet."""
        self._all_gone = asyncio.Event()
        """Set while `_running` is empty."""
        self._all_gone.set()
        self._finish: wire.FinishAgent | None = None
        """Why and how the agent has to end; None while it runs."""
        self._kind = LossKind.REPORTED
        """The kind of cause that `_finish` is, for the agent's outcome."""
        self._ends_with_guardian = False
        """The executor's JVM has ended: workers die because the agent kills them, and Spark reports why."""
        self._over = asyncio.Event()
        """Set together with `_finish`."""
        self._silence_limit_s = float("inf")
        self._last_heard = clock.monotonic()
        self._probes: set[asyncio.Task[None]] = set()
        self._addresses = report.addresses
        """The addresses of this host's interfaces, as the driver was told last."""
        self._fetched = bytearray()
        """The function, as far as it has arrived, if it is fetched from the driver."""
        self._waits_for_function: WorkerId | None = None
        """The worker that is to run the function as soon as it has arrived."""

    async def run(self) -> AgentOutcome:
        guardian_fd = self._watch_guardian()
        self._probe_port = self._new_probe_port()
        try:
            self._start_process()
            await self._connect()
            ports = Ports(*self._spec.agent_ports)
            taken = taken_in_words(ports, "agent_ports", f"on host {self._report.host}")
            self._send(
                wire.AgentHello(
                    place=Place(self._report.host, self._report.executor, self._slot),
                    launch=self._launch,
                    addresses=self._addresses,
                    probe_port=self._probe_port.port,
                    ports_taken=taken if self._probe_port.ports_taken else "",
                )
            )
            await self._over.wait()
            return await self._end()
        finally:
            if guardian_fd >= 0:
                asyncio.get_running_loop().remove_reader(guardian_fd)
                os.close(guardian_fd)
            self._probe_port.close()
            for probe in self._probes:
                probe.cancel()
            for process in self._running:
                process.kill()
            await self._all_gone.wait()
            if self._stream is not None:
                self._stream.close()

    def _new_probe_port(self) -> ProbePort:
        nics = self._spec.nics
        allowed = [own for name, own in self._addresses.items() if nics is None or name in nics]
        return ProbePort((address for own in allowed for address in own), Ports(*self._spec.agent_ports))

    def _watch_guardian(self) -> int:
        """Return a descriptor that becomes readable when the guardian ends; -1 if it cannot be watched."""

        def ended() -> None:
            self._ends_with_guardian = True
            self._finish_because("the executor's JVM is gone")

        descriptor = open_pidfd(self._guardians[0]) if self._guardians else -1
        if descriptor >= 0:
            asyncio.get_running_loop().add_reader(descriptor, ended)
        return descriptor

    async def _connect(self) -> None:
        """Connect to the driver, retrying until the timeout; end the agent if that fails."""
        loop = asyncio.get_running_loop()
        deadline = clock.monotonic() + self._spec.connect_timeout_s
        failures: dict[tuple[str, int], str] = {}
        addresses, patience_s = self._spec.driver_addresses, FIRST_TRY_S
        while True:
            for number, (host, port) in enumerate(addresses):
                share = max((deadline - clock.monotonic()) / (len(addresses) - number), 0.1)
                if len(addresses) > 1:  # an address that swallows packets must not delay the others
                    share = min(share, patience_s)
                opened: asyncio.Future[bool] = loop.create_future()
                try:
                    await asyncio.wait_for(
                        loop.create_connection(functools.partial(self._new_stream, opened), host, port), share
                    )
                    authenticated = await asyncio.wait_for(opened, share)
                except (OSError, asyncio.TimeoutError) as error:
                    stream, self._stream = self._stream, None
                    if stream is not None:
                        stream.abort("no answer in time")
                    failures[host, port] = f"{with_port(host, port)}: {error or 'no answer'}"
                    continue
                if authenticated:
                    reached = ((host, port), *(each for each in addresses if each != (host, port)))
                    self._spec = dataclasses.replace(self._spec, driver_addresses=reached)
                    return
                failures[host, port] = f"{with_port(host, port)}: it closed the connection during the handshake"
            if clock.monotonic() >= deadline or self._over.is_set():
                break
            patience_s *= 2
            await asyncio.sleep(retry_pause_s())
        why = f"cannot reach the driver from {self._report.host}: {'; '.join(failures.values())}"
        self._finish_because(why, LossKind.UNREACHABLE)

    def _on_closed(self, stream: MessageStream, why: str) -> None:
        if stream is self._stream:  # not that of an attempt that was given up
            self._finish_because(f"the channel to the driver is gone: {why}", LossKind.UNEXPLAINED)

    def _new_stream(self, opened: asyncio.Future[bool]) -> MessageStream:
        """Return the stream of a connection; `opened` gets True if the driver is authenticated, else False."""

        def answer(authenticated: bool) -> None:
            if not opened.done():
                opened.set_result(authenticated)

        self._stream = MessageStream(
            self._spec.key,
            server=False,
            encrypt=self._spec.encrypt,
            on_open=lambda stream: answer(True),
            on_message=self._on_message,
            on_closed=self._on_closed,
            on_unauthenticated=lambda stream: answer(False),
        )
        return self._stream

    def _finish_because(self, why: str, kind: LossKind = LossKind.REPORTED) -> None:
        if self._finish is None:
            self._finish, self._kind = wire.FinishAgent(keep_result=False, why=why), kind
            self._over.set()

    async def _end(self) -> AgentOutcome:
        assert self._finish is not None
        process = self._process
        if process is None or not self._finish.keep_result or process.result is None:
            return AgentOutcome(None, None, self._finish.why, self._kind)
        process.release()
        try:
            await asyncio.wait_for(self._all_gone.wait(), RELEASE_TIMEOUT_S)
        except asyncio.TimeoutError:
            logger.warning("worker %s did not exit within %.0f s of its end", process.worker, RELEASE_TIMEOUT_S)
        return AgentOutcome(process.worker, process.result, self._finish.why)

    # --- messages from the driver --------------------------------------------------------------------------

    def _on_message(self, stream: MessageStream, message: wire.Message) -> None:
        self._last_heard = clock.monotonic()
        match message:
            case wire.Welcome(interval_s, silence_limit_s):
                self._silence_limit_s = silence_limit_s
                stream.set_unacknowledged_timeout(silence_limit_s)
                self._send_heartbeat(interval_s)
                if self._spec.fetched_bytes:
                    self._send(wire.FunctionWanted(0))
            case wire.FunctionPart(start, part):
                self._receive_function(start, part)
            case wire.StartWorkerProcess(worker):
                if self._process is None or self._process.worker is not None or not self._process.is_running:
                    self._start_process()
                if self._spec.fetched_bytes:
                    self._waits_for_function = worker
                else:
                    self._assign(worker)
            case wire.StopWorkerProcess(worker):
                if self._waits_for_function == worker:
                    self._waits_for_function = None
                if self._process is not None and self._process.worker == worker:
                    self._process.kill()
            case wire.ProbePeers(peers):
                task = asyncio.get_running_loop().create_task(self._probe(peers))
                self._probes.add(task)
                task.add_done_callback(self._probes.discard)
            case wire.FinishAgent():
                if self._finish is None:
                    self._finish = message
                    self._over.set()

    def _receive_function(self, start: int, part: bytes) -> None:
        """Add a part of the function, and ask for the next one. With the last one, the worker that waits gets it."""
        if start != len(self._fetched) or not part:
            self._finish_because(f"the driver sent no part of the function at byte {len(self._fetched)}")
            return
        self._fetched += part
        if len(self._fetched) < self._spec.fetched_bytes:
            self._send(wire.FunctionWanted(len(self._fetched)))
            return
        self._spec = dataclasses.replace(self._spec, function=bytes(self._fetched), fetched_bytes=0)
        self._fetched = bytearray()
        if self._waits_for_function is not None:
            self._assign(self._waits_for_function)
            self._waits_for_function = None

    def _assign(self, worker: WorkerId) -> None:
        assert self._process is not None
        self._process.assign(worker, self._spec)

    def _send_heartbeat(self, interval_s: float) -> None:
        if self._finish is not None:
            return
        silence = clock.monotonic() - self._last_heard
        if silence > self._silence_limit_s:
            self._finish_because(f"the driver was silent for {silence:.0f} s, longer than elastic_timeout")
            return
        process = self._process
        self._send(wire.AgentHeartbeat(process.worker if process is not None and process.is_seen_running else None))
        self._look_at_interfaces()
        asyncio.get_running_loop().call_later(interval_s, self._send_heartbeat, interval_s)

    def _look_at_interfaces(self) -> None:
        """Tell the driver if the interfaces of this host are others than it knows: a tunnel, say, is down."""
        addresses = interface_addresses()
        if addresses == self._addresses:
            return
        self._addresses = addresses
        self._probe_port.close()
        self._probe_port = self._new_probe_port()
        self._send(wire.InterfacesChanged(addresses, self._probe_port.port))

    async def _probe(self, peers: tuple[str, ...]) -> None:
        async def reachable(peer: str) -> bool:
            try:
                _, writer = await asyncio.wait_for(asyncio.open_connection(*split_port(peer)), PROBE_TIMEOUT_S)
            except (OSError, ValueError, asyncio.TimeoutError):
                return False
            writer.close()
            return True

        answers = await asyncio.gather(*(reachable(peer) for peer in peers))
        self._send(wire.PeersReachable(peers, tuple(peer for peer, yes in zip(peers, answers, strict=True) if yes)))

    def _send(self, message: wire.Message) -> None:
        if self._stream is not None:
            self._stream.send(message)

    # --- the worker process ---------------------------------------------------------------------------

    def _start_process(self) -> None:
        self._process = WorkerProcess(self._spec, self._env, self, self._guardians)
        self._running.add(self._process)
        self._all_gone.clear()

    def output(self, process: WorkerProcess, stream: str, lines: tuple[str, ...]) -> None:
        self._send(wire.OutputLines(-1 if process.worker is None else process.worker, stream, lines))

    def output_may_flow(self) -> bool:
        """Return False while there is too much unsent data; the worker's prints then block in its pipe."""
        return self._stream is None or self._stream.unsent_bytes < MAX_UNSENT_OUTPUT_BYTES

    def result_stored(self, process: WorkerProcess) -> None:
        if process.worker is not None and process.result is not None:
            self._send(wire.ResultStored(process.worker, process.has_loop, process.run))

    def dying(self, process: WorkerProcess, exit_code: int | None) -> None:
        """Report that the process dies, up to 50 ms before `exited`; None: its exit code is not known yet."""
        if process.worker is not None:
            self._send(wire.WorkerDying(process.worker, None if self._ends_with_guardian else exit_code))

    def exited(self, process: WorkerProcess, exit_code: int) -> None:
        """Report that the process has ended, after its pipes have been read to the end."""
        self._running.discard(process)
        if not self._running:
            self._all_gone.set()
        if process.worker is not None:
            before, now = process.memory_before, memory_kills()
            kills, _ = now.since(before)
            if self._ends_with_guardian and not kills:
                return
            tail, memory = process.stderr_tail, describe_kills(before, now)
            if self._spec.restarts_world and exit_code == 0 and process.result is None:  # it called os._exit(0)
                process.result, process.run = pickle.dumps(None), 1
                self.result_stored(process)
            self._send(wire.WorkerExited(process.worker, exit_code, tail, kills, memory))
            is_next = process is self._process and process.result is None
            if is_next and self._spec.restarts_world and self._finish is None:
                self._start_process()  # all start again: it imports while its slot cools down


def main() -> None:
    from spark_elastic.task.main import die_with_parent  # here: an agent in a Spark task needs nothing of the worker

    launcher = int(sys.argv[1])
    die_with_parent(launcher)
    spec, slot, host, cores = pickle.load(sys.stdin.buffer)
    out = sys.stdout.buffer
    sys.stdout = sys.stderr  # stdout carries the outcome alone
    report = SlotReport(host, f"local-{slot}", interface_addresses(), cores, ())
    pickle.dump(run_agent(spec, slot, 0, report, [launcher]), out)
    out.flush()


if __name__ == "__main__":
    main()
