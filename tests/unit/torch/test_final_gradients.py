"""Gradients are final when the last backward of a step returns: what a loop then does to them is what one process does.

Each program trains with as many ranks as it is called for, each on its share of the rows, and the same program runs in
one process with plain torch on all rows. Both must end with the same parameters.
"""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import spark_elastic.torch as hvd
from tests.nightly import by_night
from tests.unit.worlds import together

ROWS, STEPS = 6, 4


def rows(step: int, features: int = 5) -> torch.Tensor:
    """The rows of this rank in a step; all of them in plain torch."""
    all_rows = torch.randn(ROWS, features, generator=torch.Generator().manual_seed(step))
    return all_rows if plain else all_rows[hvd.rank() :: hvd.size()]


plain = False
"""A program runs in one process, without this package."""


def wrapped(optimizer: torch.optim.Optimizer, **kwargs: Any) -> Any:
    return optimizer if plain else hvd.DistributedOptimizer(optimizer, **kwargs)


def model_of(*layers: torch.nn.Module) -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.Tanh(), torch.nn.Linear(7, 2))


def loss_of(model: torch.nn.Module, step: int, scale: float = 1.0) -> torch.Tensor:
    return model(rows(step)).square().mean() * scale


# --- the programs ---------------------------------------------------------------------------------


def clipping() -> list[torch.nn.Module]:
    model = model_of()
    optimizer = wrapped(torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9))
    for step in range(STEPS):
        optimizer.zero_grad()
        loss_of(model, step, 30).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
    return [model]


def clipping_as_horovod_does() -> list[torch.nn.Module]:
    model = model_of()
    optimizer = wrapped(torch.optim.SGD(model.parameters(), lr=0.5))
    for step in range(STEPS):
        optimizer.zero_grad()
        loss_of(model, step, 30).backward()
        if not plain:
            optimizer.synchronize()
        torch.nn.utils.clip_grad_value_(model.parameters(), 0.1)
        if plain:
            optimizer.step()
        else:
            with optimizer.skip_synchronize():
                optimizer.step()
    return [model]


def scaled_by_hand() -> list[torch.nn.Module]:
    model = model_of()
    optimizer = wrapped(torch.optim.SGD(model.parameters(), lr=0.5))
    for step in range(STEPS):
        model.zero_grad(set_to_none=False)
        loss_of(model, step).backward()
        for param in model.parameters():
            param.grad.mul_(param.grad.norm() + 1)
        optimizer.step()
    return [model]


def mixed_precision() -> list[torch.nn.Module]:
    """The recipe of PyTorch's documentation, with a step whose gradients overflow."""
    model = model_of()
    optimizer = wrapped(torch.optim.SGD(model.parameters(), lr=0.1))
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
    for step in range(STEPS):
        optimizer.zero_grad()
        scaler.scale(loss_of(model, step, float("inf") if step == 1 else 30)).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        scaler.step(optimizer)
        scaler.update()
    assert scaler.get_scale() == 128.0
    return [model]


def accumulated(passes: int, times: int, zero: bool = True, **kwargs: Any) -> list[torch.nn.Module]:
    model = model_of()
    optimizer = wrapped(torch.optim.SGD(model.parameters(), lr=0.1), backward_passes_per_step=passes, **kwargs)
    total = kwargs.get("op") is hvd.Sum
    for step in range(STEPS):
        if zero:
            optimizer.zero_grad()
        else:
            model.zero_grad()
        for part in range(times):
            loss = loss_of(model, step * times + part, 0.3)
            (loss / hvd.size() if total and not plain else loss).backward()
        if times % passes and not plain:  # what is left is not reduced before step()
            optimizer.synchronize()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05)
        optimizer.step()
    return [model]


def several_backwards() -> list[torch.nn.Module]:
    return accumulated(1, 3)


def several_backwards_summed() -> list[torch.nn.Module]:
    return accumulated(1, 3, op=hvd.Sum) + accumulated(2, 4, op=hvd.Sum)


def several_passes() -> list[torch.nn.Module]:
    return accumulated(3, 3) + accumulated(2, 5) + accumulated(4, 3, zero=False)


def head_unused_in_a_pass() -> list[torch.nn.Module]:
    model, head = model_of(), torch.nn.Linear(2, 1)
    optimizer = wrapped(torch.optim.Adam([*model.parameters(), *head.parameters()]), backward_passes_per_step=2)
    for step in range(STEPS):
        optimizer.zero_grad()
        loss_of(model, step).backward()
        head(model(rows(step + 50))).square().mean().backward()
        torch.nn.utils.clip_grad_norm_(head.parameters(), 0.05)
        optimizer.step()
    return [model, head]


