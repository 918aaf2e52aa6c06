"""Modules that executors import by name."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from torch import nn


class Logging(nn.Module):
    """Adds up its input, and writes down the process each time that it is loaded."""

    def __init__(self, log: str) -> None:
        super().__init__()
        self.log = log

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        with Path(self.log).open("a") as file:
            file.write(f"{os.getpid()}\n")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.sum(dim=1)


class Ids(nn.Module):
    """Of integers [rows, 2] and a number [rows, 1]: the integers again, which it learns nothing about."""

    def __init__(self) -> None:
        super().__init__()
        self.price = nn.Linear(1, 1)

    def forward(self, ids: torch.Tensor, price: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        assert ids.dtype == torch.int64
        return self.price(price).squeeze(1), ids


class TwoInputs(nn.Module):
    """Of numbers [rows, 3] and a word's number [rows]: two outputs."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.words = nn.Embedding(5, 2)
        self.size = nn.Linear(5, 1)
        self.kind = nn.Linear(5, 4)

    def forward(self, x: torch.Tensor, word: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        joined = torch.cat([x, self.words(word)], dim=1)
        return self.kind(joined), self.size(joined).squeeze(1)
