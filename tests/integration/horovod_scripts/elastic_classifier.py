"""An elastic classifier whose data loader was not written with elasticity in mind."""

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
parser.add_argument("--lr", type=float, default=0.05)
parser.add_argument("--fp16-allreduce", action="store_true")
args = parser.parse_args()

hvd.init()
torch.manual_seed(7)
torch.set_num_threads(1)

images, labels = load_digits(return_X_y=True)
rows = TensorDataset(torch.tensor(images, dtype=torch.float32).div(16).view(-1, 1, 8, 8), torch.tensor(labels))
train_rows, test_rows = torch.utils.data.random_split(rows, [1500, len(rows) - 1500])
train_sampler = DistributedSampler(train_rows, num_replicas=hvd.size(), rank=hvd.rank())
train_loader = DataLoader(train_rows, batch_size=args.batch_size, sampler=train_sampler)
test_sampler = DistributedSampler(test_rows, num_replicas=hvd.size(), rank=hvd.rank())
test_loader = DataLoader(test_rows, batch_size=256, sampler=test_sampler)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(1, 8, kernel_size=3)
        self.drop = nn.Dropout2d(0.1)
        self.out = nn.Linear(72, 10)

    def forward(self, x):
        x = F.relu(F.max_pool2d(self.drop(self.conv(x)), 2))
        return F.log_softmax(self.out(x.flatten(1)), dim=1)


model = Net()
optimizer = optim.SGD(model.parameters(), lr=args.lr * hvd.size(), momentum=0.5)
compression = hvd.Compression.fp16 if args.fp16_allreduce else hvd.Compression.none


def averaged(value, name):
    return hvd.allreduce(torch.tensor(value), name=name).item()


@hvd.elastic.run
def train(state):
    for state.epoch in range(state.epoch, args.epochs + 1):  # noqa: B020  an attribute, which is the point
        state.model.train()
        train_sampler.set_epoch(state.epoch)
        left = len(train_loader) - state.batch
        for state.batch, (data, target) in enumerate(train_loader):
            if state.batch >= left:
                break
            state.optimizer.zero_grad()
            loss = F.nll_loss(state.model(data), target)
            loss.backward()
            state.optimizer.step()
            state.commit()
        state.batch = 0


optimizer = hvd.DistributedOptimizer(
    optimizer, named_parameters=model.named_parameters(), compression=compression, op=hvd.Average
)


def scale_learning_rate():
    for group in optimizer.param_groups:
        group["lr"] = args.lr * hvd.size()


state = hvd.elastic.TorchState(model, optimizer, epoch=1, batch=0)
state.register_reset_callbacks([scale_learning_rate])
train(state)

model.eval()
loss = hits = 0.0
with torch.no_grad():
    for data, target in test_loader:
        output = model(data)
        loss += F.nll_loss(output, target, reduction="sum").item()
        hits += output.argmax(dim=1).eq(target).sum().item()
loss = averaged(loss / len(test_sampler), "avg_loss")
accuracy = averaged(hits / len(test_sampler), "avg_accuracy")
if hvd.rank() == 0:
    print(f"size {hvd.size()} loss {loss:.3f} accuracy {accuracy:.3f}")