def adversarial() -> list[torch.nn.Module]:
    """The order of calls of the DCGAN tutorial: the generator's backward leaves gradients on the discriminator."""
    torch.manual_seed(0)
    generator, critic = torch.nn.Linear(3, 5), model_of()
    g, c = (wrapped(torch.optim.Adam(each.parameters(), lr=0.01)) for each in (generator, critic))
    for step in range(STEPS):
        critic.zero_grad()
        critic(rows(step)).square().mean().backward()
        fake = generator(rows(step + 100, 3))
        (critic(fake.detach()) - 1).square().mean().backward()
        torch.nn.utils.clip_grad_norm_(critic.parameters(), 0.1)
        c.step()
        generator.zero_grad()
        critic(fake).square().mean().backward()
        g.step()
    return [generator, critic]


def checkpoints(reentrant: bool, inside_only: bool) -> list[torch.nn.Module]:
    model = model_of()
    layer = torch.nn.Linear(5, 5)
    optimizer = wrapped(torch.optim.SGD([*model.parameters(), *layer.parameters()], lr=0.1))

    def inner(x: torch.Tensor) -> torch.Tensor:
        return checkpoint(layer, x, use_reentrant=reentrant)  # type: ignore[no-any-return]

    for step in range(STEPS):
        optimizer.zero_grad()
        x = rows(step).requires_grad_()
        x = checkpoint(lambda x: inner(inner(x)), x, use_reentrant=reentrant)  # one layer, computed in two graphs
        y = checkpoint(model, x, use_reentrant=reentrant) if inside_only else model(x)
        (y.square().mean() * 30).backward()
        torch.nn.utils.clip_grad_norm_([*model.parameters(), *layer.parameters()], 0.1)
        optimizer.step()
    return [model, layer]


def reentrant_checkpoints() -> list[torch.nn.Module]:
    return checkpoints(True, False) + checkpoints(True, True)


def other_checkpoints() -> list[torch.nn.Module]:
    return checkpoints(False, False) + checkpoints(False, True)


def set_by_hand() -> list[torch.nn.Module]:
    model = model_of()
    optimizer = wrapped(torch.optim.SGD(model.parameters(), lr=0.1))
    for step in range(STEPS):
        found = torch.autograd.grad(loss_of(model, step), list(model.parameters()))
        for param, grad in zip(model.parameters(), found, strict=True):
            param.grad = grad
        optimizer.step()
    return [model]


