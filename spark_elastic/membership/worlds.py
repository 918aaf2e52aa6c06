"""From one world to the next: gathering, interrupting, breaking, regrouping, and the end of the job."""

from __future__ import annotations

from spark_elastic.errors import JobError, NotEnoughSlotsError, ResetLimitError, StateLostError
from spark_elastic.membership import decisions
from spark_elastic.membership.backoff import Crashes, Futility
from spark_elastic.membership.commands import (
    AdmitProvisionally,
    Announce,
    Command,
    CutPeers,
    FailJob,
    FinishJob,
    NotifyHostsUpdated,
    PublishWorld,
    RunAgain,
    StopWorker,
)
from spark_elastic.membership.deadlines import Silence, Timers
from spark_elastic.membership.decisions import Candidate, Decision
from spark_elastic.membership.registry import Worker, WorkerRegistry
from spark_elastic.membership.slots import Places, TimerKey
from spark_elastic.membership.states import PHASES, Phase, WorkerState
from spark_elastic.membership.timeline import JobEnded, Waiting, WorkerJoined, WorkerLeft, WorldBroken, WorldStarted
from spark_elastic.membership.topology import BEGINNING, StateVersion, WorkerId, World
from spark_elastic.settings import ElasticSettings

BOOTING, AT_INIT, ADMITTED = WorkerState.BOOTING, WorkerState.AT_INIT, WorkerState.ADMITTED
READY, TRAINING, DONE, GONE = WorkerState.READY, WorkerState.TRAINING, WorkerState.DONE, WorkerState.GONE

REPORT_GRACE_S = 2.0
"""The channel of a dying process closes before its agent has read the end of its stderr."""
ENDED = (Phase.FINISHED, Phase.FAILED)
_PLAIN_AGAIN = "its world broke, and a plain function can only be run again from the start"
_WITH_WORLD = (Phase.RUNNING, Phase.INTERRUPTED, Phase.BROKEN, Phase.WAITING)


