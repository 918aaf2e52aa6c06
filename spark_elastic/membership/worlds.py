"""The worlds of a job: gathering workers, interrupting and breaking worlds, regrouping, and the end of the job."""

from __future__ import annotations

from collections.abc import Sequence

from spark_elastic.errors import JobError, ResetLimitError, StateLostError, UnequalStepsError
from spark_elastic.membership import commands as do
from spark_elastic.membership import decisions
from spark_elastic.membership.decisions import Gathering
from spark_elastic.membership.failures import REPORT_GRACE_S
from spark_elastic.membership.reasons import (
    LossCause,
    LossKind,
    UnequalSteps,
    Wait,
    WaitKind,
    WorldChange,
    WorldChangeKind,
    change_in_words,
    counted,
    loss_in_words,
)
from spark_elastic.membership.registry import ADMITTED, AT_INIT, DONE, GONE, READY, TRAINING, Worker
from spark_elastic.membership.slots import MachineContext, SlotScheduler, TimerKind
from spark_elastic.membership.states import PHASES, Phase
from spark_elastic.membership.timeline import JobEnded, WorkerJoined, WorkerLeft, WorldBroken, WorldStarted
from spark_elastic.membership.topology import BEGINNING, StateVersion, WorkerId, World

_WITH_WORLD = (Phase.RUNNING, Phase.INTERRUPTED, Phase.BROKEN, Phase.WAITING)
_WORKER_TIMERS: tuple[TimerKind, ...] = ("boot", "stall", "exit")


