"""Training loops as users write them, each with a worker that kills itself at a certain moment, once in the job."""

import os
import signal
import threading
import time
from pathlib import Path

WIDTH = 4


def die_once(folder):
    """Kill this process if none has been killed here yet."""
    marker = Path(folder, "killed")
    try:
        marker.touch(exist_ok=False)
    except FileExistsError:
        return
    os.kill(os.getpid(), signal.SIGKILL)


def wait_for(condition, what, limit_s=60):
    until = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < until, f"waited {limit_s} s for {what}"
        time.sleep(0.002)


def die_after(folder):
    """Have this process die as soon as rank 0 has committed, wherever it stands then."""

    def wait():
        wait_for(Path(folder, "committed").exists, "rank 0's commit")
        die_once(folder)

    threading.Thread(target=wait, daemon=True).start()


def world_is_cut():
    from spark_elastic.collective.process import process
    from spark_elastic.wire import worker_link

    return worker_link.current().cut_round() >= process.assignment.world.round


def late_for_the_data():
    """Have this process see the end of the next broadcast only after the world was cut.

    A collective is done for a rank as soon as all others have launched it, whether or not they have come to its end.
    """
    from spark_elastic.collective import objects

    receive = objects._receive

    def late(group, root):
        objects._receive, wait = receive, group.wait

        def wait_late(work):
            del group.wait
            wait_for(world_is_cut, "the cut")
            return wait(work)

        group.wait = wait_late
        return receive(group, root)

    objects._receive = late


class Scale:
    """What a gradient scaler keeps."""

    def __init__(self):
        self.scale = 1024.0

    def state_dict(self):
        return {"scale": self.scale}

    def load_state_dict(self, values):
        self.scale = values["scale"]


