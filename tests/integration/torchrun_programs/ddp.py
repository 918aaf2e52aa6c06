"""DistributedDataParallel with a checkpoint of its own. Ranks that are named as RANK:STEP kill themselves there, once.

python ddp.py FOLDER STEPS [RANK:STEP ...]
"""

import os
import signal
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

ROWS, CHECKPOINT_EVERY = 12, 5


def note(folder, text):
    with Path(folder, "lines").open("a") as lines:
        lines.write(f"{time.time():.3f} {os.getpid()} {text}\n")


def batch(step):
    generator = torch.Generator().manual_seed(step)
    inputs = torch.randn(ROWS, 4, generator=generator)
    return inputs, inputs.sum(1, keepdim=True).sin()


def parts():
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
    return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def main(folder, steps, *deaths):
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    restarts = os.environ["TORCHELASTIC_RESTART_COUNT"]
    note(folder, f"begins rank {rank} of {size} restart {restarts} port {os.environ['MASTER_PORT']}")
    dist.init_process_group("gloo")
    assert (dist.get_rank(), dist.get_world_size(), dist.is_torchelastic_launched()) == (rank, size, True)
    model, optimizer = parts()
    checkpoint, start = Path(folder, "checkpoint.pt"), 0
    if checkpoint.exists():
        found = torch.load(checkpoint)
        model.load_state_dict(found["model"])
        optimizer.load_state_dict(found["optimizer"])
        start = found["step"]
    note(folder, f"trains rank {rank} from step {start}")
    ddp = DistributedDataParallel(model)
    for step in range(start, int(steps)):
        death = Path(folder, f"died-{rank}-{step}")
        if f"{rank}:{step}" in deaths and not death.exists():
            death.touch()
            note(folder, f"dies rank {rank} at step {step}")
            os.kill(os.getpid(), signal.SIGKILL)
        inputs, wanted = batch(step)
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(ddp(inputs[rank::size]), wanted[rank::size]).backward()
        optimizer.step()
        if rank == 0 and (step + 1) % CHECKPOINT_EVERY == 0:
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step + 1}
            torch.save(state, checkpoint.with_suffix(".new"))
            checkpoint.with_suffix(".new").replace(checkpoint)
    if rank == 0:
        torch.save(model.state_dict(), Path(folder, "final.pt"))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
