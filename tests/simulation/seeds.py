"""Makes a job with failures from a seed, and runs it.

    python -m tests.simulation.seeds FIRST LAST            # 1 to 8 workers each
    python -m tests.simulation.seeds FIRST LAST --large    # 10 to 200
    python -m tests.simulation.seeds FIRST LAST --huge     # 1,000

Prints the seeds that fail; the exit status is 1 if there are any.
"""

from __future__ import annotations

import argparse
import dataclasses
import random
import sys
from typing import Any

from spark_elastic.membership.machine import Membership
from spark_elastic.settings import ElasticSettings
from tests.simulation.cluster import Cluster
from tests.simulation.plan import Plan

FAULTS = (
    ["kill worker"] * 6
    + ["kill executor"] * 3
    + ["drain executor"] * 3
    + ["new executor"] * 2
    + [
        "kill agent",
        "stop worker",
        "stop worker",
        "busy worker",
        "pause driver",
        "hang worker",
        "cut off executor",
        "narrow hosts",
        "hosts apart",
        "partition",
        "partition",
        "lose address",
    ]
)


def plan_of(rng: random.Random, *, large: bool = False, huge: bool = False) -> Plan:
    """Draw a job and its failures: 1 to 8 workers on up to 4 hosts; large: 10 to 200 on up to 60, with few steps; huge:
    1,000, eight on a host, with a step or two.
    """
    hosts, cores = rng.randint(1, 4), rng.randint(1, 3)
    max_num_proc = rng.choice([1, 2, 3, 4, 4, 5, 6, 7, 8])
    if large:
        hosts, cores = rng.randint(5, 60), rng.randint(2, 4)
        max_num_proc = min(rng.randint(20, 200), hosts * cores)
    if huge:
        hosts, cores, max_num_proc, large = 126, 8, 1000, True
    num_proc = max_num_proc if huge else rng.randint(1, max_num_proc)
    settings = ElasticSettings(
        num_proc=num_proc,
        min_num_proc=rng.randint(1, (num_proc + 1) // 2 if large else num_proc),
        max_num_proc=max_num_proc,
        start_timeout_s=rng.choice([15.0, 120.0, 120.0]),
        elastic_timeout_s=rng.choice([5.0, 20.0, 120.0]),
        start_grace_s=rng.choice([0.0, 3.0, 10.0]),
        heartbeat_timeout_s=10.0,
        stall_timeout_s=40.0,
        reset_limit=rng.choice([None] * 8 + [0, 3]),
        cooldown_range_s=rng.choice([(0.5, 60.0), (0.5, 60.0), (0.1, 2.0), None]),
        boot_failure_limit=3,
        crash_limit=rng.choice([2, 3, 3, None]),
    )
    plain = rng.random() < 0.2
    steps = rng.randint(3, 20) if large else rng.choice([rng.randint(3, 40), rng.randint(20, 120)])
    if huge:
        steps = rng.randint(1, 2)
    horizon = steps * 0.4 + 8
    faults = [(rng.uniform(0, horizon), rng.choice(FAULTS)) for _ in range(rng.choice([0, 1, 2, 3, 5, 8, 12]))]
    if faults and rng.random() < 0.3:  # bad luck comes in pairs
        faults += [(faults[0][0] + rng.uniform(0, 0.1), "kill worker")]
    end_s = rng.choice([0.5, 0.5, 5.0, 100.0])
    deaths_at_the_end = [rng.uniform(0, 2 * end_s) for _ in range(rng.choice([0, 0, 0, 1, 2]))]
    poison = rng.random() < 0.1 and not plain and settings.crash_limit is not None
    return Plan(
        settings=settings,
        steps=steps,
        commit_every=rng.choice([1, 1, 1, 5]),
        turns=rng.choice([0.0, 0.2, 0.5]),
        loops=1 if plain else rng.choice([1, 1, 2]),
        plain=plain,
        no_init=plain and rng.random() < 0.2,
        come_back=rng.choice([1.0, 1.0, 0.5, 0.0]),
        hosts=hosts,
        cores=cores,
        faults=tuple(faults),
        raises_at=rng.randint(1, steps) if rng.random() < 0.05 else None,
        end_s=end_s,
        collectives_at_the_end=rng.choice([0, 0, 1, 2]),
        deaths_at_the_end=tuple(deaths_at_the_end),
        unlucky=rng.choice([0.0, 0.0, 0.1, 0.3]) * (4 / max_num_proc if large else 1),  # of each of its workers
        boot_hang=rng.choice([0.0] * 5 + [0.3]),
        boot_crash=rng.choice([0.0] * 9 + [0.3]),
        poison_at=rng.randint(1, steps) if poison else None,
        poison_host=rng.choice([None, "host0"]) if poison else None,
        poison_exit=rng.choice([-11, -9, 3]),
    )


def _is_unequal(seed: int) -> bool:
    """Draw if ranks make unequal steps, of a generator of its own: the other jobs are the same with it and without."""
    return random.Random(f"{seed} unequal").random() < 0.04


def _restarting(seed: int, plan: Plan) -> Plan:
    """Return the plan, in some seeds as that of a job with `restart="world"`. Drawn as `_is_unequal` is."""
    rng = random.Random(f"{seed} restarts")
    if rng.random() >= 0.1 or plan.poison_exit == -9:
        return plan
    poison_at = plan.poison_at and min(plan.poison_at, 20)  # in a longer world, a crash is no reason to give up
    settings = dataclasses.replace(plan.settings, restart="world", restart_interval_s=rng.choice([None, 2.0, 20.0]))
    return dataclasses.replace(
        plan, settings=settings, restarts=True, plain=True, no_init=False, loops=1, unequal=False, poison_at=poison_at
    )


def simulate(seed: int, machine_class: Any, *, large: bool = False, huge: bool = False) -> Cluster:
    """Run one seed to its end, as a job of many workers if `large`, and of a thousand if `huge`.

    Raises: Violation, or whatever the machine itself raises, if an invariant does not hold.
    """
    rng = random.Random(seed)
    plan = dataclasses.replace(plan_of(rng, large=large, huge=huge), unequal=not huge and _is_unequal(seed))
    plan = plan if huge else _restarting(seed, plan)
    cluster = Cluster(machine_class(plan.settings), plan, rng)
    cluster.run()
    return cluster


def main() -> int:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("first", type=int)
    arguments.add_argument("last", type=int)
    arguments.add_argument("--large", action="store_true")
    arguments.add_argument("--huge", action="store_true")
    args = arguments.parse_args()
    failed = events = 0
    for seed in range(args.first, args.last + 1):
        try:
            events += simulate(seed, Membership, large=args.large, huge=args.huge).events
        except Exception as error:
            failed += 1
            print(f"seed {seed}: {type(error).__name__}: {error}", flush=True)
    print(f"{args.last - args.first + 1} jobs, {events} events, {failed} failed")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
