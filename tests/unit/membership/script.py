"""Scenario scripts: events and the commands that follow, one sentence a line. They document the protocol.

    # what the scenario shows
    settings num=3 min=2 max=3 elastic_timeout=60
    given workers on a a b train at step 10
    @10.2 worker 2 is lost: channel closed
        cut w1 w3 in round 1
    @next tick

A line that begins with `@` is an event at that second (`@next`: at the machine's own next deadline); the indented lines
below it are the machine's answers. `given` is the usual start: one agent and one worker for each host named.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

from spark_elastic.membership import commands as c
from spark_elastic.membership import events as e
from spark_elastic.membership import timeline as t
from spark_elastic.membership.machine import Membership
from spark_elastic.membership.reasons import LossCause, LossKind, crashes_in_words, loss_in_words, reported
from spark_elastic.membership.topology import Place, StateVersion, World
from spark_elastic.settings import ElasticSettings

_NAMES = {"num": "num_proc", "min": "min_num_proc", "max": "max_num_proc"}
_WHOLE = {"num_proc", "min_num_proc", "max_num_proc", "reset_limit", "boot_failure_limit", "crash_limit"}

_EVENTS: list[tuple[str, Callable[..., e.Event]]] = [
    (r"job starts", lambda: e.JobStarted()),
    (r"tick", lambda: e.Tick()),
    (r"agent (\d+) joins slot (\d+) on (\w+)/(\w+)", lambda a, s, h, x: e.AgentJoined(int(a), Place(h, x, int(s)))),
    (r"agent (\d+) is lost: (.*)", lambda a, why: e.AgentLost(int(a), reported(why))),
    (r"agent (\d+) is alive", lambda a: e.AgentAlive(int(a))),
    (r"agent (\d+) is alive and sees worker (\d+) run", lambda a, w: e.AgentAlive(int(a), int(w))),
    (r"slot (\d+) cannot be submitted: (.*)", lambda s, why: e.SlotEnded(int(s), reported(why), submitted=False)),
    (r"slot (\d+) ends: (.*)", lambda s, why: e.SlotEnded(int(s), reported(why))),
    (r"worker (\d+) is ready at init", lambda w: e.WorkerReady(int(w), 0, None, at_init=True)),
    (
        r"worker (\d+) is ready, round (\d+), no state(?: in loop (\d+))?",
        lambda w, r, loop: e.WorkerReady(int(w), int(r), None, loop=int(loop or 1)),
    ),
    (
        r"worker (\d+) is ready, round (\d+), (?:loop (\d+), )?step (\d+)(?:, mark (\d+))?(?: in loop (\d+))?",
        lambda w, r, *at: e.WorkerReady(int(w), int(r), _version(*at[:3]), loop=int(at[3] or at[0] or 1)),
    ),
    (r"worker (\d+) is alive", lambda w: e.WorkerAlive(int(w))),
    (
        r"worker (\d+) is alive at (?:loop (\d+), )?step (\d+)(?:, mark (\d+))?( after the loop)?",
        lambda w, *at: e.WorkerAlive(int(w), _version(*at[:3]), after_loop=at[3] is not None),
    ),
    (
        r"worker (\d+) is alive at (?:loop (\d+), )?step (\d+), blocked for (\d+) s( after the loop)?",
        lambda w, loop, step, s, after: e.WorkerAlive(int(w), _version(loop, step, None), float(s), after is not None),
    ),
    (r"worker (\d+) is blocked for (\d+) s", lambda w, s: e.WorkerAlive(int(w), None, float(s))),
    (
        r"worker (\d+) begins round (\d+) at step (\d+)",
        lambda w, r, step: e.WorkerAlive(int(w), StateVersion(steps=int(step)), begun=int(r)),
    ),
    (
        r"worker (\d+) exits with (-?\d+), killed for memory: (.*)",
        lambda w, code, told: e.WorkerLost(int(w), exited(int(code)), "", 1, told),
    ),
    (r"worker (\d+) exits with (-?\d+): (.*)", lambda w, code, tail: e.WorkerLost(int(w), exited(int(code)), tail)),
    (r"worker (\d+) dies with (-?\d+)", lambda w, code: e.WorkerLost(int(w), dying(int(code)))),
    (r"the address of worker (\d+) is gone", lambda w: e.AddressLost(int(w))),
    (r"worker (\d+) is lost: (.*)", lambda w, why: e.WorkerLost(int(w), reported(why))),
    (r"worker (\d+) abandons: (.*)", lambda w, why: e.WorkerAbandoned(int(w), why)),
    (r"worker (\d+) is done(?:, run (\d+))?", lambda w, run: e.WorkerDone(int(w), has_loop=True, run=int(run or 1))),
    (r"worker (\d+) is done without a loop", lambda w: e.WorkerDone(int(w), has_loop=False)),
    (r"worker (\d+) raises (\w+): (.*)", lambda w, kind, text: e.WorkerRaised(int(w), kind, text, "Traceback ...")),
    (r"executor (\w+) is decommissioned", lambda x: e.ExecutorDecommissioned(x)),
    (r"executor (\w+) is lost: (.*)", lambda x, why: e.ExecutorLost(x, reported(why))),
    (r"hosts are observed: (.*)", lambda text: e.HostsObserved(_hosts(text))),
    (r"any host may be used", lambda: e.HostsObserved(None)),
    (r"the driver stood still for (\d+) s", lambda s: e.DriverPaused(float(s))),
    (r"cancelled: (.*)", lambda why: e.CancelRequested(why)),
]


def exited(code: int) -> LossCause:
    return LossCause(LossKind.EXITED, code=code)


def dying(code: int) -> LossCause:
    return LossCause(LossKind.DYING, code=code)


def step_at(steps: int, *, loop: int = 1, marks: int = 0) -> StateVersion:
    return StateVersion(loop, steps, marks)


def _version(loop: str | None, steps: str, marks: str | None) -> StateVersion:
    return step_at(int(steps), loop=int(loop or 1), marks=int(marks or 0))


def replay(script: str) -> str:
    """Return the script with the answers that the machine gives now."""
    machine: Membership | None = None
    now = 0.0
    lines: list[str] = []
    for line in script.splitlines():
        if line.startswith("    "):
            continue
        lines.append(line)
        if line.startswith("settings "):
            machine = Membership(_settings(line.split()[1:]))
        elif line.startswith("given "):
            assert machine is not None, "settings come first"
            lines += [f"    {text}" for text in _given(machine, line, now)]
        elif line.startswith("@"):
            assert machine is not None, "settings come first"
            when, _, sentence = line[1:].partition(" ")
            if when == "next":
                due = machine.next_deadline()
                if due is None:
                    lines.append("    (no deadline: the job is over)")
                    continue
                now = due
            else:
                now = float(when)
            answers = [text for command in machine.handle(_event(sentence), now) if (text := _told(command))]
            if when == "next":
                answers.insert(0, f"(at {now:g})")
            lines += [f"    {text}" for text in answers]
    return "\n".join(lines) + "\n"


def _settings(words: list[str]) -> ElasticSettings:
    values: dict[str, object] = {"cooldown_range_s": (1.0, 60.0)}
    for word in words:
        name, _, value = word.partition("=")
        name = _NAMES.get(name, name)
        if name in _WHOLE:
            values[name] = int(value)
        elif name == "restart":
            values[name] = value
        elif name == "cooldown":
            values["cooldown_range_s"] = None if value == "none" else tuple(map(float, value.split("..")))
        else:
            values[f"{name}_s"] = float(value)
    return ElasticSettings(**values)  # type: ignore[arg-type]


def _given(machine: Membership, line: str, now: float) -> Iterator[str]:
    match = re.fullmatch(r"given workers on ([\w ]+?)(?: train at step (\d+)| train a plain function)", line)
    assert match, f"cannot read {line!r}"
    hosts, step = match[1].split(), match[2]
    script: list[e.Event] = [e.JobStarted()]
    script += [e.AgentJoined(i, Place(host, f"e{i}", i - 1)) for i, host in enumerate(hosts, 1)]
    script += [e.WorkerReady(i, 0, None, at_init=True) for i in range(1, len(hosts) + 1)]
    if step is not None:
        script += [e.WorkerAlive(i, _version(None, step, None)) for i in range(1, len(hosts) + 1)]
    for event in script:
        for command in machine.handle(event, now):
            if isinstance(command, c.PublishWorld):
                yield _world(command.world)


def _event(sentence: str) -> e.Event:
    for pattern, build in _EVENTS:
        match = re.fullmatch(pattern, sentence)
        if match:
            return build(*match.groups())
    raise AssertionError(f"cannot read {sentence!r}")


def _hosts(text: str) -> dict[str, int]:
    return {host: int(slots) for host, _, slots in (word.partition(":") for word in text.split())}


def _world(world: World) -> str:
    hosts: dict[str, list[str]] = {}
    for member in world.members:
        hosts.setdefault(member.place.host, []).append(f"w{member.worker}")
    ranks = " ".join(f"{host}[{' '.join(workers)}]" for host, workers in hosts.items())
    if world.version is None:
        state = "no state yet"
    elif world.sync:
        state = f"{world.version} from w{world.members[world.root].worker}"
    else:
        state = f"all at {world.version}"
    return f"world {world.round}: {ranks}, {state}"


def _told(command: c.Command) -> str | None:
    match command:
        case c.TryConnections():
            return "try connections"
        case c.LaunchSlot(slot):
            return f"launch slot {slot}"
        case c.WithdrawSlot(slot, cause):
            return f"withdraw slot {slot}: {loss_in_words(cause)}"
        case c.StartWorker(agent, worker):
            return f"start worker {worker} on agent {agent}"
        case c.StopWorker(agent, worker, cause):
            return f"stop worker {worker} on agent {agent}: {loss_in_words(cause)}"
        case c.AdmitProvisionally(worker, rank, size, loop):
            return f"admit w{worker} as rank {rank} of {size}" + (f", to loop {loop}" if loop > 1 else "")
        case c.RerunFunction(worker, run):
            return f"run the function of w{worker} again (run {run})"
        case c.PublishWorld(world):
            return _world(world)
        case c.NotifyHostsUpdated(workers, sequence):
            return f"notify {_workers(workers)} (update {sequence})"
        case c.CutPeers(workers, round):
            return f"cut {_workers(workers)} in round {round}"
        case c.DismissAgent(agent, cause):
            return f"dismiss agent {agent}: {loss_in_words(cause)}"
        case c.FinishJob(workers):
            return f"finish with the results of {_workers(workers)}"
        case c.FailJob(error):
            return f"fail with {type(error).__name__}: {str(error).splitlines()[0]}"
        case c.Announce(t.WaitChanged(_, _, deadline) as waiting):
            return f"- {waiting.reason} (until {deadline:g})"
        case c.Announce(t.HostExcluded(_, host, worlds, until)):
            return f"- host {host} is left alone until {until:g}: {crashes_in_words(worlds)}"
        case c.Announce(t.CooldownStarted(_, kind, name, failures, until)):
            return f"- {kind} {name} failed ({failures}), cools down until {until:g}"
        case c.Announce(t.WorkerLeft(_, worker) as left):
            return f"- w{worker} left: {left.why}"
        case c.Announce(t.DriverStoodStill(_, seconds)):
            return f"- the driver stood still for {seconds:g} s"
        case c.Announce(t.WorldBroken(_, round) as broken):
            return f"- round {round} broke: {broken.why}"
    return None


def _workers(workers: tuple[int, ...]) -> str:
    return " ".join(f"w{worker}" for worker in workers)