def penalty() -> list[torch.nn.Module]:
    model = model_of()
    optimizer = wrapped(torch.optim.SGD(model.parameters(), lr=0.1))
    for step in range(STEPS):
        optimizer.zero_grad()
        x = rows(step).requires_grad_()
        (slope,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
        (slope.square().sum(1) - 1).square().mean().backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
    return [model]


def unfrozen_and_frozen() -> list[torch.nn.Module]:
    model = model_of()
    model[0].requires_grad_(False)
    optimizer = wrapped(torch.optim.SGD(model.parameters(), lr=0.1))
    for step in range(2 * STEPS):
        model[0].requires_grad_(3 <= step < 6)
        model.zero_grad()
        loss_of(model, step, 30).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
    return [model]


def closures() -> list[torch.nn.Module]:
    model = model_of()
    optimizer = wrapped(torch.optim.SGD(model.parameters(), lr=0.1))
    for step in range(STEPS):

        def closure(step: int = step) -> torch.Tensor:
            optimizer.zero_grad()
            loss = loss_of(model, step, 30)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            return loss

        optimizer.step(closure)
    return [model]


def backwards_that_fail() -> list[torch.nn.Module]:
    """The loop skips batches of which backward raises, as those do that are too large for the memory."""

    class TooLarge(Exception):
        pass

    def fails(_: Any) -> None:
        raise TooLarge

    model = model_of()
    optimizer = wrapped(torch.optim.SGD(model.parameters(), lr=0.1))
    for step in range(STEPS):
        optimizer.zero_grad()
        loss_of(model, step).backward()
        optimizer.step()
        optimizer.zero_grad()
        hidden = model[0](rows(step + 50))
        hidden.register_hook(fails)
        try:
            model[2](hidden.tanh()).square().mean().backward()
        except TooLarge:
            model.zero_grad()
    return [model]


def summed(optimizer: torch.optim.Optimizer) -> tuple[Any, int]:
    """With `op=Sum`, and the number to divide losses by."""
    return (optimizer, 1) if plain else (wrapped(optimizer, op=hvd.Sum), hvd.size())


def looked_at_between() -> list[torch.nn.Module]:
    """`autograd.grad` between backward and step, a step that is made twice, and gradients that are never reset."""
    model, other = model_of(), model_of()
    optimizer, count = summed(torch.optim.SGD(model.parameters(), lr=0.1))
    never_reset, _ = summed(torch.optim.SGD(other.parameters(), lr=0.1))
    for step in range(STEPS):
        optimizer.zero_grad()
        (loss_of(model, step, 30) / count).backward()
        torch.autograd.grad(loss_of(model, step), list(model.parameters()))
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        optimizer.step()
        (loss_of(other, step) / count).backward()
        torch.nn.utils.clip_grad_norm_(other.parameters(), 0.1)
        never_reset.step()
    return [model, other]


def partly_set_by_hand() -> list[torch.nn.Module]:
    model, head = model_of(), torch.nn.Linear(2, 1)
    optimizer = wrapped(torch.optim.SGD([*model.parameters(), *head.parameters()], lr=0.1))
    for step in range(STEPS):
        optimizer.zero_grad()
        loss_of(model, step).backward()
        loss = head(model(rows(step + 50)).detach()).square().mean()
        head.weight.grad, head.bias.grad = torch.autograd.grad(loss, [head.weight, head.bias])
        optimizer.step()
    return [model, head]


def set_by_hand_twice() -> list[torch.nn.Module]:
    """Sharpness-aware minimisation: the second gradients are those of a step; every other step is skipped."""
    model = model_of()
    params = list(model.parameters())
    optimizer = wrapped(torch.optim.SGD(params, lr=0.1))

    def set_gradients(step: int) -> None:
        for param, grad in zip(params, torch.autograd.grad(loss_of(model, step), params), strict=True):
            param.grad = grad
        if not plain:
            optimizer.synchronize()

    for step in range(2 * STEPS):
        set_gradients(step)
        ascent = [0.05 * param.grad for param in params]
        torch._foreach_add_([param.data for param in params], ascent)
        set_gradients(step)
        torch._foreach_sub_([param.data for param in params], ascent)
        if step % 2:
            optimizer.step()
    return [model]


def written_through_data() -> list[torch.nn.Module]:
    model = model_of()
    optimizer = wrapped(torch.optim.Adam(model.parameters(), lr=0.1))
    for step in range(STEPS):
        optimizer.zero_grad()
        loss_of(model, step).backward()
        for param in model.parameters():
            param.grad.detach_()
            param.grad.data = param.grad.data.clamp(-0.1, 0.1)
        optimizer.load_state_dict(optimizer.state_dict())
        optimizer.step()
    return [model]


PROGRAMS = [
    looked_at_between,
    partly_set_by_hand,
    set_by_hand_twice,
    written_through_data,
    clipping,
    clipping_as_horovod_does,
    scaled_by_hand,
    mixed_precision,
    several_backwards,
    several_backwards_summed,
    several_passes,
    head_unused_in_a_pass,
    adversarial,
    reentrant_checkpoints,
    other_checkpoints,
    set_by_hand,
    penalty,
    unfrozen_and_frozen,
    closures,
    backwards_that_fail,
]


def run_all(alone: bool = False) -> dict[str, list[list[float]]]:
    """The parameters at the end of each program, by its name."""
    global plain
    plain = alone
    if not alone:
        hvd.init()
    out = {}
    for program in PROGRAMS:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            warnings.filterwarnings("ignore", "None of the inputs have requires_grad")
            models = program()
        out[program.__name__] = [p.detach().flatten().tolist() for model in models for p in model.parameters()]
    plain = False
    return out


@pytest.mark.parametrize("count", by_night([1, 2, 3], but=[2]))
def test_every_program_ends_as_in_one_process(count):
    want = run_all(alone=True)
    for results in together(run_all, count=count):
        wrong = {
            name: max(abs(a - b) for x, y in zip(want[name], got, strict=True) for a, b in zip(x, y, strict=True))
            for name, got in results.items()
        }
        assert {name: error for name, error in wrong.items() if not error < 2e-5} == {}
