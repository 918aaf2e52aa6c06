"""A classifier without an elastic loop: state is broadcast once, at the start."""

import argparse

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn, optim
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

import spark_elastic.torch as hvd

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=2)
parser.add_argument("--batch-size", type=int, default=64)
parser.add_argument("--lr", type=float, default=0.1)
parser.add_argument("--clip", type=float, default=None)
parser.add_argument("--gradient-predivide-factor", type=float, default=1.0)


def main(args):
    def train_epoch(epoch):
        model.train()
        train_sampler.set_epoch(epoch)
        for data, target in train_loader:
            optimizer.zero_grad()
            F.cross_entropy(model(data), target).backward()
            if args.clip is None:
                optimizer.step()
            else:
                optimizer.synchronize()
                torch.nn.utils.clip_grad_norm_(model.parameters(), args.clip)
                with optimizer.skip_synchronize():
                    optimizer.step()

    def averaged(value, name):
        return hvd.allreduce(torch.tensor(value), name=name).item()

    hvd.init()
    torch.manual_seed(hvd.rank())  # different on purpose: the broadcast has to make them the same
    torch.set_num_threads(1)

    images, labels = load_digits(return_X_y=True)
    rows = TensorDataset(torch.tensor(images[:1792], dtype=torch.float32).div(16), torch.tensor(labels[:1792]))
    train_sampler = DistributedSampler(rows, num_replicas=hvd.size(), rank=hvd.rank())
    train_loader = DataLoader(rows, batch_size=args.batch_size, sampler=train_sampler)

    model = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
    optimizer = optim.SGD(model.parameters(), lr=args.lr * hvd.size(), momentum=0.5)

    resumed = hvd.broadcast(torch.tensor(hvd.rank() * 100), root_rank=0, name="resume_from_epoch").item()
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    optimizer = hvd.DistributedOptimizer(
        optimizer,
        named_parameters=model.named_parameters(),
        compression=hvd.Compression.none,
        op=hvd.Average,
        gradient_predivide_factor=args.gradient_predivide_factor,
    )
    for epoch in range(resumed + 1, args.epochs + 1):
        train_epoch(epoch)

    with torch.no_grad():
        hits = sum(model(data).argmax(dim=1).eq(target).sum().item() for data, target in train_loader)
    accuracy = averaged(hits / len(train_sampler), "avg_accuracy")
    weights = [torch.cat([p.detach().flatten() for p in model.parameters()])]
    same = all(torch.equal(weights[0], other) for other in hvd.allgather_object(weights[0], name="weights"))
    if hvd.rank() == 0:
        print(f"size {hvd.size()} accuracy {accuracy:.3f} same weights {same}")


if __name__ == "__main__":
    main(parser.parse_args())
