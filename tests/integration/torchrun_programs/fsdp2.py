"""FSDP2 (`fully_shard`) with torch.distributed.checkpoint. The last rank kills itself at one step, once.

python fsdp2.py FOLDER STEPS DEATH
"""

import os
import signal
import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from ddp import CHECKPOINT_EVERY, batch, note, parts
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard


def main(folder, steps, death):
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.set_num_threads(1)
    model, _ = parts()
    mesh = dist.init_device_mesh("cpu", (size,))
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    start = 0
    done = sorted(Path(folder).glob("step-*/.metadata"), key=lambda path: int(path.parent.name[5:]))
    if done:
        start = int(done[-1].parent.name[5:])
        of_model, of_optimizer = get_state_dict(model, optimizer)
        dcp.load({"model": of_model, "optimizer": of_optimizer}, checkpoint_id=done[-1].parent)
        set_state_dict(model, optimizer, model_state_dict=of_model, optim_state_dict=of_optimizer)
    note(folder, f"trains rank {rank} from step {start}")
    for step in range(start, int(steps)):
        died = Path(folder, "died")
        if rank == size - 1 and step == int(death) and not died.exists():
            died.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        inputs, wanted = batch(step)
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(model(inputs[rank::size]), wanted[rank::size]).backward()
        optimizer.step()
        if (step + 1) % CHECKPOINT_EVERY == 0:
            of_model, of_optimizer = get_state_dict(model, optimizer)
            target = Path(folder, f"step-{step + 1}")
            dcp.save({"model": of_model, "optimizer": of_optimizer}, checkpoint_id=target)
    whole = {name: value.full_tensor() for name, value in model.state_dict().items()}
    if rank == 0:
        torch.save(whole, Path(folder, "final.pt"))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
