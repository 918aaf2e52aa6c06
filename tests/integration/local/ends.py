"""Training functions whose workers die before the elastic loop, between two loops and after the loop."""

import contextlib
import os
import signal
import time
from pathlib import Path


def once(folder, name):
    """Whether this is the first time that any worker of the job comes here."""
    with contextlib.suppress(FileExistsError):
        Path(folder, name).touch(exist_ok=False)
        return True
    return False


def die():
    os.kill(os.getpid(), signal.SIGKILL)


def places(folder, deaths):
    """Return a function by which a worker dies at a place if its rank is to; each of the deaths happens once."""

    def at(place):
        import spark_elastic.torch as hvd

        for number, (where, rank) in enumerate(deaths):
            if where == place and rank == hvd.rank() and once(folder, f"death-{number}"):
                note(folder, f"death at {place}")
                die()

    return at


def note(folder, what):
    """Add a line to a diary that all workers keep; a line this short is written whole."""
    with open(Path(folder, "diary"), "a") as diary:
        diary.write(f"{what}\n")


def diary(folder):
    path = Path(folder, "diary")
    return path.read_text().split("\n")[:-1] if path.exists() else []


def make():
    import torch

    import spark_elastic.torch as hvd

    hvd.init()
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    return model, hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())


def one_step(model, optimizer, value=1.0):
    import torch

    optimizer.zero_grad()
    model(torch.full((2, 4), value)).square().mean().backward()
    optimizer.step()


def weights(model):
    return [value for parameter in model.parameters() for value in parameter.detach().flatten().tolist()]


def train_for(model, optimizer, steps):
    """The loop, with everything that it needs."""
    import spark_elastic.torch as hvd

    state = hvd.elastic.TorchState(model, optimizer, step=0)

    @hvd.elastic.run
    def loop(state):
        while state.step < steps:
            one_step(model, optimizer)
            state.step += 1
            state.commit()
        return f"{steps} steps"

    return loop, state


def with_an_end(folder, deaths):
    """Train for 10 steps, gather something from all, have rank 0 save.

    deaths: where (a name of a place below), and which rank dies there, once in the whole job each.
    """
    import torch

    import spark_elastic.torch as hvd

    at = places(folder, deaths)
    model, optimizer = make()
    at("init")
    loop, state = train_for(model, optimizer, 10)
    said = loop(state)
    hvd.allgather(torch.tensor([hvd.rank()]))
    at("gathered")
    ranks = hvd.allgather(torch.tensor([hvd.rank()])).tolist()
    if hvd.rank() == 0:
        at("save")
        note(folder, f"saved by process {os.getpid()} of {hvd.size()}")
    at("saved")
    return hvd.rank(), hvd.size(), ranks, said, state.step, state.progress, weights(model)


def two_loops(folder, deaths, newcomer_waits=0, returned=None, go=""):
    """Train for 6 steps, look at the outcome, and train for 8 more with another state, up to the file `go`.

    The second loop's first world waits for `newcomer_waits` workers; `returned` makes what the first loop returns.
    """
    import torch

    import spark_elastic.torch as hvd

    at = places(folder, deaths)
    note(folder, f"called in process {os.getpid()}")
    model, optimizer = make()
    loop, state = train_for(model, optimizer, 6)
    if returned is not None:
        plain, loop = loop, hvd.elastic.run(lambda state: returned(plain.__wrapped__(state)))
    first = loop(state)
    if returned is not None:
        first = repr(first)
    at("between")
    hvd.allreduce(torch.ones(1))
    second = hvd.elastic.TorchState(model, optimizer, step=0, seen=0)

    @hvd.elastic.run
    def go_on(second):
        while second.step < 8:
            while hvd.size() < newcomer_waits:
                time.sleep(0.01)
                second.commit()
            one_step(model, optimizer, value=2.0)
            second.step += 1
            if second.step == 4:
                at("in second")
            second.commit()
            while second.step == 8 and go and not Path(folder, go).exists():
                time.sleep(0.01)
        return "8 more"

    more = go_on(second)
    at("after second")
    total = hvd.allreduce(torch.ones(1), op=hvd.Sum).item()
    return hvd.rank(), hvd.size(), total, first, more, second.step, second.progress, weights(model)


def done_one_after_the_other(folder):
    """Rank 1 is done at once; rank 0 works on after the loop until the test lets it go, once."""
    import spark_elastic.torch as hvd

    model, optimizer = make()
    loop, state = train_for(model, optimizer, 10)
    loop(state)
    calls = once(folder, f"first-call-{os.getpid()}")
    note(folder, f"rank {hvd.rank()} process {os.getpid()} {'first' if calls else 'again'}")
    if hvd.rank() == 0 and calls:
        while not Path(folder, "go").exists():
            time.sleep(0.02)
    return hvd.rank(), state.step, os.getpid(), calls
