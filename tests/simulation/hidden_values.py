"""Optimizers, a module and a metric with values outside of parameters and of an optimizer's `state`."""

from __future__ import annotations

from typing import Any

import torch


class Lookahead(torch.optim.Optimizer):
    """Every third step, moves the slow weights towards those of the optimizer within."""

    def __init__(self, base: torch.optim.Optimizer) -> None:
        super().__init__([p for group in base.param_groups for p in group["params"]], {})
        self.base, self.param_groups, self.steps = base, base.param_groups, 0
        self.slow = [[p.detach().clone() for p in group["params"]] for group in self.param_groups]

    def step(self, closure: Any = None) -> Any:
        loss = self.base.step(closure)
        self.steps += 1
        if self.steps % 3 == 0:
            for group, slow in zip(self.param_groups, self.slow, strict=True):
                for param, kept in zip(group["params"], slow, strict=True):
                    kept.lerp_(param.detach(), 0.5)
                    param.data.copy_(kept)
        return loss

    def state_dict(self) -> dict[str, Any]:
        return {"base": self.base.state_dict(), "slow": self.slow, "steps": self.steps}


class Sharpness(torch.optim.Optimizer):
    """SAM: steps with the gradients at a point uphill of the parameters, which a second evaluation computes."""

    def __init__(self, base: torch.optim.Optimizer) -> None:
        super().__init__([p for group in base.param_groups for p in group["params"]], {})
        self.base, self.param_groups, self.radius, self.evaluations = base, base.param_groups, 0.1, 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        assert closure is not None
        closure()
        moved = [param for group in self.param_groups for param in group["params"] if param.grad is not None]
        for param in moved:
            self.state[param]["old"] = param.detach().clone()
            param.add_(param.grad / (param.grad.norm() + 1e-6), alpha=self.radius)
        loss = closure()
        for param in moved:
            param.copy_(self.state[param].pop("old"))
        self.radius, self.evaluations = 0.99 * self.radius, self.evaluations + 2
        self.base.step()
        return loss

    def state_dict(self) -> dict[str, Any]:
        return {"base": self.base.state_dict(), "radius": self.radius, "evaluations": self.evaluations}


class Signs(torch.optim.Optimizer):
    """Moves by the signs of a running mean that it makes in its first step, less in each step."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})
        self.means: Any = None
        self._count, self.saved = 0, {"losses": []}

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        if closure is not None:
            closure()
        group = self.param_groups[0]
        if self.means is None:
            self.means = {index: torch.zeros_like(param) for index, param in enumerate(group["params"])}
        self._count += 1
        self.saved["losses"].append(self._count)
        for param, mean in zip(group["params"], self.means.values(), strict=True):
            if param.grad is not None:
                mean.lerp_(param.grad, 0.3)
                param.sub_(mean.sign(), alpha=group["lr"] / len(self.saved["losses"]))

    def state_dict(self) -> dict[str, Any]:
        return {"means": self.means, "count": self._count, "saved": self.saved}


class Average(torch.nn.Module):
    """Has its states where torchmetrics has them."""

    def __init__(self) -> None:
        super().__init__()
        self._defaults: dict[str, Any] = {}
        self.add_state("total", torch.zeros(()))
        self.add_state("all", [])
        self.reset()

    def add_state(self, name: str, value: Any) -> None:
        setattr(self, name, value)
        self._defaults[name] = value

    def reset(self) -> None:
        self._computed, self._update_count = None, 0
        self.total, self.all = torch.zeros(()), []

    def update(self, value: torch.Tensor) -> None:
        self._computed, self._update_count = None, self._update_count + 1
        self.total = self.total + value
        self.all.append(value)

    def compute(self) -> Any:
        if self._computed is None:
            self._computed = self.total / self._update_count + torch.stack(self.all).max()
        return self._computed


class Remembering(torch.nn.Linear):
    """Scales by what it has seen, in a buffer that is not persistent, and keeps two others that it makes and grows."""

    def __init__(self, inputs: int, longest_bank: int = 1000) -> None:
        super().__init__(inputs, 1)
        self.register_buffer("scale", torch.ones(()), persistent=False)
        self.register_buffer("bank", None)
        self.longest_bank, self.longest, self.calls = longest_bank, 2, 0

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        self.scale.mul_(0.98)
        self.bank = rows.detach() if self.bank is None else torch.cat([self.bank, rows.detach()])[-self.longest_bank :]
        return super().forward(rows) * self.scale + self.bank.mean() + self.cached(len(self.bank))

    def cached(self, length: int) -> torch.Tensor:
        if not hasattr(self, "table") or self.longest < length:
            self.longest = 2 * length
            self.register_buffer("table", torch.arange(self.longest) / 100, persistent=False)
        return self.table[:length].sum()  # fails if it is shorter than `longest`