class Rounds:
    """The phases of a job and its worlds. All TRAINING workers are members of the newest world."""

    def __init__(
        self,
        settings: ElasticSettings,
        roster: WorkerRegistry,
        places: Places,
        timers: Timers[TimerKey],
        heard: Silence[WorkerId],
        crashes: Crashes,
        out: list[Command],
    ) -> None:
        self._settings = settings
        self._roster = roster
        self._places = places
        self._timers = timers
        self._heard = heard
        self._crashes = crashes
        self._out = out

        self.phase = Phase.CREATED
        self.world: World | None = None  # the newest, also after it broke

        self.furthest = BEGINNING  # the most advanced state that any worker ever reported
        self.error: JobError | None = None
        self.waiting: tuple[str, float | None] = ("", None)  # what is waited for, until when

        self._elastic = False  # somebody showed a state, so the function has an elastic loop
        self._futility = Futility(
            settings.cooldown_range_s, young_s=settings.stall_timeout_s, give_up_s=settings.elastic_timeout_s
        )
        self._done: dict[WorkerId, tuple[int, int]] = {}  # -> (last rank, last round)
        self._plain: set[WorkerId] = set()  # of those, the ones that never entered an elastic loop
        self._notices = 0  # hosts-updated sequence numbers given out
        self._gather_until = 0.0  # STARTING, WAITING: when the job gives up
        self._gather_since = 0.0
        self._gather_setting = "start_timeout"
        self._enough_since: float | None = None  # STARTING: since when min_num_proc are ready
        self._noticed_at = BEGINNING  # INTERRUPTED: `furthest` when the members were last asked
        self._stall_due = 0.0  # BROKEN: when survivors that have not come are removed
        self._lost_at: float | None = None  # when the last holder of the state went, until it is known how
        self._paused_at: float | None = None  # when the newest world broke, or its first member stopped
        self._change = "the job starts"  # why the next world is built
        self._last_loss = "none"
        self._waiting_key: tuple[object, ...] = ()

    @property
    def round(self) -> int:
        """Number of the newest world; 0 before the first."""
        return self._roster.round

    # --- beginning and end ------------------------------------------------------------------------

    def begin(self, now: float) -> None:
        self._enter(Phase.STARTING)
        self._gather(now, self._settings.start_timeout_s, "start_timeout")

    def fail(self, error: JobError, now: float) -> None:
        self._enter(Phase.FAILED)
        self.error = error
        self._out.append(FailJob(error))
        self._out.append(Announce(JobEnded(now, "failed", str(error))))

    def _finish(self, now: float) -> None:
        # a worker that was done in an earlier world stands before the one that inherited its rank
        order = sorted(self._done, key=lambda worker: (*self._done[worker], worker))
        self._enter(Phase.FINISHED)
        self._out.append(FinishJob(tuple(order)))
        self._out.append(Announce(JobEnded(now, "finished", f"{len(order)} workers are done")))

    def _enter(self, phase: Phase) -> None:
        PHASES.check(self.phase, phase)
        self.phase = phase
        self.waiting = ("", None)
        self._waiting_key = ()

    # --- workers ----------------------------------------------------------------------------------

    def note_version(self, version: StateVersion, now: float) -> None:
        """Somebody holds a state of that version."""
        next_loop = version.loop > self.furthest.loop
        self.furthest = max(self.furthest, version)
        if next_loop:
            for worker in list(self._roster.in_state(READY)):
                self._send_on(worker, now)
        if not self._elastic:
            self._elastic = True
            if self.phase in _WITH_WORLD:
                for worker in list(self._roster.in_state(AT_INIT)):
                    self._admit(worker, now)

    def at_init(self, worker: Worker, now: float) -> None:
        """The worker waits in `init()`: for a first world, or to be let in beside a running one.

        As long as no worker has shown a state, the function may be a plain one, which could do nothing outside of a
        world: then it goes on waiting.
        """
        self._introduce(worker, now)
        self._roster.enter(worker, AT_INIT)
        if self._elastic and self.phase in _WITH_WORLD:
            self._admit(worker, now)

    def note_place(self, worker: Worker, after_loop: bool, now: float) -> None:
        """A member is in its loop, or does what comes after it."""
        if worker.state is not TRAINING or worker.after_loop == after_loop:
            return
        worker.after_loop = after_loop
        if not after_loop and self.phase is Phase.BROKEN:  # it comes back now
            self._wait_for(worker.id, now)
        elif not after_loop:  # the next loop: who waited for it may come in
            self.consider_interrupt(now)

    def wait_longer(self, worker_id: WorkerId, now: float) -> bool:
        """Whether a survivor that has not come is to be waited for: it does what comes after the loop, and lives."""
        worker = self._roster.workers[worker_id]
        if not worker.after_loop:
            return False
        self._wait_for(worker_id, now)
        return True

    def _wait_for(self, survivor: WorkerId, now: float) -> None:
        """Wait once more as long as for any survivor of the broken world."""
        self._stall_due = now + self._settings.stall_timeout_s
        self._timers.set(("stall", survivor), self._stall_due)

    def _send_on(self, worker: Worker, now: float) -> None:
        """Have a worker that stands in an earlier loop than the job go on to the job's."""
        if 0 < worker.loop < self.furthest.loop:
            worker.rank = None  # it comes back as a newcomer
            self._admit(worker, now)

    def _admit(self, worker: Worker, now: float) -> None:
        self._roster.enter(worker, ADMITTED)
        members = self._roster.count(TRAINING) + self._roster.count(READY) + self._roster.count(ADMITTED) - 1
        self._timers.set(("boot", worker.id), now + self._settings.start_timeout_s)
        self._out.append(AdmitProvisionally(worker.id, members, members + 1, self.furthest.loop))

    def ready(self, worker: Worker, version: StateVersion | None, loop: int, now: float) -> None:
        """The worker stands in the elastic loop of that number and waits for the next world."""
        self._introduce(worker, now)
        member = worker.state is TRAINING
        self._roster.enter(worker, READY)
        worker.version, worker.loop, worker.after_loop = version, loop, False
        self._timers.cancel(("stall", worker.id))
        if not member:
            self.consider_interrupt(now)
        elif self.phase is Phase.RUNNING:
            # nobody asked it to stop: it saw its neighbour die before we did, and the others may hang
            self._break(f"a collective failed for rank {worker.rank} on {worker.place.host}", now)
        elif self.phase is Phase.INTERRUPTED and self._paused_at is None:
            self._paused_at = now
            # they all stop at the same step; a straggler is stuck in a collective with somebody who left it
            self._timers.set(("notice", 0), now + self._settings.heartbeat_timeout_s)
        self._send_on(worker, now)

    def done(self, worker: Worker, in_loop: bool, now: float) -> None:
        """The worker's function returned."""
        for kind in ("boot", "stall", "exit"):
            self._timers.cancel((kind, worker.id))
        if worker.state is TRAINING and not in_loop and self.phase is Phase.BROKEN:
            self.restart(worker, _PLAIN_AGAIN, now)
            return
        if worker.state is TRAINING and self.phase is Phase.BROKEN and worker.run_again_in != self.round:
            self._run_again(worker, now)
            return
        self._roster.enter(worker, DONE)
        self._heard.forget(worker.id)
        if worker.round == 0 and self.round > 0:
            return  # a newcomer that never trained adds no result
        self._done[worker.id] = (worker.rank or 0, worker.round)
        if not in_loop:
            self._plain.add(worker.id)

    def _run_again(self, worker: Worker, now: float) -> None:
        """Have a worker whose function returned in a world that broke call it again: its results are those of a world
        that ends well."""
        if worker.id in self._plain:
            self.restart(worker, _PLAIN_AGAIN, now)
        elif worker.exited:
            self.restart(worker, "its world broke after its function had returned and its process had ended", now)
        else:
            if worker.state is DONE:
                del self._done[worker.id]
                self._roster.enter(worker, TRAINING)
            worker.run += 1
            worker.run_again_in, worker.after_loop = self.round, False
            self._heard.heard(worker.id, now)
            worker.heard_at = now
            self._wait_for(worker.id, now)
            self._out.append(RunAgain(worker.id, worker.run, self._change))

    def remove(self, worker: Worker, why: str, now: float, *, graceful: bool = False) -> None:
        """Take the worker off the registry; a world that needed it breaks."""
        # its result is gone with it, and the others have to bring back what it came to
        needed = worker.state is TRAINING or worker.id in self._done
        self._roster.enter(worker, GONE)
        self._roster.failed += not graceful
        self._heard.forget(worker.id)
        for kind in ("boot", "stall", "exit"):
            self._timers.cancel((kind, worker.id))
        self._done.pop(worker.id, None)
        self._plain.discard(worker.id)
        rank = worker.rank if worker.round == self.round else None
        self._out.append(Announce(WorkerLeft(now, worker.id, worker.place, rank, why, graceful)))
        if not graceful and worker.round > 0:
            if worker.round == self.round:
                self._futility.lost()
            self._last_loss = f"worker {worker.id} on {worker.place.host}: {why}"
        if needed:
            self._break(f"rank {worker.rank} on {worker.place.host} is gone: {why}", now)

    def restart(self, worker: Worker, why: str, now: float) -> None:
        """Run the worker's process again from the start; no failure of its place."""
        agent = self._roster.agents[worker.agent]
        self._out.append(StopWorker(agent.id, worker.id, why))
        self.remove(worker, why, now, graceful=True)
        if agent.retiring:
            self._places.dismiss(agent, agent.leaving, now)
        else:
            self._places.fill(agent, now)

    def release(self, worker: Worker, why: str, now: float) -> None:
        """Let go of a worker whose place is not to be used any more, and that no world needs."""
        agent = self._roster.agents[worker.agent]
        if not agent.retiring:
            self._out.append(StopWorker(agent.id, worker.id, why))
        self.remove(worker, why, now, graceful=True)
        if agent.retiring:
            self._places.dismiss(agent, why, now)

    def _introduce(self, worker: Worker, now: float) -> None:
        self._timers.cancel(("boot", worker.id))
        if not worker.introduced:
            worker.introduced = True
            self._out.append(Announce(WorkerJoined(now, worker.id, worker.place)))

    # --- the end of a world -----------------------------------------------------------------------

    def consider_interrupt(self, now: float) -> None:
        """Ask a running world to stop at an agreed step, if somebody is ready to join it or can be let go."""
        if self.phase is not Phase.RUNNING or self._done:
            return  # where some are done already, the job is about to end: nobody joins any more
        if not self._elastic:
            return  # a plain function has no step to stop at
        if any(worker.after_loop for worker in self._roster.in_state(TRAINING)):
            return  # there is no step to stop at after the loop; who is ready waits for the next loop, or the end
        if not self._roster.may_reset():
            return  # the next world would end the job: only a loss is worth that
        newcomers = self._roster.count(READY)
        if not newcomers and not self._places.leaving:
            return
        candidates = self._candidates(TRAINING, READY)
        leaving = [candidate for candidate in candidates if candidate.leaving]
        if newcomers:
            self._change = f"{newcomers} more ready to train"
        elif leaving and decisions.can_leave(candidates, self._settings.min_num_proc):
            self._change = self._leaving_reason(leaving[0])
        else:
            return
        self._enter(Phase.INTERRUPTED)
        self._paused_at = None
        self._notices += 1
        self._noticed_at = self.furthest
        self._timers.set(("notice", 0), now + self._settings.stall_timeout_s)
        self._out.append(NotifyHostsUpdated(tuple(self._roster.states[TRAINING]), self._notices))
        self._say_interrupted(self._roster.count(TRAINING), now)

    def _leaving_reason(self, candidate: Candidate) -> str:
        worker = self._roster.workers[candidate.worker]
        return self._roster.agents[worker.agent].leaving

    def stalled(self, why: str, now: float) -> None:
        """A running world does not get on, and nobody in it can be blamed."""
        for worker in self._roster.in_state(TRAINING):
            worker.blocked_s = None
        self._break(why, now)

    def _break(self, why: str, now: float) -> None:
        if self.phase not in (Phase.RUNNING, Phase.INTERRUPTED):
            return
        assert self.world is not None
        self._enter(Phase.BROKEN)
        if self._paused_at is None:
            self._paused_at = now
        self._change = why
        self._futility.broke(self.furthest, now)
        self._timers.cancel(("notice", 0))
        training = tuple(self._roster.states[TRAINING])
        if training:
            self._out.append(CutPeers(training, self.round, why))
        self._stall_due = now + self._settings.stall_timeout_s
        for survivor in training:
            self._timers.set(("stall", survivor), self._stall_due)
        self._out.append(Announce(WorldBroken(now, self.round, self.world.size, why)))
        for worker in [self._roster.workers[worker] for worker in sorted(self._done)]:
            self._run_again(worker, now)

    def notice_due(self, now: float) -> None:
        """The members were asked to stop and not all did."""
        if self.phase is not Phase.INTERRUPTED:
            return
        limit_s = self._settings.stall_timeout_s
        after_loop = any(worker.after_loop for worker in self._roster.in_state(TRAINING))
        if self._paused_at is None and (self.furthest > self._noticed_at or after_loop):
            # nobody reached a commit, but they work on: only newcomers wait for them
            self._waiting_key = ()
            self._noticed_at = self.furthest
            self._timers.set(("notice", 0), now + limit_s)
        elif self._paused_at is None:
            self._break(f"no step in {limit_s:g} s since the workers were asked to stop", now)
        else:
            behind = self._roster.count(TRAINING)
            self._break(f"{behind} workers did not stop at the step where the others did", now)

    # --- the beginning of a world -----------------------------------------------------------------

    def evaluate(self, now: float) -> None:
        """Take the next step if everything it waits for is there; otherwise say what is missing."""
        training = self._roster.count(TRAINING)
        if self.phase is Phase.STARTING:
            self._evaluate_start(now)
        elif self.phase is Phase.INTERRUPTED and training:
            self._say_interrupted(training, now)
        elif self.phase is Phase.BROKEN and training:
            self._say_broken(training, now)
        elif self.phase in _WITH_WORLD and not training:
            self._settle(now)

    def _evaluate_start(self, now: float) -> None:
        settings = self._settings
        waiting = list(self._roster.in_state(AT_INIT, READY))
        if any(worker.loop for worker in waiting):  # who is in the loop takes no part in what others do before it
            for worker in waiting:
                if not worker.loop:
                    self._admit(worker, now)
        ready = self._roster.count(AT_INIT) + self._roster.count(READY)
        have = ready or len(self._done)  # some functions return without ever asking for a world
        if have < settings.min_num_proc:
            self._enough_since = None
        elif self._enough_since is None:
            self._enough_since = now
        decision = decisions.start(have, settings, now, enough_since=self._enough_since, deadline=self._gather_until)
        if decision.expired:
            self._give_up(ready, now)
        elif not decision.go:
            self._wait(decision, ready, now)
        elif ready and self._futility.retry_at > now:
            self._wait(self._pause(now), ready, now)
        elif ready:
            self._change = f"{self._change}: {decision.reason}"
            self._publish(self._candidates(AT_INIT, READY), now)
        else:
            self._finish(now)

    def _settle(self, now: float) -> None:
        """Everybody who was in the newest world has come, is done, or is gone."""
        ready = self._candidates(READY)
        if self._done and not any(candidate.old_rank is not None for candidate in ready):
            self._finish(now)
            return
        if self.phase is Phase.RUNNING:
            self._break("the agents that held the results are gone", now)
        held = any(self._holds(candidate.version) for candidate in ready)
        behind = not held and any(self._holds(worker.version) for worker in self._roster.in_state(ADMITTED))
        if not held and not behind:
            if self.furthest.trained:
                self._on_state_lost(now)
                return
            self._enter(Phase.STARTING)
            self._change = f"starting over, nobody held a state ({self._change})"
            self._gather(now, self._settings.elastic_timeout_s, "elastic_timeout")
            self._evaluate_start(now)
            return
        if self.phase is not Phase.WAITING:
            self._gather_since, self._gather_setting = now, "elastic_timeout"
            self._gather_until = now + self._settings.elastic_timeout_s
        # without a holder of the state nobody goes on, but one is on its way
        members = [] if behind else decisions.select(ready, len(self._done), self._settings.min_num_proc)
        have = len(members) + len(self._done)
        decision = decisions.regroup(have, self._settings, now, deadline=self._gather_until)
        if decision.go and self._futility.retry_at > now:
            decision = self._pause(now)
        if decision.go:
            self._publish(members, now)
            return
        if self.phase is not Phase.WAITING:
            self._enter(Phase.WAITING)
            self._timers.set(("gather", 0), self._gather_until)
        if decision.expired:
            self._give_up(have, now)
        else:
            self._wait(decision, have, now)

    def _on_state_lost(self, now: float) -> None:
        """Fail. If a crash came back until nobody was left, that is what to say, with how the last one ended."""
        if self._crashes.may_be_a_row():
            if self._lost_at is None:
                self._lost_at = now
            due = self._lost_at + REPORT_GRACE_S
            if self._crashes.is_a_row_at_the_end(now):
                self.fail(self._crashes.error(self.furthest, now), now)
                return
            if now < due:
                self._timers.set(("gather", 0), due)
                self._say(("lost",), "every worker that held the state is gone; waiting for why", due, now)
                return
        self.fail(StateLostError(progress=self.furthest.steps, last_reason=self._last_loss), now)

    def _holds(self, version: StateVersion | None) -> bool:
        """Whether a state is the job's: of its loop, or of the end of the one before if this one has not begun."""
        if version is None:
            return False
        return version.loop == self.furthest.loop or (version.loop + 1, 0) == (self.furthest.loop, self.furthest.steps)

    def _pause(self, now: float) -> Decision:
        until = self._futility.retry_at
        return Decision(
            False,
            f"{self._futility.count} worlds in a row broke before a step, with no worker lost; "
            f"trying again in {until - now:.1f} s",
            deadline=until,
        )

    def _candidates(self, *states: WorkerState) -> list[Candidate]:
        agents = self._roster.agents
        return [
            Candidate(worker.id, worker.place, worker.rank, worker.version, bool(agents[worker.agent].leaving))
            for worker in self._roster.in_state(*states)
        ]

    def _publish(self, members: list[Candidate], now: float) -> None:
        limit = self._roster.reset_limit
        if limit is not None and not self._roster.may_reset():
            self.fail(ResetLimitError(resets=self.round, limit=limit, last_reason=self._change), now)
            return
        if self._futility.hopeless(now):
            message = (
                f"{self._futility.count} worlds in a row broke before they applied a step, with no worker lost "
                f"(last: {self._change}); check that the workers reach one another: name the interfaces to use in "
                "nics, and look for a firewall between the hosts"
            )
            self.fail(JobError(message), now)
            return
        self._roster.round += 1
        world = decisions.build_world(self.round, members)
        # a worker that returned without `init()` while others asked for a world has no place in its results
        self._done = {worker: position for worker, position in self._done.items() if position[1] > 0}
        for worker in list(self._roster.in_state(READY)):
            if worker.id not in world.workers:
                self.release(worker, self._roster.agents[worker.agent].leaving, now)
        for member in world.members:
            worker = self._roster.workers[member.worker]
            self._roster.enter(worker, TRAINING)
            worker.round, worker.rank = self.round, member.rank
        for kind in ("gather", "notice"):
            self._timers.cancel((kind, 0))
        pause = None if self._paused_at is None else now - self._paused_at
        self._futility.began(self.furthest, now)
        self.world, self._paused_at, self._enough_since = world, None, None
        self._enter(Phase.RUNNING)
        self._out.append(PublishWorld(world))
        self._out.append(
            Announce(
                WorldStarted(now, self.round, world.size, world.root, world.progress, world.sync, pause, self._change)
            )
        )
        self.consider_interrupt(now)  # for those that should leave and were needed to pass on the state

    # --- waiting ----------------------------------------------------------------------------------

    def _gather(self, now: float, limit_s: float, setting: str) -> None:
        self._gather_since, self._gather_until, self._gather_setting = now, now + limit_s, setting
        self._enough_since = None
        self._timers.set(("gather", 0), self._gather_until)

    def _give_up(self, have: int, now: float) -> None:
        states = self._roster.states
        detail = (
            f"{len(self._roster.agents)} agents had joined, {len(states[BOOTING])} workers were still booting, "
            f"{len(states[ADMITTED])} building their model; last loss: {self._last_loss}"
        )
        if missing := self._places.why_missing():
            detail += f"; {missing}"
        unused = sorted({agent.leaving for agent in self._roster.agents.values() if agent.leaving})
        if unused:
            detail += f"; agents that are not used: {'; '.join(unused[:5])}"
        self.fail(
            NotEnoughSlotsError(
                have=have,
                need=self._settings.min_num_proc,
                waited_s=now - self._gather_since,
                setting=self._gather_setting,
                detail=detail,
            ),
            now,
        )

    def _wait(self, decision: Decision, have: int, now: float) -> None:
        assert decision.deadline is not None
        self._timers.set(("gather", 0), decision.deadline)
        missing = self._places.why_missing()
        reason = f"{decision.reason}; {missing}" if missing else decision.reason
        self._say((have, decision.deadline, missing), reason, decision.deadline, now)

    def _say_interrupted(self, training: int, now: float) -> None:
        due = self._timers.get(("notice", 0))
        if self._paused_at is None:
            reason = f"{training} workers train on until they agree on a step to stop at ({self._change})"
        else:
            reason = f"waiting for {training} more workers to stop at the agreed step ({self._change})"
        self._say((training, due), reason, due, now)

    def _say_broken(self, training: int, now: float) -> None:
        missing = sorted(worker.rank or 0 for worker in self._roster.in_state(TRAINING)) if training <= 8 else []
        due = self._stall_due
        who = f" (ranks {', '.join(map(str, missing))})" if missing else ""
        finishing = sum(worker.after_loop for worker in self._roster.in_state(TRAINING))
        if finishing:
            who += f", {finishing} of which do what comes after the loop and are waited for longer"
        reason = f"round {self.round} broke; waiting up to {due - now:.0f} s for {training} survivors{who}"
        self._say((training, due, finishing), reason, due, now)

    def _say(self, key: tuple[object, ...], reason: str, deadline: float | None, now: float) -> None:
        """Announce what is waited for, if that changed."""
        if key != self._waiting_key:
            self._waiting_key = key
            self.waiting = (reason, deadline)
            self._out.append(Announce(Waiting(now, reason, deadline)))
