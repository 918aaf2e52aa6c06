"""A driver as a program of its own, which a test can stop: ``python -m tests.integration.local.standing_still FOLDER``.

Trains to a step, writes what became of it to `FOLDER/outcome.json`.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

from spark_elastic import LocalLauncher, run_async
from spark_elastic.membership.timeline import DriverStoodStill, WorkerLeft, WorldStarted

HEARTBEAT_TIMEOUT_S = 2.0
STEPS = 400


def train(folder):
    """Notes its pid and each step; ends at `STEPS`, or, after a pause of the driver, as soon as the test says so."""
    import os

    import torch

    import spark_elastic.torch as hvd

    hvd.init()
    model = torch.nn.Linear(4, 1)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.001))
    state = hvd.elastic.TorchState(model=model, optimizer=optimizer, step=0)

    @hvd.elastic.run
    def loop(state):
        Path(folder, f"pid-{hvd.rank()}-of-{hvd.size()}").write_text(str(os.getpid()))
        while state.step < STEPS:
            optimizer.zero_grad()
            model(torch.ones(2, 4)).sum().backward()
            optimizer.step()
            state.step += 1
            state.commit()
            if hvd.rank() == 0:
                with Path(folder, "steps").open("a") as steps:
                    steps.write(".")
            time.sleep(0.0 if Path(folder, "hurry").exists() else 0.02)
        return state.step, model.weight.tolist()

    return loop(state)


def main(folder: str) -> None:
    job = run_async(
        train,
        (folder,),
        launcher=LocalLauncher(preimport=("torch",)),
        num_proc=2,
        min_num_proc=1,
        heartbeat_timeout=HEARTBEAT_TIMEOUT_S,
        cooldown_range=(0.05, 1.0),
        verbose=0,
    )
    results = job.result(120)
    records = job.events()
    Path(folder, "outcome.json").write_text(
        json.dumps(
            {
                "results": results,
                "sizes": [record.size for record in records if isinstance(record, WorldStarted)],
                "stood_still": [record.seconds for record in records if isinstance(record, DriverStoodStill)],
                "left": [record.why for record in records if isinstance(record, WorkerLeft)],
            }
        )
    )


if __name__ == "__main__":
    main(sys.argv[1])
