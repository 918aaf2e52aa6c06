"""An elastic training with the sampler in the state, accumulation over sub-batches, and metrics inside the loop."""

import argparse
import math
import os

import torch
import torch.nn.functional as F
from torch import nn, optim
from torch.utils.data import DataLoader, TensorDataset

import spark_elastic.torch as hvd

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=2)
parser.add_argument("--batch-size", type=int, default=8)
parser.add_argument("--batches-per-allreduce", type=int, default=2)
parser.add_argument("--batches-per-commit", type=int, default=4)
parser.add_argument("--batches-per-host-check", type=int, default=2)
parser.add_argument("--checkpoint-format", default="checkpoint-{epoch}.pt")
parser.add_argument("--base-lr", type=float, default=0.01)
parser.add_argument("--warmup-epochs", type=float, default=1)


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.conv = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(width)

    def forward(self, x):
        return F.relu(x + self.norm(self.conv(x)))


class Metric:
    """A mean over workers and batches."""

    def __init__(self, name):
        self.name, self.sum, self.n = name, torch.tensor(0.0), torch.tensor(0.0)

    def update(self, value):
        self.sum += hvd.allreduce(value.detach().cpu(), name=self.name)
        self.n += 1

    @property
    def mean(self):
        return (self.sum / self.n).item()


def images(count, seed):
    made = torch.Generator().manual_seed(seed)
    return TensorDataset(torch.rand(count, 3, 8, 8, generator=made), torch.randint(10, (count,), generator=made))


def adjust_learning_rate(epoch, batch):
    if epoch < args.warmup_epochs:
        progress = epoch + (batch + 1) / max(len(train_loader), 1)
        factor = 1.0 / hvd.size() * (progress * (hvd.size() - 1) / args.warmup_epochs + 1)
    else:
        factor = 1.0
    for group in optimizer.param_groups:
        group["lr"] = args.base_lr * hvd.size() * args.batches_per_allreduce * factor


def train_epoch(state):
    model.train()
    loss_metric = Metric("train_loss")
    offset = state.batch
    for index, (data, target) in enumerate(train_loader):
        state.batch = offset + index
        if state.batch % args.batches_per_commit == 0:
            state.commit()
        elif state.batch % args.batches_per_host_check == 0:
            state.check_host_updates()
        adjust_learning_rate(state.epoch, state.batch)
        optimizer.zero_grad()
        for at in range(0, len(data), args.batch_size):
            loss = F.cross_entropy(model(data[at : at + args.batch_size]), target[at : at + args.batch_size])
            loss_metric.update(loss)
            loss.div_(math.ceil(len(data) / args.batch_size))
            loss.backward()
        state.train_sampler.record_batch(index, allreduce_batch_size)
        optimizer.step()
    state.commit()
    return loss_metric.mean if loss_metric.n else 0.0


def validate():
    model.eval()
    loss_metric = Metric("val_loss")
    with torch.no_grad():
        for data, target in val_loader:
            loss_metric.update(F.cross_entropy(model(data), target))
    return loss_metric.mean


def save_checkpoint(epoch):
    if hvd.rank() == 0:
        saved = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        torch.save(saved, args.checkpoint_format.format(epoch=epoch + 1))


@hvd.elastic.run
def full_train(state):
    while state.epoch < args.epochs:
        train_loss = train_epoch(state)
        val_loss = validate()
        save_checkpoint(state.epoch)
        if hvd.rank() == 0:
            print(f"epoch {state.epoch + 1} size {hvd.size()} train {train_loss:.3f} val {val_loss:.3f}")
        state.epoch += 1
        state.batch = 0
        state.train_sampler.set_epoch(state.epoch)
        state.commit()


if __name__ == "__main__":
    args = parser.parse_args()
    allreduce_batch_size = args.batch_size * args.batches_per_allreduce
    hvd.init()
    torch.manual_seed(3)
    torch.set_num_threads(1)

    # two workers get 73 and 72 of these rows, so that only one of them has a row left for a tenth half batch
    train_rows, val_rows = images(145, seed=1), images(40, seed=2)
    train_sampler = hvd.elastic.ElasticSampler(train_rows)
    train_loader = DataLoader(train_rows, batch_size=allreduce_batch_size, sampler=train_sampler)
    val_sampler = hvd.elastic.ElasticSampler(val_rows)
    val_loader = DataLoader(val_rows, batch_size=args.batch_size, sampler=val_sampler)

    model = nn.Sequential(nn.Conv2d(3, 8, 1), Block(8), Block(8), nn.Flatten(), nn.Linear(512, 10))
    optimizer = optim.SGD(
        model.parameters(), lr=args.base_lr * args.batches_per_allreduce * hvd.size(), momentum=0.9, weight_decay=5e-5
    )
    optimizer = hvd.DistributedOptimizer(
        optimizer,
        named_parameters=model.named_parameters(),
        compression=hvd.Compression.none,
        backward_passes_per_step=args.batches_per_allreduce,
        op=hvd.Average,
        gradient_predivide_factor=1.0,
    )

    start = 0
    if hvd.rank() == 0:
        for epoch in range(args.epochs, 0, -1):
            if os.path.exists(args.checkpoint_format.format(epoch=epoch)):
                saved = torch.load(args.checkpoint_format.format(epoch=epoch))
                model.load_state_dict(saved["model"])
                optimizer.load_state_dict(saved["optimizer"])
                start = epoch
                break

    state = hvd.elastic.TorchState(
        model=model, optimizer=optimizer, train_sampler=train_sampler, val_sampler=val_sampler, epoch=start, batch=0
    )
    full_train(state)
    if hvd.rank() == 0:
        print(f"done after epoch {state.epoch}, from {start}")
