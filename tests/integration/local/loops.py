"""Training functions on the bare link: they step through worlds by key-value exchange, without a framework."""

import os
import time
from pathlib import Path


def rank_and_size():
    from spark_elastic.wire import worker_link

    link = worker_link.current()
    assignment = link.join_at_init()
    return assignment.world.member(assignment.worker).rank, assignment.world.size


def steps(folder, until, before_step=None):
    """Count to `until` together: a step is applied when every member of the world has said it; returns the count.

    Calls `before_step(rank, step)`. Writes `pid-RANK-ROUND` at each new world and `step-N` at each applied step, so
    that a test can wait for them.
    """
    from spark_elastic.errors import HorovodInternalError
    from spark_elastic.membership.topology import StateVersion
    from spark_elastic.wire import worker_link
    from spark_elastic.wire.worker_link import Assignment

    link = worker_link.current()
    position = link.join_at_init()
    link.entered_loop()
    if not isinstance(position, Assignment):
        position = link.join(0, None)
    done = 0
    while True:
        world = position.world
        rank = world.member(position.worker).rank
        try:
            link.kv_set(world.round, f"state-{rank}", str(done).encode())
            held = [link.kv_get(world.round, f"state-{r}", 30) for r in range(world.size)]
            done = int(held[world.root])
            link.report_version(StateVersion(steps=done))
            Path(folder, f"pid-{rank}-{world.round}").write_text(str(os.getpid()))
            while done < until:
                if before_step is not None:
                    before_step(rank, done)
                seen = "1" if link.updates_seen() > position.updates_seen else ""
                link.kv_set(world.round, f"{rank}-{done}", seen.encode())
                said = [link.kv_get(world.round, f"{r}-{done}", 30) for r in range(world.size)]
                done += 1
                link.report_version(StateVersion(steps=done))
                Path(folder, f"step-{done}").touch()
                if any(said):
                    break
                time.sleep(0.01)
            else:
                return done
        except HorovodInternalError:
            pass
        position = link.join(world.round, StateVersion(steps=done))
