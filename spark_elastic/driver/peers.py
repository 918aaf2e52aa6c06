"""Peers: the driver's conversation with the agents and workers of a job.

Messages from them become events of the membership machine; its commands become messages to them. Runs on the driver's
event loop, like the `RendezvousServer` below it.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Protocol

from spark_elastic import clock
from spark_elastic.driver.addresses import AddressBook
from spark_elastic.driver.expected_lines import ExpectedLines
from spark_elastic.driver.output import OutputPrinter
from spark_elastic.driver.rendezvous_server import RendezvousServer
from spark_elastic.driver.results import LoopResults
from spark_elastic.errors import PortsTakenError, SparkElasticError, UnknownInterfaceError
from spark_elastic.membership import commands as do
from spark_elastic.membership import events as seen
from spark_elastic.membership.launcher import Launcher
from spark_elastic.membership.reasons import LossCause, LossKind, change_in_words, loss_in_words, reported
from spark_elastic.membership.topology import AgentId, SlotId, WorkerId, World
from spark_elastic.reporting.announcer import Announcer
from spark_elastic.reporting.event_log import MembershipChange
from spark_elastic.reporting.history import Row
from spark_elastic.settings import ElasticSettings
from spark_elastic.wire import messages as wire
from spark_elastic.wire.messages import LaunchSpec

logger = logging.getLogger(__name__)

LAST_WORDS_S = 5.0  # seconds for which messages of a worker are still read after its process has ended


class JobObserver(Protocol):
    """A receiver of a job's epochs and changes, on the job's thread: `jobs.driver_callbacks.CallbackSession`."""

    def epoch_ended(self, row: Row, answer: Callable[[str], None] | None) -> None:
        """Take an epoch's row, maybe again; call `answer`, in any thread, with "" or a reason to end training."""

    def membership_changed(self, change: MembershipChange) -> None:
        """Take a change of the workers, once it is announced."""

    def job_over(self) -> None:
        """Learn that nothing comes any more."""


