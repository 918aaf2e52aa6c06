"""A training script for torchft: a replica group of one process, started by torchrun (see README.md)."""

from __future__ import annotations

import sys
from datetime import timedelta
from typing import Any

from _peer_training import StepFile, gradients, parts
from torchft import DistributedDataParallel, Manager, Optimizer, ProcessGroupGloo


def main(folder: str, name: str) -> None:
    model, bare, inputs, labels = parts()

    def load(state: dict[str, Any]) -> None:
        model.load_state_dict(state["model"])
        bare.load_state_dict(state["optimizer"])

    manager = Manager(
        pg=ProcessGroupGloo(timeout=timedelta(seconds=10)),
        load_state_dict=load,
        state_dict=lambda: {"model": model.state_dict(), "optimizer": bare.state_dict()},
        min_replica_size=1,
        replica_id=name,
        timeout=timedelta(seconds=10),
    )
    replicated = DistributedDataParallel(manager, model)
    optimizer = Optimizer(manager, bare)
    steps = StepFile(folder)
    while True:
        before = manager.current_step()
        gradients(replicated, optimizer, inputs, labels)
        optimizer.step()
        if manager.current_step() > before:
            steps.write(manager.num_participants(), manager.participating_rank() or 0, manager.current_step())


if __name__ == "__main__":
    main(*sys.argv[1:3])
