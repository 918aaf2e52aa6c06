"""The wait for enough workers: how long it may last, what is missing, and the error when the job gives up."""

from __future__ import annotations

import dataclasses

from spark_elastic.errors import JobError, NotEnoughSlotsError
from spark_elastic.membership import decisions
from spark_elastic.membership.backoff import RegroupBackoff
from spark_elastic.membership.decisions import Decision
from spark_elastic.membership.reasons import Wait, WaitKind, WorldChange, WorldChangeKind
from spark_elastic.membership.registry import ADMITTED, BOOTING, MachineContext
from spark_elastic.membership.slots import SlotScheduler
from spark_elastic.membership.wording import change_in_words, counted, loss_in_words, missing_in_words, worlds_in_words

_MOST_CAUSES_NAMED = 5


class Gathering:
    """Decides when enough workers are ready for the next world. It reads the registry and changes nothing in it."""

    def __init__(self, context: MachineContext, scheduler: SlotScheduler) -> None:
        self._settings = context.settings
        self._registry = context.registry
        self._timers = context.timers
        self._scheduler = scheduler
        #: Since when the job waits, until when, and the setting that says how long.
        self._since = 0.0
        self._until = 0.0
        self._setting = "start_timeout"
        #: Since when min_num_proc workers are ready for the first world; None: they are not.
        self._enough_since: float | None = None
        self.backoff = RegroupBackoff(
            context.settings.cooldown_range_s,
            early_s=context.settings.stall_timeout_s,
            give_up_s=context.settings.elastic_timeout_s,
        )

    def begin(self, setting: str, now: float) -> None:
        """Begin to wait, for as long as "start_timeout" or "elastic_timeout" allows."""
        limit_s = self._settings.start_timeout_s if setting == "start_timeout" else self._settings.elastic_timeout_s
        self._since, self._until, self._setting = now, now + limit_s, setting
        self._enough_since = None
        self._timers.set(("gather", 0), self._until)

    def end(self) -> None:
        """Stop waiting: a world is published."""
        self._enough_since = None
        self._timers.cancel(("gather", 0))

    def first_world(self, have: int, now: float) -> Decision:
        """Decide if `have` workers start without a state."""
        if have < self._settings.min_num_proc:
            self._enough_since = None
        elif self._enough_since is None:
            self._enough_since = now
        return decisions.start(have, self._settings, now, enough_since=self._enough_since, deadline=self._until)

    def gathered(self, ready: int, before: WorldChange) -> WorldChange:
        """Return why a world without a state starts now; `before`: why one had to be gathered."""
        return WorldChange(
            WorldChangeKind.GATHERED,
            have=ready,
            want=self._settings.num_proc,
            need=self._settings.min_num_proc,
            seconds=self._settings.start_grace_s,
            before=before,
        )

    def next_world(self, have: int, now: float) -> Decision:
        """Decide if `have` workers go on with their state."""
        return self.paced(decisions.regroup(have, self._settings, now, deadline=self._until), now)

    def paced(self, decision: Decision, now: float) -> Decision:
        """Hold a world back if the worlds before it broke in a row with no worker lost."""
        until = self.backoff.retry_at
        if not decision.go or until <= now:
            return decision
        return Decision(False, Wait(WaitKind.RETRY, self.backoff.count, left_s=until - now), until)

    def wait_for(self, decision: Decision) -> Wait:
        """Set the timer for a decision to wait. Returns the wait, with why slots are missing."""
        assert decision.wait is not None
        assert decision.deadline is not None
        self._timers.set(("gather", 0), decision.deadline)
        return dataclasses.replace(decision.wait, missing=self._scheduler.causes_of_missing())

    def not_enough(self, have: int, last_loss: str, now: float) -> NotEnoughSlotsError:
        """Return the error for too few workers in time."""
        registry, booting = self._registry, self._registry.count(BOOTING)
        detail = (
            f"{counted(len(registry.agents), 'agent')} had joined, {counted(booting, 'worker')} "
            f"{'was' if booting == 1 else 'were'} still booting, {registry.count(ADMITTED)} building their model; "
            f"last loss: {last_loss}"
        )
        if missing := missing_in_words(self._scheduler.causes_of_missing()):
            detail += f"; {missing}"
        unused = sorted({loss_in_words(agent.leaving) for agent in registry.agents.values() if agent.leaving})
        if unused:
            detail += f"; agents that are not used: {'; '.join(unused[:_MOST_CAUSES_NAMED])}"
        return NotEnoughSlotsError(
            have=have,
            need=self._settings.min_num_proc,
            waited_s=now - self._since,
            setting=self._setting,
            detail=detail,
        )

    def unreachable_peers(self, change: WorldChange) -> JobError:
        """Return the error for worlds that broke in a row with no worker lost."""
        return JobError(
            f"{worlds_in_words(self.backoff.count)} broke before they applied a step, with no worker lost "
            f"(last: {change_in_words(change)}); check that the workers reach one another: name the interfaces to use "
            "in nics, and look for a firewall between the hosts"
        )
