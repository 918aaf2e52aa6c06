"""Deliberate one-line breakages of `membership/`, each of which the simulation has to notice.

A simulation that misses them is decoration. A bug is one replacement in the source of one module; everything that
is built on that module is executed again on top of it, beside the real package.
"""

from __future__ import annotations

import importlib
import sys
import types
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# what the machine is made of, lower floors first; events, commands, states and topology are shared with the checker
_MODULES = ("deadlines", "registry", "failures", "slots", "ranking", "decisions", "worlds", "machine")


@dataclass(frozen=True)
class Bug:
    what: str
    module: str
    right: str
    wrong: str


BUGS = (
    Bug("newcomers go before survivors", "ranking", "newcomer = len(places) + max(", "newcomer = -1 - max("),
    Bug("hosts are mixed", "ranking", "by_host.setdefault(places[worker].host, [])", "by_host.setdefault(worker, [])"),
    Bug(
        "every host counts as a column", "ranking", "cross_size=cross_sizes[local_rank]", "cross_size=len(local_sizes)"
    ),
    Bug(
        "the least advanced is the root",
        "decisions",
        "return (-loop, -steps, -marks), old",
        "return (loop, steps, marks), old",
    ),
    Bug("the youngest of equals is the root", "decisions", "old_rank, worker.id", "-old_rank, worker.id"),
    Bug("the sync is always skipped", "decisions", "sync=not same", "sync=False"),
    Bug(
        "equal steps are taken for equal states",
        "decisions",
        "worker.version == best.version",
        "_standing(worker)[:2] == _standing(best)[:2]",
    ),
    Bug(
        "marks are ignored when the root is chosen",
        "decisions",
        "(-loop, -steps, -marks), old",
        "(-loop, -steps, 0), old",
    ),
    Bug(
        "the loop is ignored when the root is chosen",
        "decisions",
        "(-loop, -steps, -marks), old",
        "(0, -steps, -marks), old",
    ),
    Bug("a leaving worker takes applied steps along", "decisions", "        spared = 1\n", "        spared = 0\n"),
    Bug("leaving workers are never spared", "decisions", "minimum - done - len(staying)", "0 * minimum"),
    Bug(
        "a late job waits for ever",
        "decisions",
        "None if now >= self._until else wait,",
        "None if now >= self._until and wait.kind is not WaitKind.REPLACEMENTS else wait,",
    ),
    Bug(
        "the survivors are not cut", "worlds", "if training and not self._settings.restarts_world:", "if not training:"
    ),
    Bug(
        "a loss does not break the world",
        "worlds",
        "        needed = worker.state is TRAINING or",
        "        needed = worker.state is READY or",
    ),
    Bug(
        "a member that nobody reaches is kept in its world",
        "worlds",
        "if worker.state is TRAINING and not alone and",
        "if self.world is None and not alone and",
    ),
    Bug(
        "a world of one is replaced for its address",
        "worlds",
        "alone = self.world is None or self.world.size == 1",
        "alone = self.world is None",
    ),
    Bug(
        "a world whose members have left their loop is replaced for an address",
        "worlds",
        "not alone and not self._done and not self._registry.after_loop():",
        "not alone:",
    ),
    Bug(
        "connections are never tried again",
        "worlds",
        "if self._quorum.backoff.count > 1:",
        "if self._quorum.backoff.count > 10**9:",
    ),
    Bug(
        "stalled survivors are waited for", "worlds", "        for survivor in training:", "        for survivor in ():"
    ),
    Bug(
        "only one member is notified",
        "worlds",
        "(tuple(self._registry.states[TRAINING]), self",
        "(tuple(self._registry.states[TRAINING])[:1], self",
    ),
    Bug("a lost state goes unnoticed", "worlds", "and self.furthest.trained:", "and self.furthest.loop < 0:"),
    Bug(
        "one world too many",
        "worlds",
        "not self._registry.may_reset():\n            reason",
        "self._registry.round > limit + 1:\n            reason",
    ),
    Bug(
        "a plain function is not run again",
        "worlds",
        "            self.end_worker(worker, LossCause(kind), now)\n",
        "            if worker.exited:\n                self.end_worker(worker, LossCause(kind), now)\n",
    ),
    Bug(
        "a member lost at the end is dropped", "worlds", "worker.state is TRAINING or worker.id in self._done", "False"
    ),
    Bug(
        "a result lost with its agent is dropped",
        "worlds",
        "worker.state is TRAINING or worker.id in self._done",
        "worker.state is TRAINING",
    ),
    Bug("a done worker is not run again", "worlds", "for worker in sorted(self._done):", "for worker in ():"),
    Bug(
        "a worker that finishes in a broken world is not run again",
        "worlds",
        "worker.rerun_round != self._registry.round",
        "worker.rerun_round < 0",
    ),
    Bug(
        "ranks that make unequal steps start again for ever",
        "failures",
        "if 0 < self._last[0] < round:",
        "if 0 > self._last[0]:",
    ),
    Bug(
        "a member that has returned is not missed",
        "worlds",
        "decisions.unequal_steps(members, self._done_in_this_round())",
        "decisions.unequal_steps(members, ())",
    ),
    Bug("an old result counts", "machine", "event.run != worker.run", "event.run > worker.run"),
    Bug("a process that has ended is run again", "worlds", "if worker.plain or worker.exited:", "if worker.plain:"),
    Bug(
        "a newcomer of an earlier loop is put into the world",
        "worlds",
        "if 0 < worker.loop < self",
        "if self._registry.round < 0 < self",
    ),
    Bug(
        "one that came before the next loop began is put into its world",
        "worlds",
        "        if next_loop:",
        "        if not self._elastic:",
    ),
    Bug("some do what comes before the loop beside others in it", "worlds", "if 0 < in_loop < ready:", "if ready < 0:"),
    Bug(
        "one who works after the loop is not waited for", "worlds", "if survivor.after_loop:", "if not survivor.round:"
    ),
    Bug(
        "a process takes part in a second world although all start again",
        "worlds",
        "for member in list(self._registry.in_state(TRAINING, DONE)):",
        "for member in list(self._registry.in_state(DONE)):",
    ),
    Bug(
        "what survivors of a lost peer raise fails the job",
        "machine",
        "if worker is None or worker.state is not TRAINING or not self.settings.restarts_world:",
        "if True:",
    ),
    Bug(
        "an exit is a loss although what was raised is on its way",
        "machine",
        "raises_alone = self.settings.restarts_world and",
        "raises_alone = self.settings.reset_limit == -1 and",
    ),
    Bug(
        "one that ends as it was asked to breaks the world of those that save",
        "worlds",
        "if self._settings.restarts_world and graceful and self.phase",
        "if not self._settings.restarts_world and graceful and self.phase",
    ),
    Bug("the notice has the same number twice", "worlds", "self._notices += 1", "self._notices = 1"),
    Bug("a removed worker's result is kept", "worlds", "self._done.pop(worker.id, None)", "pass"),
    Bug("a message of an older round counts", "machine", "event.round != worker.round or worker", "worker"),
    Bug(
        "a done worker may not exit",
        "machine",
        "if worker.state is DONE:\n            worker.exited",
        "if worker is None:\n            worker.exited",
    ),
    Bug("an agent comes back from the dead", "machine", "event.agent <= slot.newest", "event.agent < 0"),
    Bug(
        "newcomers are never let in",
        "machine",
        "self._worlds.note_version(event.version, now)\n        if event.begun",
        "if event.begun",
    ),
    Bug("a bug in the function goes unnoticed", "machine", "seen.WorkerRaised: self._on_worker_raised,", ""),
    Bug(
        "a silent worker is kept",
        "machine",
        "silent = self.registry.workers[worker]\n",
        "if True:\n            return\n        silent = self.registry.workers[worker]\n",
    ),
    Bug("one death counts twice", "slots", "if slot.excused or agent.retiring:", "if agent.retiring:"),
    Bug("a place is used before it cooled down", "slots", "        if due > now:\n", "        if due > now + 1e9:\n"),
    Bug("a process that hangs at boot is kept", "slots", "self._context.boot_timer.start(worker.id, now)", "pass"),
    Bug(
        "a decommissioned executor is used",
        "slots",
        "if place.executor in self._decommissioned:",
        "if place.executor in ():",
    ),
    Bug("the limits of a host are ignored", "slots", "(None if position < limit else too_many)", "None"),
    Bug("the cooldown does not grow", "failures", "min(longest, shortest * 2.0 ** min(doublings, 60))", "shortest"),
    Bug(
        "a crash that always comes back is never given up",
        "failures",
        "in self.crashes(now)) >= self.limit",
        "in self.crashes(now)) > 1000",
    ),
    Bug(
        "crashes between which steps were applied are a row",
        "failures",
        "if version.is_steps_after(self._version):",
        "if 0:",
    ),
    Bug(
        "crashes of one world are counted one by one",
        "failures",
        "self.worlds_with_deaths() < self.limit:\n            return False\n"
        "        return _worlds(member for member, _ in self.crashes(now)) >= self.limit",
        "len(self._deaths) < self.limit:\n            return False\n"
        "        return len(self.crashes(now)) >= self.limit",
    ),
    Bug(
        "a host where everything crashes is forgotten at once",
        "slots",
        "self._excluded[host] = LossCause",
        'self._excluded[""] = LossCause',
    ),
    Bug(
        "a busy worker is given up",
        "machine",
        "if now - worker.heard_at < self.settings.stall_timeout_s:",
        "if now < 0:",
    ),
    Bug(
        "a slow clock is taken for silence",
        "machine",
        "self._on_worker_silent, settings.heartbeat_timeout_s)",
        "self._on_worker_silent, 1.15 * settings.heartbeat_interval_s)",
    ),
    Bug("silence never ends", "machine", "if now > silence.next() + interval_s:", "if now >= silence.next():"),
    Bug(
        "workers wait on although they are enough again",
        "worlds",
        "if decision.go:\n            self._publish",
        "if self.phase is not Phase.WAITING and decision.go:\n            self._publish",
    ),
)


def machine_with(bug: Bug | None) -> Any:
    """Return the `Membership` class built from sources with the bug in them; None: without a bug.

    Raises: LookupError: if the text to replace is not there exactly once.
    """
    package = importlib.import_module("spark_elastic.membership")
    names = [f"spark_elastic.membership.{module}" for module in _MODULES]
    real = {name: importlib.import_module(name) for name in names}
    try:
        for module, name in zip(_MODULES, names, strict=True):
            path = Path(str(real[name].__file__))
            source = path.read_text()
            if bug is not None and bug.module == module:
                if source.count(bug.right) != 1:
                    raise LookupError(
                        f"{bug.what!r} does not apply: {bug.right!r} is {source.count(bug.right)} times in {module}"
                    )
                source = source.replace(bug.right, bug.wrong)
            copy = types.ModuleType(name)
            copy.__file__ = str(path)
            sys.modules[name] = copy
            setattr(package, module, copy)
            exec(compile(source, str(path), "exec"), copy.__dict__)
        return sys.modules["spark_elastic.membership.machine"].Membership  # type: ignore[attr-defined]
    finally:
        for module, name in zip(_MODULES, names, strict=True):
            sys.modules[name] = real[name]
            setattr(package, module, real[name])
