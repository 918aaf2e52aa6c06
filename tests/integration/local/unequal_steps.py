"""Training functions in which some ranks make fewer steps than the others."""

from __future__ import annotations

from typing import Any


def _model() -> Any:
    import torch

    import spark_elastic.torch as hvd

    hvd.init()
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 1)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.01))
    return hvd, model, optimizer


def _step(model: Any, optimizer: Any) -> None:
    import torch

    optimizer.zero_grad()
    model(torch.ones(2, 3)).sum().backward()
    optimizer.step()


def plain(steps: dict[int, int]) -> int:
    """Make as many steps as the rank is given."""
    hvd, model, optimizer = _model()
    for _ in range(steps[hvd.rank()]):
        _step(model, optimizer)
    return steps[hvd.rank()]


def in_loop(steps: dict[int, int]) -> int:
    """The same in an elastic loop."""
    hvd, model, optimizer = _model()
    state = hvd.elastic.TorchState(model=model, optimizer=optimizer, step=0)

    @hvd.elastic.run
    def loop(state: Any) -> None:
        while state.step < steps[hvd.rank()]:
            _step(model, optimizer)
            state.step += 1
            state.commit()

    loop(state)
    return int(state.step)
