"""The device that this worker computes on."""

from __future__ import annotations

import logging

import torch

from spark_elastic.collective.devices import choose_device, setting, sight
from spark_elastic.collective.process import local_rank

log = logging.getLogger("spark_elastic.torch")


def device(asked: str | None = None) -> torch.device:
    """What to put the model and its batches on; also makes it this process's current one, if it is a GPU.

    asked: "auto", "cpu", "cuda", "cuda:N"; default: what `spark_elastic.run(device=...)` was given, "auto" by itself.

    Ask once, before the elastic loop, and keep it: where workers see GPUs that are not their own, it depends on the
    local rank, which changes with the world.

    Raises:
        InvalidSettingsError: there is no such device here; with what to do.
        NotInitializedError: `init` has not been called.
    """
    chosen = choose_device(setting() if asked is None else asked, sight(), local_rank())
    log.info("this worker computes on %s: %s", chosen.device, chosen.reason)
    found = torch.device(chosen.device)
    if found.type == "cuda":
        torch.cuda.set_device(found)
    return found