@dataclass(eq=False)
class Peers:
    """The agents and workers that are connected to the driver."""

    spec: LaunchSpec
    settings: ElasticSettings
    launcher: Launcher
    announcer: Announcer
    printer: OutputPrinter
    handle: Callable[[seen.Event], None]  # called with each event for the membership machine
    fail: Callable[[SparkElasticError], None]  # called with an error that ends the job
    observer: JobObserver | None = None

    def __post_init__(self) -> None:
        self.server = RendezvousServer(self.spec.key, self, self.settings, encrypt=self.spec.encrypt)
        self.agents: set[AgentId] = set()  # agents that are connected and usable
        self._slot_of: dict[AgentId, SlotId] = {}  # slots of all connected agents, also of those that were sent away
        self._agent_of: dict[WorkerId, AgentId] = {}  # agents of the workers that were started and are not gone
        #: The filters of the workers' stderr.
        self._shown: defaultdict[WorkerId, ExpectedLines] = defaultdict(ExpectedLines)
        self._addresses = AddressBook(self.spec.nics)
        self._listens: dict[AgentId, str] = {}  # the address at which each agent's worker listens in the newest world
        self._without_interface: set[SlotId] = set()  # slots whose last agent had no usable interface
        self._loop_results = LoopResults()
        self.world: World | None = None  # the newest world; None before the first
        self._ending = False  # true once the job is over: agents that still come are sent away

    def slots(self) -> set[SlotId]:
        """Return the slots that have a usable agent."""
        return {self._slot_of[agent] for agent in self.agents}

    def slots_of(self, workers: Iterable[WorkerId]) -> dict[SlotId, WorkerId]:
        """Return the slots in which these workers run."""
        return {self._slot_of[self._agent_of[w]]: w for w in workers if w in self._agent_of}

    def finish(self, *, keep_results: bool, why: str) -> None:
        """Tell all agents that the job is over. With `keep_results` they deliver their workers' results first."""
        self._ending = True
        for agent in self.agents:
            self.server.to_agent(agent, wire.FinishAgent(keep_results, why))

    def send(self, command: do.Command) -> None:
        """Send the messages that carry out a command of the membership machine."""
        match command:
            case do.StartWorker(agent, worker):
                self._agent_of[worker] = agent
                self.server.to_agent(agent, wire.StartWorkerProcess(worker))
            case do.StopWorker(agent, worker, cause):
                why = loss_in_words(cause)
                self.server.to_agent(agent, wire.StopWorkerProcess(worker, why))
                self.server.drop_worker(worker, why)
            case do.AdmitProvisionally(worker, rank, size, loop):
                for result in self._loop_results.for_newcomer(worker, loop):
                    self.server.to_worker(worker, result)
                self.server.to_worker(worker, wire.Provisional(rank, size, loop))
            case do.PublishWorld(world):
                self._publish(world)
            case do.NotifyHostsUpdated(workers, sequence):
                self.server.to_workers(workers, wire.HostsUpdated(sequence))
            case do.CutPeers(workers, round, change):
                self.server.to_workers(workers, wire.Cut(round, change_in_words(change)))
            case do.RerunFunction(worker, run, change):
                self.server.to_worker(worker, wire.RunAgain(run, change_in_words(change)))
            case do.DismissAgent(agent, cause):
                self.server.to_agent(agent, wire.FinishAgent(False, loss_in_words(cause)))
            case do.TryConnections():
                self._probe(self._addresses.probe_again())
            case _:
                raise TypeError(f"{type(command).__name__} is not a message to an agent or a worker")

    def _publish(self, world: World) -> None:
        self.world = world
        self._loop_results.joined(world.workers)
        self._listens = self._addresses.choose([self._agent_of[member.worker] for member in world.members])
        self.server.publish(wire.WorldAssigned(world, tuple(self._listens.values())))

    def agent_joined(self, agent: AgentId, hello: wire.AgentHello, address: str) -> None:
        """Handle a new agent. `address` is the agent's own address on this connection."""
        slot = self._slot_of[agent] = hello.place.slot
        if not self._ending and not self.launcher.admit(slot, hello.launch):
            self.server.to_agent(agent, wire.FinishAgent(False, "its launch is over"))
            return  # the machine does not know it: its messages until it has gone have no effect
        self.agents.add(agent)
        if self._ending:
            self.server.to_agent(agent, wire.FinishAgent(False, "the job is over"))
            return
        self.launcher.agent_present(slot, True)
        try:
            self._addresses.joined(agent, hello, address)
        except (UnknownInterfaceError, PortsTakenError) as error:
            self._without_interface.add(slot)
            usable = self.settings.max_num_proc - len(self._without_interface)
            if self.world is None and usable < self.settings.min_num_proc:
                self.fail(error)
            else:
                self._send_away(agent, error)
            return
        self._without_interface.discard(slot)
        self._probe(self._addresses.probes_for(agent))
        self.handle(seen.AgentJoined(agent, hello.place))

    def _probe(self, asked: Iterable[tuple[AgentId, tuple[str, ...]]]) -> None:
        for agent, targets in asked:
            self.server.to_agent(agent, wire.ProbePeers(targets))

    def _send_away(self, agent: AgentId, error: SparkElasticError) -> None:
        logger.warning("an agent is sent away: %s", error)
        self.agents.remove(agent)
        self._vacate(self._slot_of[agent])
        self.server.to_agent(agent, wire.FinishAgent(False, str(error)))

    def _interfaces_changed(self, agent: AgentId, addresses: dict[str, tuple[str, ...]], probe_port: int) -> None:
        """Let the next world use the interfaces that an agent's host has now, and replace a world that used others."""
        workers = self._workers_of(agent)
        try:
            self._addresses.changed(agent, addresses, probe_port)
        except UnknownInterfaceError as error:
            members = () if self.world is None else self.world.workers
            others = [w for w in members if w not in workers and self._agent_of.get(w) in self.agents]
            if len(others) >= self.settings.min_num_proc:
                self._send_away(agent, error)
                self.handle(seen.AgentLost(agent, reported(str(error))))
            else:  # its worker may hold the state, and the others are too few: the interface may come back
                logger.warning("an interface is gone, and is waited for: %s", error)
            return
        self._probe(self._addresses.probes_for(agent))
        if agent in self._listens and not self._addresses.has(agent, self._listens[agent]):
            for worker in workers:
                self.handle(seen.AddressLost(worker))

    def _vacate(self, slot: SlotId) -> None:
        """Tell the launcher if a slot has no usable agent left; it has two while Spark runs a task again.

        Not while the job ends, which needs no agents: the launcher would gather new ones.
        """
        if not self._ending and slot not in self.slots():
            self.launcher.agent_present(slot, False)

    def agent_said(self, agent: AgentId, message: wire.Message) -> None:
        match message:
            case wire.AgentHeartbeat(running):
                self.server.to_agent(agent, wire.Pong())
                self.handle(seen.AgentAlive(agent, running))
            case wire.WorkerDying(worker, exit_code):
                if self._agent_of.get(worker) == agent:
                    self.handle(seen.WorkerLost(worker, LossCause(LossKind.DYING, code=exit_code)))
            case wire.WorkerExited(worker, exit_code, stderr_tail, oom_kills, memory):
                if self._agent_of.get(worker) == agent:
                    # its own connection closes by itself; its last messages may still be on the way
                    asyncio.get_running_loop().call_later(
                        LAST_WORDS_S, self._forget_worker, worker, "its process is gone"
                    )
                    cause = LossCause(LossKind.EXITED, code=exit_code)
                    self.handle(seen.WorkerLost(worker, cause, stderr_tail, oom_kills, memory))
            case wire.FunctionWanted(start):
                part = self.spec.function[max(start, 0) : max(start, 0) + wire.FUNCTION_PART_BYTES]
                self.server.to_agent(agent, wire.FunctionPart(start, part))
            case wire.OutputLines(worker, stream, lines):
                shown = self._shown[worker].shown(lines) if stream == "stderr" else lines
                self.printer.worker_lines(self._name_of(worker, agent), stream, lines, shown)
            case wire.ResultStored(worker, has_loop, run):
                self.handle(seen.WorkerDone(worker, has_loop, run))
            case wire.PeersReachable(tried, reachable):
                self._addresses.answered(tried, reachable)
            case wire.InterfacesChanged(addresses, probe_port):
                if agent in self.agents and agent in self._addresses:
                    self._interfaces_changed(agent, addresses, probe_port)
            case _:
                self.server.drop_agent(agent, f"an agent does not send {type(message).__name__}")

    def agent_gone(self, agent: AgentId, why: str) -> None:
        was_used = agent in self.agents
        self.agents.discard(agent)
        self.handle(seen.AgentLost(agent, LossCause(LossKind.CONNECTION_CLOSED, detail=why)))
        slot = self._slot_of.pop(agent)
        if was_used:
            self._vacate(slot)
        for worker in self._workers_of(agent):
            self._forget_worker(worker, "its agent is gone")
        self._addresses.remove(agent)
        self._listens.pop(agent, None)

    def worker_expected(self, worker: WorkerId) -> bool:
        """Return True if this worker was started and is not gone. The server turns away all others."""
        return worker in self._agent_of

    def worker_said(self, worker: WorkerId, message: wire.Message) -> None:
        match message:
            case wire.WorkerHello():
                self.handle(seen.WorkerAlive(worker))
            case wire.WorkerHeartbeat(version, blocked_s, after_loop, begun):
                self.server.to_worker(worker, wire.Pong())
                self.handle(seen.WorkerAlive(worker, version, blocked_s, after_loop, begun))
            case wire.Ready(round, version, at_init, loop):
                self.handle(seen.WorkerReady(worker, round, version, at_init, loop))
            case wire.LoopResult():
                for behind in self._loop_results.offered(message):
                    self.server.to_worker(behind, message)
            case wire.Raised(error_type, error, traceback, exit_code):
                if (agent := self._agent_of.get(worker)) is not None:
                    self.printer.worker_lines(self._name_of(worker, agent), "stderr", traceback.splitlines(), shown=())
                self.handle(seen.WorkerRaised(worker, error_type, error, traceback, exit_code))
            case wire.LiveProgress():
                if self.world is not None and self.world.members[0].worker == worker:
                    self.announcer.live(message, clock.monotonic())
            case wire.EpochEnded():
                self.announcer.epoch(message, clock.monotonic())
            case wire.EpochRow():
                self._epoch_ended(worker, message)
            case wire.Notice(text):
                self.announcer.notice(worker, text, clock.monotonic())
            case wire.Abandoned(why):
                self.handle(seen.WorkerAbandoned(worker, why))
            case _:
                self._broke_protocol(worker, f"a worker does not send {type(message).__name__}")

    def _broke_protocol(self, worker: WorkerId, why: str) -> None:
        self.server.drop_worker(worker, why)
        self.handle(seen.WorkerLost(worker, LossCause(LossKind.PROTOCOL_BROKEN)))

    def _epoch_ended(self, worker: WorkerId, message: wire.EpochRow) -> None:
        loop, epoch = asyncio.get_running_loop(), message.epoch

        def answer(stop: str) -> None:
            with contextlib.suppress(RuntimeError):  # the loop is closed: the job is over
                loop.call_soon_threadsafe(self.server.to_worker, worker, wire.EpochDecision(epoch, stop))

        try:
            row = json.loads(message.payload)
        except (ValueError, RecursionError):
            row = None
        if not isinstance(row, dict) or row.get("epoch") != epoch:
            self._broke_protocol(worker, f"the row of epoch {epoch} is not one")
        elif self.observer is not None:
            self.observer.epoch_ended(row, answer if message.waits else None)
        elif message.waits:
            answer("")

    def worker_gone(self, worker: WorkerId, why: str) -> None:
        self.handle(seen.WorkerLost(worker, LossCause(LossKind.CONNECTION_CLOSED, detail=why)))

    def _workers_of(self, agent: AgentId) -> list[WorkerId]:
        return [worker for worker, its_agent in self._agent_of.items() if its_agent == agent]

    def _forget_worker(self, worker: WorkerId, why: str) -> None:
        self._agent_of.pop(worker, None)
        self._shown.pop(worker, None)
        self.server.drop_worker(worker, why)

    def _name_of(self, worker: WorkerId, agent: AgentId) -> str:
        """Return the label of output lines: the worker's rank, or its slot before it has one."""
        if self.world is not None and worker in self.world.workers:
            return str(self.world.member(worker).rank)
        return f"slot {self._slot_of[agent]}"