class WorldLifecycle:
    """Decides who trains together: the phase of the job, its worlds, and which workers stay.

    It calls the slot scheduler, and never `Membership`. All TRAINING workers are members of the newest world.
    """

    def __init__(self, context: MachineContext, scheduler: SlotScheduler) -> None:
        self._context = context
        self._settings = context.settings
        self._registry = context.registry
        self._timers = context.timers
        self._heard = context.workers_heard
        self._crashes = context.crashes
        self._commands = context.commands
        self._scheduler = scheduler
        self.phase = Phase.CREATED
        self.world: World | None = None  # the newest world, also after it broke; None before the first
        self.furthest = BEGINNING  # the most advanced version that any worker ever reported
        self._elastic = False  # a worker showed a state, so the function has an elastic loop
        self._gathering = Gathering(context, scheduler)
        self._backoff = self._gathering.backoff
        self._done: dict[WorkerId, tuple[int, int]] = {}  # the workers that are DONE: last rank and last round
        self._notices = 0  # the sequence number of the newest hosts-updated notice
        self._change = WorldChange(WorldChangeKind.JOB_STARTS)  # why the next world is built
        self._last_loss = "none"  # in words, for errors
        self._unequal_in = 0  # the last round in which some waited for members that had left; 0: none
        self._shut_down_in = 0  # the last round in which that was concluded from a collective that failed
        self._cancelled = False  # the last loss was that of a job which Spark was asked to cancel
        self._noticed_at = BEGINNING  # INTERRUPTED: `furthest` when the members were last asked to stop
        self._stall_due = 0.0  # BROKEN: when survivors that have not come back are removed
        self._lost_at: float | None = None  # when the last holder of the state went, until it is known how
        self._paused_at: float | None = None  # when the newest world broke, or its first member stopped

    # --- beginning and end ------------------------------------------------------------------------

    def begin(self, now: float) -> None:
        """Start the job: gather workers for the first world."""
        self._enter(Phase.STARTING)
        self._gathering.begin("start_timeout", now)

    def fail(self, error: JobError, now: float) -> None:
        self._enter(Phase.FAILED)
        self._commands.append(do.FailJob(error))
        self._context.announce(JobEnded(now, "failed", str(error)))

    def _finish(self, now: float) -> None:
        # a worker that was done in an earlier world comes before the one that inherited its rank
        order = sorted(self._done, key=lambda worker: (*self._done[worker], worker))
        self._enter(Phase.FINISHED)
        self._commands.append(do.FinishJob(tuple(order)))
        are_done = f"{counted(len(order), 'worker')} {'is' if len(order) == 1 else 'are'} done"
        self._context.announce(JobEnded(now, "finished", are_done))

    def _enter(self, phase: Phase) -> None:
        PHASES.check(self.phase, phase)
        self.phase = phase
        self._context.waiting = None

    # --- workers ----------------------------------------------------------------------------------

    def note_version(self, version: StateVersion, now: float) -> None:
        """Record that a worker holds a state of that version."""
        self._crashes.note_version(version)
        next_loop = version.loop > self.furthest.loop
        self.furthest = max(self.furthest, version)
        if next_loop:
            for worker in list(self._registry.in_state(READY)):
                self._skip_to_the_loop(worker, now)
        if not self._elastic:
            self._elastic = True
            if self.phase in _WITH_WORLD:
                for worker in list(self._registry.in_state(AT_INIT)):
                    self._admit(worker, now)

    def on_at_init(self, worker: Worker, now: float) -> None:
        """Store that the worker waits in `init()`, and admit it if a world runs whose function has an elastic loop.

        As long as no worker has reported a state, the function may have no loop: then the worker needs a world itself.
        """
        self._introduce(worker, now)
        self._registry.enter(worker, AT_INIT)
        if self._elastic and self.phase in _WITH_WORLD:
            self._admit(worker, now)

    def note_after_loop(self, worker: Worker, after_loop: bool, now: float) -> None:
        """Store if a member runs the code after its elastic loop, or is in the loop."""
        if worker.state is not TRAINING or worker.after_loop == after_loop:
            return
        worker.after_loop = after_loop
        if not after_loop and self.phase is Phase.BROKEN:  # it comes back now
            self._set_stall_timer(worker.id, now)
        elif not after_loop:  # the next loop: workers that waited for it may join
            self.consider_interrupt(now)

    def on_stall_due(self, survivor: Worker, now: float) -> None:
        """Remove a survivor that has not come back in time. One that runs the code after its loop gets more time."""
        if survivor.after_loop:
            self._set_stall_timer(survivor.id, now)
        else:
            cause = LossCause(LossKind.NOT_BACK, seconds=self._settings.stall_timeout_s)
            self.end_worker(survivor, cause, now, stop=True, failure=True)

    def _set_stall_timer(self, survivor: WorkerId, now: float) -> None:
        self._stall_due = now + self._settings.stall_timeout_s
        self._timers.set(("stall", survivor), self._stall_due)

    def _skip_to_the_loop(self, worker: Worker, now: float) -> None:
        """Let a worker go on if it waits in an earlier elastic loop than the job is in."""
        if 0 < worker.loop < self.furthest.loop:
            worker.rank = None  # it comes back as a newcomer
            self._admit(worker, now)

    def _admit(self, worker: Worker, now: float) -> None:
        self._registry.enter(worker, ADMITTED)
        members = self._registry.count(TRAINING) + self._registry.count(READY) + self._registry.count(ADMITTED) - 1
        self._timers.set(("boot", worker.id), now + self._settings.start_timeout_s)
        self._commands.append(do.AdmitProvisionally(worker.id, members, members + 1, self.furthest.loop))

    def on_ready(self, worker: Worker, version: StateVersion | None, loop: int, now: float) -> None:
        """Store that the worker waits for the next world in elastic loop number `loop`."""
        self._introduce(worker, now)
        member = worker.state is TRAINING
        self._registry.enter(worker, READY)
        worker.version, worker.loop, worker.after_loop = version, loop, False
        self._timers.cancel(("stall", worker.id))
        if not member:
            self.consider_interrupt(now)
        elif self.phase is Phase.RUNNING:
            # it was not asked to stop: it saw its neighbour die before the driver did, and the others may hang
            self._break(WorldChange(WorldChangeKind.COLLECTIVE_FAILED, rank=worker.rank, host=worker.place.host), now)
        elif self.phase is Phase.INTERRUPTED and self._paused_at is None:
            self._paused_at = now
            # all members stop at the same step; one that does not is blocked in a collective that the others have left
            self._timers.set(("notice", 0), now + self._settings.heartbeat_timeout_s)
        self._skip_to_the_loop(worker, now)

    def on_address_lost(self, worker: Worker, now: float) -> None:
        """Replace the world of a member that nobody reaches any more, before its members wait in a collective.

        Members that have left their loop need no collective: where there is one, the world is left alone.
        """
        alone = self.world is None or self.world.size == 1
        if worker.state is TRAINING and not alone and not self._done and not self._registry.after_loop():
            self._break(WorldChange(WorldChangeKind.ADDRESS_LOST, rank=worker.rank, host=worker.place.host), now)

    def on_done(self, worker: Worker, in_loop: bool, now: float) -> None:
        """Store that the worker's function returned, or have it run again if its world is broken."""
        for kind in _WORKER_TIMERS:
            self._timers.cancel((kind, worker.id))
        worker.plain = not in_loop
        again = worker.plain or worker.run_again_in != self._registry.round
        if worker.state is TRAINING and self.phase is Phase.BROKEN and again:
            if not self._left_early([worker], now):
                self._run_again(worker, now)
            return
        self._registry.enter(worker, DONE)
        self._heard.forget(worker.id)
        if worker.round > 0 or self._registry.round == 0:  # a newcomer that never trained adds no result
            self._done[worker.id] = (worker.rank or 0, worker.round)

    def _run_again(self, worker: Worker, now: float) -> None:
        """Have a worker that returned in a broken world call its function again: its result does not count."""
        if worker.plain:
            self.end_worker(worker, LossCause(LossKind.PLAIN_FUNCTION), now, stop=True)
        elif worker.exited:
            self.end_worker(worker, LossCause(LossKind.PROCESS_ENDED), now, stop=True)
        else:
            if worker.state is DONE:
                del self._done[worker.id]
                self._registry.enter(worker, TRAINING)
            worker.run += 1
            worker.run_again_in = self._registry.round
            worker.after_loop = False
            self._heard.heard(worker.id, now)
            worker.heard_at = now
            self._set_stall_timer(worker.id, now)
            self._commands.append(do.RerunFunction(worker.id, worker.run, self._change))

    def end_worker(
        self, worker: Worker, cause: LossCause, now: float, *, stop: bool = False, failure: bool = False
    ) -> None:
        """Remove a worker and start another one on its agent, if the agent may still be used.

        `stop`: its process runs and has to be killed. `failure`: it counts as a failure of its place.
        """
        agent = worker.agent
        if stop:
            self._commands.append(do.StopWorker(agent.id, worker.id, cause))
        if failure:
            self._scheduler.count_failure(agent, now)
        self.remove(worker, cause, now, graceful=not failure)
        self._scheduler.refill(agent, now)

    def release(self, worker: Worker, now: float) -> None:
        """Remove a worker whose slot is not to be used any more, and that no world needs."""
        assert worker.agent.leaving is not None
        self.end_worker(worker, worker.agent.leaving, now, stop=not worker.agent.retiring)

    def remove(self, worker: Worker, cause: LossCause, now: float, *, graceful: bool = False) -> None:
        """Remove the worker from the registry, and break the world if it needed the worker."""
        # a result is lost with its worker: the other members have to run their functions again
        needed = worker.state is TRAINING or worker.id in self._done
        self._registry.enter(worker, GONE)
        self._registry.failed += not graceful
        self._heard.forget(worker.id)
        for kind in _WORKER_TIMERS:
            self._timers.cancel((kind, worker.id))
        self._done.pop(worker.id, None)
        rank = worker.rank if worker.round == self._registry.round else None
        self._context.announce(WorkerLeft(now, worker.id, worker.place, rank, cause, graceful))
        if not graceful and worker.round > 0:
            if worker.round == self._registry.round:
                self._backoff.member_lost()
                if self._shut_down_in == worker.round == self._unequal_in:
                    self._unequal_in = 0
            self._cancelled = cause.root.kind is LossKind.CANCELLED
            self._last_loss = f"worker {worker.id} on {worker.place.host}: {loss_in_words(cause)}"
        if needed:
            change = WorldChange(WorldChangeKind.MEMBER_LOST, rank=worker.rank, host=worker.place.host, cause=cause)
            self._break(change, now)

    def _introduce(self, worker: Worker, now: float) -> None:
        self._timers.cancel(("boot", worker.id))
        if not worker.introduced:
            worker.introduced = True
            self._context.announce(WorkerJoined(now, worker.id, worker.place))

    # --- the end of a world -----------------------------------------------------------------------

    def consider_interrupt(self, now: float) -> None:
        """Ask a running world to stop at an agreed step, if a worker is ready to join it or may leave it."""
        if self.phase is not Phase.RUNNING or self._done or not self._elastic:
            return  # once a member is done, nobody joins any more; a plain function has no step to stop at
        if self._registry.after_loop():
            return  # after the loop there is no step to stop at; newcomers wait for the next loop, or the end
        if not self._registry.may_reset():
            return  # the next world would exceed `reset_limit`, and the present one can go on
        change = decisions.interruption(self._registry, self._settings.min_num_proc)
        if change is None:
            return
        self._change = change
        self._enter(Phase.INTERRUPTED)
        self._paused_at = None
        self._notices += 1
        self._noticed_at = self.furthest
        self._timers.set(("notice", 0), now + self._settings.stall_timeout_s)
        self._commands.append(do.NotifyHostsUpdated(tuple(self._registry.states[TRAINING]), self._notices))
        self._announce_interrupted(now)

    def _announce_interrupted(self, now: float) -> None:
        kind = WaitKind.AGREEMENT if self._paused_at is None else WaitKind.STOP
        wait = Wait(kind, have=self._registry.count(TRAINING), change=self._change)
        self._context.announce_wait(wait, self._timers.get(("notice", 0)), now)

    def on_blocked(self, now: float) -> None:
        """End a too long collective: remove the members that are not in it, or break the world if all are.

        Fails the job if members have left the collective's loop or function, and had done so in an earlier world too.
        """
        limit_s = self._settings.stall_timeout_s
        members = list(self._registry.in_state(TRAINING))
        unequal = decisions.unequal_steps(members, self._done_in_this_round())
        if unequal is not None and self.phase in (Phase.RUNNING, Phase.INTERRUPTED) and self._twice(unequal, now):
            return
        idle = [worker for worker in members if worker.blocked_s is None]
        for worker in idle:
            cause = LossCause(LossKind.BLOCKED_OTHERS, seconds=limit_s)
            self.end_worker(worker, cause, now, stop=True, failure=True)
        if not idle:
            for worker in members:
                worker.blocked_s = None
            change = WorldChange(WorldChangeKind.ALL_BLOCKED, have=len(members), seconds=limit_s, unequal=unequal)
            self._break(change, now)

    def _twice(self, unequal: UnequalSteps, now: float) -> bool:
        """Fail the job if members had left the collectives of others in an earlier world too; return whether it did."""
        if 0 < self._unequal_in < self._registry.round:
            self.fail(UnequalStepsError(left=unequal.left, waiting=unequal.waiting, step=unequal.step), now)
            return True
        self._unequal_in = self._registry.round
        return False

    def _left_early(self, done: Sequence[Worker], now: float) -> bool:
        """Return whether the job fails because a collective has failed after these members had returned, as before.

        A member that calls `hvd.shutdown()` at its end lets those fail that still wait for it. A loss explains it too.
        """
        change = self._change
        abandoned = change.cause is not None and change.cause.kind is LossKind.ABANDONED
        failed = abandoned or change.kind is WorldChangeKind.COLLECTIVE_FAILED
        if not failed or not done or self._backoff.member_is_lost:
            return False
        step = None if done[0].plain else self.furthest.steps
        left = tuple(sorted(worker.rank or 0 for worker in done))
        self._shut_down_in = self._registry.round
        return self._twice(UnequalSteps(left, (change.rank or 0,), step), now)

    def _done_in_this_round(self) -> list[Worker]:
        done = self._done.items()
        return [self._registry.workers[worker] for worker, (_, round) in done if round == self._registry.round]

    def _break(self, change: WorldChange, now: float) -> None:
        if self.phase not in (Phase.RUNNING, Phase.INTERRUPTED):
            return
        assert self.world is not None
        self._enter(Phase.BROKEN)
        if self._paused_at is None:
            self._paused_at = now
        self._change = change
        self._backoff.world_broke(self.furthest, now)
        if self._backoff.count > 1:
            self._commands.append(do.TryConnections())
        self._timers.cancel(("notice", 0))
        training = tuple(self._registry.states[TRAINING])
        if training:
            self._commands.append(do.CutPeers(training, self._registry.round, change))
        for survivor in training:
            self._set_stall_timer(survivor, now)
        self._context.announce(WorldBroken(now, self._registry.round, self.world.size, change))
        if self._left_early(self._done_in_this_round(), now):
            return
        for worker in [self._registry.workers[worker] for worker in sorted(self._done)]:
            self._run_again(worker, now)

    def on_notice_due(self, now: float) -> None:
        """Decide what to do about members that were asked to stop and have not."""
        if self.phase is not Phase.INTERRUPTED:
            return
        limit_s = self._settings.stall_timeout_s
        if self._paused_at is None and (self.furthest > self._noticed_at or self._registry.after_loop()):
            # no member has reached a commit, but they still train: only newcomers have to wait longer
            self._noticed_at = self.furthest
            self._timers.set(("notice", 0), now + limit_s)
        elif self._paused_at is None:
            self._break(WorldChange(WorldChangeKind.NO_STEP, seconds=limit_s), now)
        else:
            self._break(WorldChange(WorldChangeKind.NOT_STOPPED, have=self._registry.count(TRAINING)), now)

    # --- the beginning of a world -----------------------------------------------------------------

    def evaluate(self, now: float) -> None:
        """Enter the next phase if the job waits for nothing more; otherwise announce what is missing."""
        training = self._registry.count(TRAINING)
        if self.phase is Phase.STARTING:
            self._evaluate_start(now)
        elif self.phase is Phase.INTERRUPTED and training:
            self._announce_interrupted(now)
        elif self.phase is Phase.BROKEN and training:
            wait = decisions.survivors_wait(self._registry, self._stall_due - now)
            self._context.announce_wait(wait, self._stall_due, now)
        elif self.phase in _WITH_WORLD and not training:
            self._settle(now)

    def _evaluate_start(self, now: float) -> None:
        ready = self._registry.count(AT_INIT) + self._registry.count(READY)
        in_loop = sum(worker.loop > 0 for worker in self._registry.in_state(AT_INIT, READY))
        if 0 < in_loop < ready:  # a worker in the loop joins no collective of the code before it
            for worker in list(self._registry.in_state(AT_INIT, READY)):
                if not worker.loop:
                    self._admit(worker, now)
            ready = in_loop
        have = ready or len(self._done)  # some functions return without ever asking for a world
        decision = self._gathering.first_world(have, now)
        if ready:
            decision = self._gathering.paced(decision, now)
        if decision.expired:
            self.fail(self._gathering.not_enough(ready, self._last_loss, now), now)
        elif not decision.go:
            self._context.announce_wait(self._gathering.wait_for(decision), decision.deadline, now)
        elif ready:
            self._change = self._gathering.gathered(ready, self._change)
            self._publish(list(self._registry.in_state(AT_INIT, READY)), now)
        else:
            self._finish(now)

    def _settle(self, now: float) -> None:
        """Decide what follows a world whose members have all come back, are done, or are gone."""
        ready = list(self._registry.in_state(READY))
        if self._done and not any(worker.rank is not None for worker in ready):
            self._finish(now)
            return
        if self.phase is Phase.RUNNING:
            self._break(WorldChange(WorldChangeKind.RESULTS_GONE), now)
        held = any(map(self._holds, ready))
        behind = not held and any(map(self._holds, self._registry.in_state(ADMITTED)))
        if not held and not behind and self.furthest.trained:
            self._on_state_lost(now)
            return
        if not held and not behind:
            self._enter(Phase.STARTING)
            self._change = WorldChange(WorldChangeKind.STARTED_OVER, before=self._change)
            self._gathering.begin("elastic_timeout", now)
            self._evaluate_start(now)
            return
        if self.phase is not Phase.WAITING:
            self._gathering.begin("elastic_timeout", now)
        # a holder of the state is on its way to the job's loop; the others wait for it
        members = [] if behind else decisions.select(ready, len(self._done), self._settings.min_num_proc)
        have = len(members) + len(self._done)
        if self._gathering.next_world(have, now).go:
            self._publish(members, now)
            return
        if self.phase is not Phase.WAITING:
            self._enter(Phase.WAITING)
        self._wait_for_replacements(have, now)

    def _wait_for_replacements(self, have: int, now: float) -> None:
        decision = self._gathering.next_world(have, now)
        if decision.expired:
            self.fail(self._gathering.not_enough(have, self._last_loss, now), now)
        else:
            self._context.announce_wait(self._gathering.wait_for(decision), decision.deadline, now)

    def _on_state_lost(self, now: float) -> None:
        """Fail the job. The error is about crashes if they came back until no worker was left.

        The last exit may be reported only after the loss, so the job waits for it for a moment.
        """
        if self._crashes.may_be_a_loop():
            if self._lost_at is None:
                self._lost_at = now
            due = self._lost_at + REPORT_GRACE_S
            if self._crashes.is_a_loop_at_the_end(now):
                self.fail(self._crashes.error(self.furthest, now), now)
                return
            if now < due:
                self._timers.set(("gather", 0), due)
                self._context.announce_wait(Wait(WaitKind.CAUSE), due, now)
                return
        progress, lost = self.furthest.steps, self._last_loss
        self.fail(StateLostError(progress=progress, last_reason=lost, cancelled=self._cancelled), now)

    def _holds(self, worker: Worker) -> bool:
        return worker.version is not None and worker.version.is_current_at(self.furthest)

    def _publish(self, members: list[Worker], now: float) -> None:
        limit = self._registry.reset_limit
        if limit is not None and not self._registry.may_reset():
            reason = change_in_words(self._change)
            self.fail(ResetLimitError(resets=self._registry.round, limit=limit, last_reason=reason), now)
            return
        if self._backoff.is_hopeless(now):
            self.fail(self._gathering.unreachable_peers(self._change), now)
            return
        self._registry.round += 1
        self.world = world = decisions.build_world(self._registry.round, members)
        # a worker that returned without `init()` while others asked for a world adds no result
        self._done = {worker: position for worker, position in self._done.items() if position[1] > 0}
        for worker in list(self._registry.in_state(READY)):
            if worker.id not in world.workers:
                self.release(worker, now)
        for member in world.members:
            worker = self._registry.workers[member.worker]
            self._registry.enter(worker, TRAINING)
            worker.round, worker.rank = world.round, member.rank
        self._timers.cancel(("gather", 0))
        self._timers.cancel(("notice", 0))
        pause = None if self._paused_at is None else now - self._paused_at
        self._backoff.world_began(self.furthest, now)
        self._paused_at = None
        self._enter(Phase.RUNNING)
        self._commands.append(do.PublishWorld(world))
        self._context.announce(
            WorldStarted(now, world.round, world.size, world.root, world.progress, world.sync, pause, self._change)
        )
        self.consider_interrupt(now)  # leaving members may have been kept only because they hold the state
