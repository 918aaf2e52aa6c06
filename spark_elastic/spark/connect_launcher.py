"""ConnectLauncher: agents as queries of one task each, sent to a Spark Connect server from threads of this process."""

from __future__ import annotations

import contextlib
import logging
import threading
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from spark_elastic import clock
from spark_elastic.membership.launcher import LaunchEnd, OnEnded
from spark_elastic.membership.reasons import LossCause, LossKind, reported
from spark_elastic.membership.topology import LaunchId, SlotId
from spark_elastic.spark import connect_session as connect
from spark_elastic.spark.agent_task import AgentEntry, agent_task, outcome_of
from spark_elastic.spark.failures import loss_of

log = logging.getLogger(__name__)

LOST_AGENT_S = 4.0
"""Seconds that a query may go on without its agent. Spark runs a lost task again, perhaps not before a slot is free."""
SERVER_SILENT_S = 10.0
"""Seconds without a server after which launches that have no agent yet, or no more, are given up."""
_INTERRUPT_AGAIN_S = 0.1
_LOOK_S = 1.0
_TASK_LOST = reported("the slot's task was lost")


@dataclass(slots=True, eq=False)
class _SlotQuery:
    """One query of one slot, from `launch` to `on_ended`. Changed only under the launcher's lock."""

    slot: SlotId
    id: LaunchId
    tag: str = field(default_factory=lambda: f"spark_elastic-{uuid.uuid4().hex}")
    stop_cause: LossCause | None = None
    """Set once, when the query has to end."""
    has_joined: bool = False
    """True once the launch's agent has connected to the driver."""
    lost_at: float | None = None
    """When the connection to the agent was lost."""


