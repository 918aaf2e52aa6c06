"""A driver whose loop writes its commits, as FOLDER/runs/one: python -m ... FOLDER NAME LIMIT PAUSE_AT.

All workers wait in the step PAUSE_AT until they are killed. The driver writes what `run` returns, or the error that it
raises, to FOLDER/outcome-NAME, JSON.
"""

from __future__ import annotations

import json
import os
import sys
import threading
from pathlib import Path
from typing import Any

from tests.integration.spark.training import Notes

WIDTH = 4


def build() -> tuple[Any, Any, Any]:
    import torch

    torch.manual_seed(1)
    model = torch.nn.Linear(WIDTH, 1)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    return model, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, step_size=3, gamma=0.5)


def step(model: Any, optimizer: Any, schedule: Any, number: int) -> None:
    import torch

    optimizer.zero_grad()
    model(torch.full((1, WIDTH), float(number))).pow(2).sum().backward()
    optimizer.step()
    schedule.step()


def train(limit: int, pause_at: int | None = None, diary: str = "") -> tuple[int, list[int], list[Any]]:
    """Return the step at which the loop began here, the steps of all calls, and the trained weights. All workers wait
    in the step `pause_at` until they are killed; rank 0 notes each commit in the folder `diary` once the last is
    written.
    """
    import spark_elastic.torch as hvd
    from spark_elastic.elastic.frontend import frontend

    hvd.init()
    if frontend.checkpoints is not None:
        frontend.checkpoints.interval_s = 0.0
    model, plain, schedule = build()
    optimizer = hvd.DistributedOptimizer(plain, named_parameters=model.named_parameters())
    schedule.optimizer = optimizer
    state = hvd.elastic.TorchState(model=model, optimizer=optimizer, schedule=schedule, steps=[])
    note = Notes(diary) if diary else None

    @hvd.elastic.run
    def loop(state: Any) -> int:
        first = len(state.steps)
        while len(state.steps) < limit:
            if len(state.steps) == pause_at:
                threading.Event().wait()
            step(model, optimizer, schedule, len(state.steps))
            state.steps.append(len(state.steps))
            if note is not None:
                frontend.checkpoints._writer.drain()
            state.commit()
            if note is not None and hvd.rank() == 0:
                note("applied", step=len(state.steps))
        return first

    return loop(state), state.steps, [model.weight.tolist(), model.bias.tolist()]


def undisturbed(limit: int) -> list[Any]:
    """Return the weights that `train` trains, from one process that never stops."""
    model, optimizer, schedule = build()
    for number in range(limit):
        step(model, optimizer, schedule, number)
    return [model.weight.tolist(), model.bias.tolist()]


def settings(folder: Path) -> dict[str, Any]:
    from spark_elastic import LocalLauncher

    launcher = LocalLauncher(preimport=("torch",))
    where = {"checkpoint_dir": folder / "runs", "run_id": "one"}
    return {"num_proc": 2, "launcher": launcher, **where, "start_timeout": 300, "verbose": 0}


def main() -> None:
    import spark_elastic

    folder, name, limit, pause_at = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
    try:
        outcome: dict[str, Any] = {"returned": spark_elastic.run(train, (limit, pause_at), **settings(folder))}
    except Exception as error:
        outcome = {"error": str(error), "type": type(error).__name__}
    (folder / f"outcome-{name}.partial").write_text(json.dumps(outcome))
    os.replace(folder / f"outcome-{name}.partial", folder / f"outcome-{name}")


if __name__ == "__main__":
    main()
