"""Optimizers in a worker that compiles nothing, each case in a process of its own."""

import subprocess
import sys

import pytest

TRAIN = """
import hashlib, sys, torch
{before}
def train(optimizer_class, **settings):
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Linear(3, 2))
    optimizer = optimizer_class([dict(params=net[0].parameters())], lr=0.1, **settings)
    optimizer.add_param_group(dict(params=net[1].parameters(), lr=0.05))
    for _ in range(3):
        optimizer.zero_grad()
        net(torch.ones(5, 4)).square().sum().backward()
        optimizer.step()
        assert torch.is_grad_enabled()
    optimizer.load_state_dict(optimizer.state_dict())
    optimizer.step(lambda: net(torch.ones(5, 4)).sum())
    return b"".join(each.detach().numpy().tobytes() for each in net.parameters())
optim = torch.optim
classes = [optim.SGD, optim.Adam, optim.AdamW, optim.Adagrad, optim.RMSprop, optim.NAdam, optim.RAdam, optim.Adamax]
digest = hashlib.sha256(b"".join(map(train, classes))).hexdigest()
print(digest, "torch._dynamo" in sys.modules)
"""
DEFERRED = "from spark_elastic.task.lazy_compiler import import_compiler_on_use; import_compiler_on_use()"


def printed(program):
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


@pytest.mark.nightly
def test_optimizers_do_the_same_without_the_compiler():
    plain, deferred = printed(TRAIN.format(before="")), printed(TRAIN.format(before=DEFERRED))
    assert plain[1] == "True", "this version of PyTorch needs no help: remove the module"
    assert deferred == [plain[0], "False"]


@pytest.mark.nightly
def test_program_that_compiles_gets_the_compiler():
    program = (
        TRAIN.format(before=DEFERRED)
        + """
import torch._dynamo
digest_again = hashlib.sha256(b"".join(map(train, classes))).hexdigest()
assert digest_again == digest
net = torch.nn.Linear(4, 2)
optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
before = net.weight.detach().clone()
@torch.compile(backend="eager")
def step():
    net(torch.ones(5, 4)).sum().backward()
    optimizer.step()
step()
assert not torch.equal(before, net.weight)
assert torch._dynamo.utils.counters["stats"]["calls_captured"] > 0
"""
    )
    assert printed(program)[1] == "False"