def built(passes=1):
    """A model whose weights are the negative sum of the numbers that it was trained on."""
    import torch

    import spark_elastic.torch as hvd

    model = torch.nn.Linear(WIDTH, 1, bias=False)
    torch.nn.init.zeros_(model.weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    return model, hvd.DistributedOptimizer(
        optimizer, named_parameters=model.named_parameters(), backward_passes_per_step=passes
    )


def descend(model, optimizer, number):
    import torch

    optimizer.zero_grad()
    model(torch.full((1, WIDTH), float(number))).sum().backward()
    optimizer.step()


def one_is_late_and_one_dies(folder, what):
    """Commits after each step, and in the middle once more, without one: after a new epoch or a skipped step.

    Rank 0 comes through the collective in between and commits; rank 1 is late for it; rank 2 dies meanwhile.
    """
    import torch

    import spark_elastic.torch as hvd

    class State(hvd.elastic.TorchState):
        def save(self):
            super().save()
            if getattr(self, "between", False) and hvd.rank() == 0:
                Path(folder, "committed").touch()

    hvd.init()
    model, optimizer = built()
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    scale = Scale()
    state = State(model, optimizer, schedule=schedule, scale=scale, step=0, epoch=0)
    rates = []

    @hvd.elastic.run
    def loop(state):
        first = not Path(folder, "killed").exists()
        while state.step < 12:
            if state.step == 6 and state.epoch == 0:
                if first and hvd.rank() == 1:
                    late_for_the_data()
                if first and hvd.rank() == 2:
                    die_after(folder)
                if what == "schedule":
                    hvd.broadcast_object({"epoch": 1}, root_rank=hvd.size() - 1)
                    schedule.step()
                else:
                    hvd.broadcast_object({"overflow": True}, root_rank=hvd.size() - 1)
                    scale.scale /= 2
                state.epoch += 1
                object.__setattr__(state, "between", True)
                state.commit()
            descend(model, optimizer, state.step * scale.scale)
            state.step += 1
            rates.append(optimizer.param_groups[0]["lr"])
            state.commit()

    loop(state)
    return model.weight.tolist(), state.epoch, state.step, optimizer.param_groups[0]["lr"], scale.scale, hvd.size()


def gradients_applied_by_hand(folder):
    """Each of six parameters is reduced and moved on its own; rank 2 dies between two of them."""
    import torch

    import spark_elastic.torch as hvd

    hvd.init()
    model = torch.nn.Sequential(*(torch.nn.Linear(1, 1, bias=False) for _ in range(6)))
    for param in model.parameters():
        torch.nn.init.zeros_(param)
    state = hvd.elastic.TorchState(model, step=0)

    @hvd.elastic.run
    def loop(state):
        while state.step < 20:
            for number, param in enumerate(model.parameters()):
                if state.step == 9 and number == 3 and hvd.rank() == 2:
                    die_once(folder)
                param.data -= hvd.allreduce(torch.ones(1, 1))
            state.step += 1
            state.commit()

    loop(state)
    return [param.item() for param in model.parameters()]


def counted_before_the_step(folder, dies_at, style):
    """The batch is counted before the step, commits are rare; rank 2 dies on the way to a step."""
    import spark_elastic.torch as hvd

    hvd.init()
    model, optimizer = built()
    state = hvd.elastic.TorchState(model, optimizer, batch=0, seen=[], counts={"batches": 0})

    @hvd.elastic.run
    def loop(state):
        while (len(state.seen) if style == "list" else state.batch) < 25:
            if style == "before":
                state.batch += 1
                state.counts["batches"] += 1
                number = state.batch
            elif style == "list":
                state.seen.append(len(state.seen) + 1)
                number = state.seen[-1]
            else:
                number = state.batch + 1
            if number == dies_at and hvd.rank() == 2:
                die_once(folder)
            descend(model, optimizer, number)
            if style == "after":
                state.batch += 1
            if number % 10 == 0:
                state.commit()

    loop(state)
    return model.weight[0, 0].item(), state.batch, state.counts["batches"], state.seen, state.progress


def two_die_the_first_at_the_end_of_an_epoch(folder):
    """The last rank dies before the last commit of an epoch, and the next one in the middle of the epoch after."""
    import spark_elastic.torch as hvd

    hvd.init()
    model, optimizer = built()
    state = hvd.elastic.TorchState(model, optimizer, epoch=0, batch=0)

    @hvd.elastic.run
    def loop(state):
        while state.epoch < 2:
            while state.batch < 6:
                if (state.epoch, state.batch) == (1, 2) and hvd.size() > 1 and hvd.rank() == hvd.size() - 1:
                    die_once(Path(folder, "second"))
                descend(model, optimizer, state.epoch * 6 + state.batch)
                state.batch += 1
                if state.batch % 3 == 0:
                    if state.batch == 6 and hvd.rank() == hvd.size() - 1:
                        die_once(Path(folder, "first"))
                    state.commit()
            state.epoch += 1
            state.batch = 0

    for name in ("first", "second"):
        Path(folder, name).mkdir(exist_ok=True)
    loop(state)
    return model.weight[0, 0].item(), state.progress


def a_scaler_skips_a_step(folder):
    """Rows are recorded after each step, one of which is skipped; rank 2 dies two steps later, between two checks."""
    import torch

    import spark_elastic.torch as hvd

    hvd.init()
    model, optimizer = built()
    rows = list(range(1, 121))
    sampler = hvd.elastic.ElasticSampler(rows, shuffle=False)
    loader = torch.utils.data.DataLoader(rows, batch_size=5, sampler=sampler)
    state = hvd.elastic.TorchState(model, optimizer, sampler=sampler, epoch=0, batch=0)

    @hvd.elastic.run
    def loop(state):
        while state.epoch < 1:
            for number, batch in enumerate(loader):
                if state.batch == 4 and hvd.rank() == 2:
                    die_once(folder)
                optimizer.zero_grad()
                model(torch.full((1, WIDTH), float(batch.sum()) * hvd.size())).sum().backward()
                optimizer.synchronize()
                if state.batch not in (0, 2):
                    with optimizer.skip_synchronize():
                        optimizer.step()
                sampler.record_batch(number, 5)
                state.batch += 1
                state.check_host_updates()
            state.epoch += 1
            sampler.set_epoch(state.epoch)

    loop(state)
    return model.weight[0, 0].item()


def several_steps_before_the_loop_counts(folder, kind):
    """Two steps of one optimizer, or one of a discriminator and two of a generator; rank 2 dies between them."""
    import spark_elastic.torch as hvd

    hvd.init()
    one, its_optimizer = built()
    other, others_optimizer = built() if kind == "gan" else (one, its_optimizer)
    parts = {"other": other, "others_optimizer": others_optimizer} if kind == "gan" else {}
    state = hvd.elastic.TorchState(one, its_optimizer, round=0, **parts)

    @hvd.elastic.run
    def loop(state):
        while state.round < 6:
            descend(one, its_optimizer, 1)
            if kind == "gan":
                descend(other, others_optimizer, 10)
            if state.round == 3 and hvd.rank() == 2:
                die_once(folder)
            descend(other, others_optimizer, 100)
            state.round += 1
            state.commit()

    loop(state)
    return one.weight[0, 0].item(), other.weight[0, 0].item()


def committed_between_passes(folder):
    """Two backward passes a step, a commit after each; rank 2 dies before the second pass."""
    import torch

    import spark_elastic.torch as hvd

    hvd.init()
    model, optimizer = built(passes=2)
    state = hvd.elastic.TorchState(model, optimizer, row=0)

    @hvd.elastic.run
    def loop(state):
        while state.row < 20:
            if state.row == 11 and hvd.rank() == 2:
                die_once(folder)
            model(torch.full((1, WIDTH), float(state.row))).sum().backward()
            state.row += 1
            if state.row % 2 == 0:
                optimizer.step()
                optimizer.zero_grad()
            state.commit()

    loop(state)
    return model.weight[0, 0].item(), state.row


def commits_without_an_optimizer(folder):
    """A commit each round; rank 0 has committed once more than rank 1 when rank 2 dies."""
    import spark_elastic.torch as hvd

    class State(hvd.elastic.ObjectState):
        def save(self):
            super().save()
            if self.n == 6 and hvd.rank() == 0:
                Path(folder, "committed").touch()

    hvd.init()
    state = State(n=0, total=0)
    versions = []

    @hvd.elastic.run
    def loop(state):
        first = not Path(folder, "killed").exists()
        versions.append((state.n, state.progress))
        while state.n < 10:
            if state.n == 5 and first and hvd.rank() == 1:
                late_for_the_data()
            if state.n == 5 and first and hvd.rank() == 2:
                die_after(folder)
            state.total += hvd.broadcast_object(state.n, root_rank=hvd.size() - 1)
            state.n += 1
            state.commit()
        return state.total

    return loop(state), state.n, state.progress, versions
