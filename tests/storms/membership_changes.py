"""Whether a process that lives through many worlds keeps anything of them: descriptors, threads, memory.

    python -m tests.storms.membership_changes                   # a thousand worlds
    python -m tests.storms.membership_changes --repeat 10000    # three minutes

Two real workers under the real driver. One of them fails a collective on purpose after each step, so that the world is
cut, left and rebuilt with new Gloo groups; what each worker and the driver hold is read after a warm-up and at the end.
"""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path

import spark_elastic
from benchmarks._harness import Series, parser, report
from spark_elastic.membership.timeline import WorldStarted

SETTLE_S = 30.0
"""The longest wait for threads that are ending."""


def settled() -> dict[str, float]:
    """Return what this process holds once the number of its threads has not changed for half a second."""
    until = time.monotonic() + SETTLE_S
    now = holdings()
    while time.monotonic() < until:
        time.sleep(0.5)
        before, now = now, holdings()
        if now["threads"] == before["threads"]:
            break
    return now


def holdings() -> dict[str, float]:
    """Open descriptors, threads and resident memory (MB) of this process."""
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines() if ":" in line)
    return {
        "descriptors": len(os.listdir("/proc/self/fd")),
        "threads": int(status["Threads"]),
        "rss_mb": int(status["VmRSS"].split()[0]) / 1024,
    }


def live_through(changes: int, warm_up: int) -> tuple[dict[str, float], dict[str, float]]:
    """Go through that many worlds; returns what was held after the warm-up and at the end."""
    import gc

    import torch

    import spark_elastic.torch as hvd
    from spark_elastic.errors import HorovodInternalError

    hvd.init()
    model = torch.nn.Linear(256, 256)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9))
    state = hvd.elastic.TorchState(model=model, optimizer=optimizer, worlds=0, before=None)

    @hvd.elastic.run
    def loop(state):
        while state.worlds < changes:
            optimizer.zero_grad()
            model(torch.ones(8, 256)).sum().backward()
            optimizer.step()
            state.worlds += 1
            if state.worlds == warm_up:
                gc.collect()
                state.before = settled()
            state.commit()
            if state.worlds < changes and hvd.rank() == 0:
                raise HorovodInternalError("on purpose")
        gc.collect()
        return state.before, settled()

    return loop(state)


def main() -> None:
    arguments = parser(__doc__, repeat=1000, results=Path(__file__).with_name("results"))
    arguments.add_argument("--warm-up", type=int, default=50)
    args = arguments.parse_args()
    changes = 100 if args.quick else args.repeat
    before_threads = threading.active_count()
    job = spark_elastic.run_async(
        live_through,
        (changes, args.warm_up),
        num_proc=2,
        launcher=spark_elastic.LocalLauncher(),
        verbose=0,
        cooldown_range=None,
    )
    driver_before: dict[str, float] = {}
    while not job.done():
        threading.Event().wait(0.2)
        if not driver_before and job.status().round >= args.warm_up:
            driver_before = holdings()
    ends = job.result()
    driver_after = holdings()
    worlds = sum(isinstance(record, WorldStarted) for record in job.events())
    growth = {
        what: [after[what] - before[what] for before, after in ends] for what in ("descriptors", "threads", "rss_mb")
    }
    report(
        "membership-changes",
        args,
        Series("worlds", [float(worlds)], "worlds"),
        Series("worker: descriptors more", growth["descriptors"], "fds", target_max=0.0),
        Series("worker: threads more", growth["threads"], "threads", target_max=0.0),
        Series("worker: memory more", growth["rss_mb"], "MB", target_max=20.0),
        Series("driver: memory more", [driver_after["rss_mb"] - driver_before["rss_mb"]], "MB", target_max=20.0),
        Series("driver: threads left", [float(threading.active_count() - before_threads)], "threads", target_max=0.0),
        raw={"workers": ends, "driver": [driver_before, driver_after]},
    )


if __name__ == "__main__":
    main()
