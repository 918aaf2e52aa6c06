"""Steps per second of a plain, non-elastic script; the optimizer is broadcast after it was wrapped."""

import argparse
import timeit

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn, optim

import spark_elastic.torch as hvd

parser = argparse.ArgumentParser()
parser.add_argument("--fp16-allreduce", action="store_true")
parser.add_argument("--num-iters", type=int, default=3)
args = parser.parse_args()

hvd.init()
model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 10))
compression = hvd.Compression.fp16 if args.fp16_allreduce else hvd.Compression.none
optimizer = hvd.DistributedOptimizer(
    optim.SGD(model.parameters(), lr=0.01 * hvd.size()),
    named_parameters=model.named_parameters(),
    compression=compression,
    op=hvd.Average,
)
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
hvd.broadcast_optimizer_state(optimizer, root_rank=0)
data, target = torch.randn(8, 32), torch.randint(10, (8,))


def step():
    optimizer.zero_grad()
    F.cross_entropy(model(data), target).backward()
    optimizer.step()


timeit.timeit(step, number=2)
rates = [5 / timeit.timeit(step, number=5) for _ in range(args.num_iters)]
if hvd.rank() == 0:
    print(f"size {hvd.size()} iterations {len(rates)} steps/s {np.mean(rates):.0f}")
