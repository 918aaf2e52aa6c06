"""Measures steps per second elastically; the state is committed every few steps only."""

import argparse
import timeit

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn, optim

import spark_elastic.torch as hvd

parser = argparse.ArgumentParser()
parser.add_argument("--batch-size", type=int, default=8)
parser.add_argument("--num-warmup-batches", type=int, default=2)
parser.add_argument("--num-batches-per-iter", type=int, default=4)
parser.add_argument("--num-iters", type=int, default=5)
parser.add_argument("--num-batches-per-commit", type=int, default=3)
args = parser.parse_args()

hvd.init()
model = nn.Sequential(nn.Linear(32, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 10))
learning_rate = 0.01
optimizer = optim.SGD(model.parameters(), lr=learning_rate * hvd.size())
optimizer = hvd.DistributedOptimizer(
    optimizer, named_parameters=model.named_parameters(), compression=hvd.Compression.none, op=hvd.Average
)
data = torch.randn(args.batch_size, 32)
target = torch.randint(10, (args.batch_size,))


def step(state):
    optimizer.zero_grad()
    F.cross_entropy(model(data), target).backward()
    optimizer.step()
    state.batch += 1
    if state.batch == args.num_batches_per_commit:
        state.batch = 0
        state.commit()


@hvd.elastic.run
def measure(state):
    if not state.warm:
        timeit.timeit(lambda: step(state), number=args.num_warmup_batches)
        state.warm = True
        state.commit()
    for at in range(state.iter, args.num_iters):
        seconds = timeit.timeit(lambda: step(state), number=args.num_batches_per_iter)
        state.rates.append(args.num_batches_per_iter / seconds)
        state.iter = at + 1
        state.commit()


def scale_learning_rate():
    for group in optimizer.param_groups:
        group["lr"] = learning_rate * hvd.size()


state = hvd.elastic.TorchState(model, optimizer, rates=[], iter=0, batch=0, warm=False)
state.register_reset_callbacks([scale_learning_rate])
measure(state)
if hvd.rank() == 0:
    print(f"size {hvd.size()} iterations {len(state.rates)} steps/s {np.mean(state.rates):.0f}")