@dataclass(eq=False)
class ConnectLauncher:
    """A `Launcher` whose agents run in tasks of a Spark Connect server."""

    session: Any
    agent_entry: AgentEntry
    payload_for_slot: Callable[[SlotId], bytes]
    """Returns the payload of a slot; called at each launch. It travels inside the query and must be small."""
    on_ended: OnEnded

    def __post_init__(self) -> None:
        self._connection = connect.second_connection(self.session)
        self._changed = threading.Condition()
        self._running: dict[SlotId, _SlotQuery] = {}
        self._threads: set[threading.Thread] = set()
        """One for each launch; it ends after `on_ended` has returned."""
        self._launches = 0
        self._closed = False
        self._gone: str | None = None
        self._silent_since: float | None = None
        """When the server was first seen not to answer, if it has not answered since."""
        self._watcher: threading.Thread | None = None

    def launch(self, slot: SlotId) -> None:
        with self._changed:
            self._launches += 1
            launch = self._running[slot] = _SlotQuery(slot, self._launches)
            thread = threading.Thread(target=self._run, args=(launch,), name=f"spark_elastic slot {slot}", daemon=True)
            self._threads.add(thread)
            if self._watcher is None:
                self._watcher = threading.Thread(target=self._watch, name="spark_elastic launcher", daemon=True)
                self._watcher.start()
            thread.start()

    def withdraw(self, slot: SlotId, cause: LossCause) -> None:
        with self._changed:
            if (launch := self._running.get(slot)) is not None:
                self._stop(launch, cause)

    def admit(self, slot: SlotId, launch: LaunchId) -> bool:
        # The server reports the end of an interrupted query before its task has ended. The executor kills the task's
        # process 2-4 s later, and by then the slot may have been launched again.
        with self._changed:
            running = self._running.get(slot)
            return running is not None and running.id == launch and running.stop_cause is None

    def agent_present(self, slot: SlotId, present: bool) -> None:
        with self._changed:
            launch = self._running.get(slot)
            if launch is None:
                return
            if present:
                launch.has_joined = True
            elif launch.has_joined and launch.lost_at is None:
                launch.lost_at = clock.monotonic()
                self._changed.notify_all()

    def gone(self) -> str | None:
        return self._gone if self._gone is not None or connect.server_answers(self.session) else self._no_answer()

    def _no_answer(self) -> str:
        host, port = connect.server_of(self.session)
        return f"the Spark Connect server at {host}:{port} does not answer"

    def close(self, deadline_s: float) -> None:
        until = clock.monotonic() + deadline_s
        with self._changed:
            self._closed = True
            for launch in self._running.values():
                self._stop(launch, reported("the job is over"))
            threads = self._threads | ({self._watcher} if self._watcher is not None else set())
            self._changed.notify_all()
        threads.discard(threading.current_thread())  # on_ended may close
        for thread in threads:
            thread.join(max(until - clock.monotonic() - 0.5, 0.0))
        connect.close_connection(self._connection, self.session)  # ends the calls of a server that does not answer
        for thread in threads:
            thread.join(max(until - clock.monotonic(), 0.0))
        left = [thread.name for thread in threads if thread.is_alive()]
        if left:
            log.warning("still running %.0f s after they were told to end: %s", deadline_s, ", ".join(left))

    def _stop(self, launch: _SlotQuery, cause: LossCause) -> None:
        """Have the watcher end a launch. To be called with the lock."""
        if launch.stop_cause is None:
            launch.stop_cause = cause
            self._changed.notify_all()

    # --- the slot's own thread ------------------------------------------------------------------

    def _run(self, launch: _SlotQuery) -> None:
        try:
            end = LaunchEnd(launch.slot, launch.stop_cause) if launch.stop_cause else self._run_query(launch)
            with self._changed:
                del self._running[launch.slot]
                self._changed.notify_all()
            self.on_ended(end)
        finally:
            with self._changed:
                self._threads.discard(threading.current_thread())

    def _run_query(self, launch: _SlotQuery) -> LaunchEnd:
        slot, spark = launch.slot, self._connection
        try:
            spark.addTag(launch.tag)  # tags belong to the thread, which ends with this query
            task = agent_task(self.agent_entry, slot, launch.id, self.payload_for_slot(slot))
            outcome = outcome_of(connect.rows_of_tasks(spark, task, 1))
            end = LaunchEnd(slot, _TASK_LOST if outcome is None else outcome.cause, outcome)
        except Exception as error:
            gone = connect.why_session_is_gone(error)
            if connect.was_interrupted(error):
                cause = LossCause(LossKind.CANCELLED, detail="the slot's query was cancelled on the server")
            elif gone is None:
                cause = loss_of(str(error))
            else:
                cause = reported(gone)
                if not self._closed:
                    self._gone = gone
            end = LaunchEnd(slot, cause)
        delivered = end.outcome is not None and end.outcome.result is not None
        return end if delivered or launch.stop_cause is None else LaunchEnd(slot, launch.stop_cause)

    # --- the watcher's thread -------------------------------------------------------------------

    def _watch(self) -> None:
        """Interrupt queries that have to stop until they have, and stop those whose agent is lost."""
        while True:
            with self._changed:
                if self._closed and not self._running:
                    return
                now = clock.monotonic()
                for launch in self._running.values():
                    if launch.lost_at is not None and now - launch.lost_at >= LOST_AGENT_S:
                        self._stop(launch, _TASK_LOST)
                stopping = [launch for launch in self._running.values() if launch.stop_cause is not None]
                alone = any(not each.has_joined or each.lost_at is not None for each in self._running.values())
                if not stopping:
                    self._changed.wait(_LOOK_S if alone else None)
            if alone or stopping:
                self._look_for_server()
            # Not while the server does not answer: the call would not return for minutes.
            for launch in stopping if self._silent_since is None else ():
                with contextlib.suppress(Exception):  # the session or its server is gone, and the query with it
                    self._connection.interruptTag(launch.tag)
            if stopping:
                with self._changed:
                    self._changed.wait(_INTERRUPT_AGAIN_S)

    def _look_for_server(self) -> None:
        """Give all launches up if the server has not answered for `SERVER_SILENT_S`. gRPC itself tries for minutes."""
        now = clock.monotonic()
        if connect.server_answers(self.session):
            self._silent_since = None
        elif self._silent_since is None:
            self._silent_since = now
        elif now - self._silent_since >= SERVER_SILENT_S:
            self._gone = self._no_answer()
            connect.close_connection(self._connection, self.session)
