"""The worlds of a job. The life of a job, in the phases of `states.PHASES`:

STARTING: agents start workers, which wait in `init()` or in their elastic loop until enough are ready (`Quorum`).
RUNNING: these are published as a world, and train.
INTERRUPTED: a newcomer is ready or a member is to leave; the members stop at an agreed step and report ready.
BROKEN: a member is lost or a collective failed; the others are cut from it, return to a mark and report ready.
RUNNING again, once all members have reported (`_settle`): the next world has the most advanced state.
WAITING: they are too few, and keep their state until replacements are ready or the time is over.
FINISHED: the functions of all members have returned. If the world breaks before, they are called again.
FAILED: the state is lost, too few workers came in time, a worker raised, or each world breaks.
An event changes workers (the methods `on_...`); `evaluate`, called after each event, changes the phase.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from spark_elastic.errors import JobError, ResetLimitError, StateLostError, UnequalStepsError
from spark_elastic.membership import commands as do
from spark_elastic.membership import decisions
from spark_elastic.membership.deadlines import Timer
from spark_elastic.membership.failures import REPORT_GRACE_S, EarlyLeaves
from spark_elastic.membership.reasons import (
    LossCause,
    LossKind,
    Wait,
    WaitKind,
    WorldChange,
    WorldChangeKind,
    change_in_words,
    counted,
    loss_in_words,
)
from spark_elastic.membership.registry import ADMITTED, AT_INIT, BOOTING, DONE, GONE, READY, TRAINING, Worker
from spark_elastic.membership.slots import MachineContext, SlotScheduler
from spark_elastic.membership.states import PHASES, Phase
from spark_elastic.membership.timeline import JobEnded, WorkerJoined, WorkerLeft, WorldBroken, WorldStarted
from spark_elastic.membership.topology import BEGINNING, StateVersion, WorkerId, World

_WITH_WORLD = (Phase.RUNNING, Phase.INTERRUPTED, Phase.BROKEN, Phase.WAITING)


class WorldLifecycle:
    """Decides which workers train together: the phase of the job, its worlds, and their members.

    It calls the slot scheduler, and never `Membership`. All TRAINING workers are members of the newest world.
    """

    def __init__(self, context: MachineContext, scheduler: SlotScheduler) -> None:
        self._context = context
        self._settings = context.settings
        self._registry = context.registry
        timers, stall_timeout_s = context.timers, context.settings.stall_timeout_s
        self._stall_timer = Timer(timers, self._on_stall_due, stall_timeout_s)
        self._notice_timer = Timer[int](timers, lambda _, now: self._on_notice_due(now), stall_timeout_s)
        self._crashes = context.crashes
        self._commands = context.commands
        self._scheduler = scheduler
        self.phase = Phase.CREATED
        self.world: World | None = None  # the newest world, also after it broke; None before the first
        self.furthest = BEGINNING  # the most advanced version that any worker ever reported
        self._elastic = False  # a worker showed a state, so the function has an elastic loop
        self._quorum = decisions.Quorum(context, scheduler)
        self._done: dict[WorkerId, tuple[int, int]] = {}  # the workers that are DONE: last rank and last round
        self._notices = 0  # the sequence number of the newest hosts-updated notice
        self._change = WorldChange(WorldChangeKind.JOB_STARTS)  # why the next world is built
        self._last_loss = "none"  # in words, for errors
        self._early_leaves = EarlyLeaves()
        self._cancelled = False  # the last loss was that of a job which Spark was asked to cancel
        self._noticed_at = BEGINNING  # INTERRUPTED: `furthest` when the members were last asked to stop
        self._stall_due = 0.0  # BROKEN: when survivors that have not come back are removed
        self._lost_at: float | None = None  # when the last holder of the state went, until it is known how
        self._paused_at: float | None = None  # when the newest world broke, or its first member stopped

    # --- beginning and end ------------------------------------------------------------------------

    def start(self, now: float) -> None:
        """Start the job: gather workers for the first world."""
        self._set_phase(Phase.STARTING)
        self._quorum.start("start_timeout", now)

    def fail(self, error: JobError, now: float) -> None:
        self._set_phase(Phase.FAILED)
        self._commands.append(do.FailJob(error))
        self._context.announce(JobEnded(now, "failed", str(error)))

    def _finish(self, now: float) -> None:
        # a worker that was done in an earlier world comes before the one that inherited its rank
        order = sorted(self._done, key=lambda worker: (*self._done[worker], worker))
        self._set_phase(Phase.FINISHED)
        self._commands.append(do.FinishJob(tuple(order)))
        are = "is" if len(order) == 1 else "are"
        self._context.announce(JobEnded(now, "finished", f"{counted(len(order), 'worker')} {are} done"))

    def _set_phase(self, phase: Phase) -> None:
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
        """Store that the worker waits in `init()`; admit it if the running world has an elastic loop.

        As long as no worker has reported a state, the function may have no loop: then this worker needs a world itself.
        """
        self._introduce(worker, now)
        self._registry.move(worker, AT_INIT)
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

    def _on_stall_due(self, number: WorkerId, now: float) -> None:
        """Remove a survivor that has not come back in time. One that runs the code after its loop gets more time."""
        survivor = self._registry.workers[number]
        if survivor.after_loop:
            self._set_stall_timer(survivor.id, now)
        else:
            late = LossCause(LossKind.NOT_BACK, seconds=self._settings.stall_timeout_s)
            self.end_worker(survivor, late, now, failed=True)

    def _set_stall_timer(self, survivor: WorkerId, now: float) -> None:
        self._stall_due = now + self._settings.stall_timeout_s
        self._stall_timer.start(survivor, now)

    def _skip_to_the_loop(self, worker: Worker, now: float) -> None:
        """Admit a worker that waits in an earlier elastic loop than the job is in."""
        if 0 < worker.loop < self.furthest.loop:
            worker.rank = None  # it comes back as a newcomer
            self._admit(worker, now)

    def _admit(self, worker: Worker, now: float) -> None:
        self._registry.move(worker, ADMITTED)
        members = self._registry.count(TRAINING, READY, ADMITTED) - 1
        self._context.boot_timer.start(worker.id, now)
        self._commands.append(do.AdmitProvisionally(worker.id, members, members + 1, self.furthest.loop))

    def on_ready(self, worker: Worker, version: StateVersion | None, loop: int, now: float) -> None:
        """Store that the worker waits for the next world in elastic loop number `loop`."""
        self._introduce(worker, now)
        member = worker.state is TRAINING
        self._registry.move(worker, READY)
        worker.version, worker.loop, worker.after_loop = version, loop, False
        self._stall_timer.cancel(worker.id)
        if not member:
            self.consider_interrupt(now)
        elif self.phase is Phase.RUNNING:
            # it was not asked to stop: it saw its neighbour die before the driver did, and the others may hang
            self._break(WorldChange(WorldChangeKind.COLLECTIVE_FAILED, rank=worker.rank, host=worker.place.host), now)
        elif self.phase is Phase.INTERRUPTED and self._paused_at is None:
            self._paused_at = now
            # all members stop at the same step; one that does not is blocked in a collective that the others have left
            self._notice_timer.set(0, now + self._settings.heartbeat_timeout_s)
        self._skip_to_the_loop(worker, now)

    def on_address_lost(self, worker: Worker, now: float) -> None:
        """Replace the world of a member that cannot be reached any more, unless one has left the loop's collectives."""
        alone = self.world is None or self.world.size == 1
        if worker.state is TRAINING and not alone and not self._done and not self._registry.after_loop():
            self._break(WorldChange(WorldChangeKind.ADDRESS_LOST, rank=worker.rank, host=worker.place.host), now)

    def on_done(self, worker: Worker, has_loop: bool, now: float) -> None:
        """Store that the worker's function returned, or have it run again if its world is broken."""
        self._cancel_timers(worker)
        worker.plain = not has_loop
        again = worker.plain or worker.rerun_round != self._registry.round
        if worker.state is TRAINING and self.phase is Phase.BROKEN and again:
            if not self._left_early([worker], now):
                self._run_again(worker, now)
            return
        self._registry.move(worker, DONE)
        if worker.round > 0 or self._registry.round == 0:  # a newcomer that never trained adds no result
            self._done[worker.id] = (worker.rank or 0, worker.round)

    def _run_again(self, worker: Worker, now: float) -> None:
        """Have a worker that returned in a broken world call its function again: its result does not count."""
        if worker.plain or worker.exited:
            kind = LossKind.PLAIN_FUNCTION if worker.plain else LossKind.PROCESS_ENDED
            self.end_worker(worker, LossCause(kind), now)
            return
        if worker.state is DONE:
            del self._done[worker.id]
            self._registry.move(worker, TRAINING)
        worker.run += 1
        worker.rerun_round = self._registry.round
        worker.after_loop = False
        self._context.silence.start(worker.id, now)
        worker.heard_at = now
        self._set_stall_timer(worker.id, now)
        self._commands.append(do.RerunFunction(worker.id, worker.run, self._change))

    def end_worker(self, worker: Worker, cause: LossCause, now: float, stop: bool = True, failed: bool = False) -> None:
        """Remove a worker and start another one on its agent, if the agent may still be used.

        `stop`: its process runs and has to be killed. `failed`: it counts as a failure of its slot, executor and host.
        """
        agent = worker.agent
        if stop:
            self._commands.append(do.StopWorker(agent.id, worker.id, cause))
        if failed:
            self._scheduler.count_failure(agent, now)
        self.remove(worker, cause, now, graceful=not failed)
        self._scheduler.refill(agent, now)

    def release(self, worker: Worker, now: float) -> None:
        """Remove a worker whose slot is not to be used any more, and that no world needs."""
        assert worker.agent.leaving is not None
        self.end_worker(worker, worker.agent.leaving, now, stop=not worker.agent.retiring)

    def remove(self, worker: Worker, cause: LossCause, now: float, *, graceful: bool = False) -> None:
        """Remove the worker from the registry, and break the world if it needed the worker."""
        # a result is lost with its worker: the other members have to run their functions again
        needed = worker.state is TRAINING or worker.id in self._done
        self._registry.move(worker, GONE)
        self._registry.failed += not graceful
        self._cancel_timers(worker)
        self._done.pop(worker.id, None)
        rank = worker.rank if worker.round == self._registry.round else None
        self._context.announce(WorkerLeft(now, worker.id, worker.place, rank, cause, graceful))
        if not graceful and worker.round > 0:
            if worker.round == self._registry.round:
                self._quorum.backoff.member_lost()
                self._early_leaves.member_lost(worker.round)
            self._cancelled = cause.root.kind is LossKind.CANCELLED
            self._last_loss = f"worker {worker.id} on {worker.place.host}: {loss_in_words(cause)}"
        if self._settings.restarts_world and graceful and self.phase is Phase.INTERRUPTED:
            self._paused_at = now if self._paused_at is None else self._paused_at  # it has ended as it was asked to
        elif needed:
            change = WorldChange(WorldChangeKind.MEMBER_LOST, rank=worker.rank, host=worker.place.host, cause=cause)
            self._break(change, now)

    def _cancel_timers(self, worker: Worker) -> None:
        context = self._context
        for timer in (context.silence, context.boot_timer, context.exit_timer, self._stall_timer):
            timer.cancel(worker.id)

    def _introduce(self, worker: Worker, now: float) -> None:
        self._context.boot_timer.cancel(worker.id)
        if worker.state is BOOTING:
            self._context.announce(WorkerJoined(now, worker.id, worker.place))

    # --- the end of a world -----------------------------------------------------------------------

    def consider_interrupt(self, now: float) -> None:
        """Ask a running world to stop at an agreed step, if a worker is ready to join it or may leave it."""
        if self.phase is not Phase.RUNNING or self._done or not (self._elastic or self._settings.restarts_world):
            return  # once a member is done, no worker joins any more; a plain function has no step to stop at
        if self._registry.after_loop():
            return  # after the loop there is no step to stop at; newcomers wait for the next loop, or the end
        retiring = any(worker.agent.retiring for worker in self._registry.in_state(TRAINING))
        if not self._registry.may_reset() and not (self._settings.restarts_world and retiring):
            return  # the next world would exceed `reset_limit`, and the present one can continue
        if (change := decisions.interruption(self._context, now)) is None:
            return
        self._change = change
        self._set_phase(Phase.INTERRUPTED)
        self._paused_at = None
        self._notices += 1
        self._noticed_at = self.furthest
        self._notice_timer.set(0, now + decisions.patience_s(self._settings, change))
        self._commands.append(do.NotifyHostsUpdated(tuple(self._registry.states[TRAINING]), self._notices))
        self._announce_interrupted(now)

    def _announce_interrupted(self, now: float) -> None:
        kind = WaitKind.AGREEMENT if self._paused_at is None else WaitKind.STOP
        kind = WaitKind.END if self._settings.restarts_world else kind
        members = self._registry.count(TRAINING)
        self._context.announce_wait(Wait(kind, members, change=self._change), self._notice_timer.due(0), now)

    def on_blocked(self, now: float) -> None:
        """End a too long collective: remove the members that are not in it, or break the world if all are.

        Fails the job if members have left the collective's loop or function, and had done so in an earlier world too.
        """
        limit_s = self._settings.stall_timeout_s
        members = list(self._registry.in_state(TRAINING))
        unequal = decisions.unequal_steps(members, self._done_in_this_round())
        trains = self.phase in (Phase.RUNNING, Phase.INTERRUPTED)
        if unequal is not None and trains and self._fails_for(unequal, False, now):
            return
        idle = [worker for worker in members if worker.blocked_s is None]
        for worker in idle:
            if worker.state is TRAINING:  # where all start again, the end of the first is the end of all
                self.end_worker(worker, LossCause(LossKind.BLOCKED_OTHERS, seconds=limit_s), now, failed=True)
        if not idle:
            for worker in members:
                worker.blocked_s = None
            change = WorldChange(WorldChangeKind.ALL_BLOCKED, have=len(members), seconds=limit_s, unequal=unequal)
            self._break(change, now)

    def _fails_for(self, unequal: UnequalStepsError, inferred: bool, now: float) -> bool:
        """Fail the job if members had left the collectives of others in an earlier world too; return whether it did."""
        again = self._early_leaves.came_back(self._registry.round, inferred)
        if again:
            self.fail(unequal, now)
        return again

    def _left_early(self, done: Sequence[Worker], now: float) -> bool:
        """Return whether the job fails because a collective has failed after these members had returned, as before."""
        unequal = decisions.left_early(self._change, done, self.furthest.steps)
        if unequal is None or self._quorum.backoff.member_is_lost:  # a loss explains it too
            return False
        return self._fails_for(unequal, True, now)

    def _done_in_this_round(self) -> list[Worker]:
        return [self._registry.workers[w] for w, (_, round) in self._done.items() if round == self._registry.round]

    def _break(self, change: WorldChange, now: float) -> None:
        if self.phase not in (Phase.RUNNING, Phase.INTERRUPTED):
            return
        assert self.world is not None
        self._set_phase(Phase.BROKEN)
        self._paused_at = now if self._paused_at is None else self._paused_at
        self._change = change
        late = change.kind in (WorldChangeKind.NO_STEP, WorldChangeKind.NOT_STOPPED)
        if not (self._settings.restarts_world and late):  # a planned restart says nothing about the network
            self._quorum.backoff.world_broke(self.furthest, now)
        if self._quorum.backoff.count > 1:
            self._commands.append(do.TryConnections())
        self._notice_timer.cancel(0)
        training = tuple(self._registry.states[TRAINING])
        if training and not self._settings.restarts_world:
            self._commands.append(do.CutPeers(training, self._registry.round, change))
        for survivor in training:
            self._set_stall_timer(survivor, now)
        self._context.announce(WorldBroken(now, self._registry.round, self.world.size, change))
        if self._settings.restarts_world:
            for member in list(self._registry.in_state(TRAINING, DONE)):
                self.end_worker(member, LossCause(LossKind.WORLD_RESTARTS), now)
        elif not self._left_early(self._done_in_this_round(), now):
            for worker in sorted(self._done):
                self._run_again(self._registry.workers[worker], now)

    def _on_notice_due(self, now: float) -> None:
        """Decide what to do about members that were asked to stop and have not."""
        if self.phase is not Phase.INTERRUPTED:
            return
        if self._paused_at is None and (self.furthest > self._noticed_at or self._registry.after_loop()):
            # no member has reached a commit, but they still train: only newcomers have to wait longer
            self._noticed_at = self.furthest
            self._notice_timer.start(0, now)
        elif self._paused_at is None:
            limit_s = decisions.patience_s(self._settings, self._change)
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
        ready = self._registry.count(AT_INIT, READY)
        in_loop = sum(worker.loop > 0 for worker in self._registry.in_state(AT_INIT, READY))
        if 0 < in_loop < ready:  # a worker in the loop joins no collective of the code before it
            for worker in list(self._registry.in_state(AT_INIT, READY)):
                if not worker.loop:
                    self._admit(worker, now)
            ready = in_loop
        have = ready or len(self._done)  # some functions return without ever asking for a world
        decision = self._quorum.first_world(have, now)
        if ready:
            decision = self._quorum.paced(decision, now)
        if not decision.go:
            self._wait_or_fail(decision, ready, now)
        elif ready:
            want, need, grace_s = self._quorum.wanted(), self._settings.min_num_proc, self._settings.start_grace_s
            self._change = WorldChange(WorldChangeKind.GATHERED, ready, want, need, grace_s, before=self._change)
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
        held = any(worker.is_current_at(self.furthest) for worker in ready)
        behind = not held and any(worker.is_current_at(self.furthest) for worker in self._registry.in_state(ADMITTED))
        if not held and not behind and self.furthest.trained:
            self._on_state_lost(now)
            return
        if not held and not behind:
            self._set_phase(Phase.STARTING)
            again = WorldChangeKind.RESTARTED if self._settings.restarts_world else WorldChangeKind.STARTED_OVER
            self._change = WorldChange(again, before=self._change)
            self._quorum.start("elastic_timeout", now)
            self._evaluate_start(now)
            return
        if self.phase is not Phase.WAITING:
            self._quorum.start("elastic_timeout", now)
        # a holder of the state is on its way to the job's loop; the others wait for it
        members = [] if behind else decisions.select(ready, len(self._done), self._settings.min_num_proc)
        have = len(members) + len(self._done)
        decision = self._quorum.next_world(have, now)
        if decision.go:
            self._publish(members, now)
            return
        if self.phase is not Phase.WAITING:
            self._set_phase(Phase.WAITING)
        self._wait_or_fail(decision, have, now)

    def _wait_or_fail(self, decision: decisions.Decision, have: int, now: float) -> None:
        if decision.wait is None:
            self.fail(self._quorum.not_enough(have, self._last_loss, now), now)
            return
        self._quorum.timer.set(0, decision.deadline)
        missing = self._scheduler.causes_of_missing()
        self._context.announce_wait(replace(decision.wait, missing=missing), decision.deadline, now)

    def _on_state_lost(self, now: float) -> None:
        """Fail the job: because of crashes, if they came back. The last exit is waited for, as it is reported later."""
        if self._crashes.worlds_with_deaths() > 1:
            self._lost_at = now if self._lost_at is None else self._lost_at
            if self._crashes.is_a_loop_at_the_end(now):
                self.fail(self._crashes.error(self.furthest, now), now)
                return
            if now < (due := self._lost_at + REPORT_GRACE_S):
                self._quorum.timer.set(0, due)
                self._context.announce_wait(Wait(WaitKind.CAUSE), due, now)
                return
        error = StateLostError(progress=self.furthest.steps, last_reason=self._last_loss, cancelled=self._cancelled)
        self.fail(error, now)

    def _publish(self, members: list[Worker], now: float) -> None:
        limit = self._registry.reset_limit
        if limit is not None and not self._registry.may_reset():
            reason = change_in_words(self._change)
            self.fail(ResetLimitError(resets=self._registry.round, limit=limit, last_reason=reason), now)
            return
        if self._quorum.backoff.is_hopeless(now):
            self.fail(self._quorum.unreachable_peers(self._change), now)
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
            self._registry.move(worker, TRAINING)
            worker.round, worker.rank = world.round, member.rank
        self._quorum.timer.cancel(0)
        self._notice_timer.cancel(0)
        pause = None if self._paused_at is None else now - self._paused_at
        self._quorum.backoff.world_began(self.furthest, now)
        self._paused_at = None
        self._context.world_began_at = now
        self._set_phase(Phase.RUNNING)
        self._commands.append(do.PublishWorld(world))
        self._context.announce(
            WorldStarted(now, world.round, world.size, world.root, world.progress, world.sync, pause, self._change)
        )
        self.consider_interrupt(now)  # leaving members may have been kept only because they hold the state
