"""Objects that are saved without a pickle, and files that the restricted loader refuses."""

from __future__ import annotations

import io
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from spark_elastic.errors import CheckpointError
from spark_elastic.ml.callbacks import BestCheckpoint, EarlyStopping, LambdaCallback
from spark_elastic.ml.torch import serialization
from spark_elastic.runs import tensors


class Own(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)


def layers() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.GELU(), nn.Flatten(), nn.LSTM(3, 4), nn.MultiheadAttention(4, 2)
    )


@pytest.mark.parametrize(
    "value",
    [
        layers(),
        nn.CrossEntropyLoss(weight=torch.ones(3)),
        nn.functional.cross_entropy,
        torch.optim.Adam,
        [EarlyStopping("loss"), BestCheckpoint()],
        {"a": [1, 2.5, None, "x", True]},
    ],
    ids=lambda value: type(value).__name__,
)
def test_objects_of_the_framework_are_stored_without_trust(value: Any) -> None:
    file = serialization.dumps(value)
    assert file is not None
    assert type(serialization.loads(file)) is type(value)


@pytest.mark.parametrize(
    "value",
    [Own(), lambda x: x, LambdaCallback(on_epoch_end=print), os.system, Path],
    ids=["module", "lambda", "hook", "os", "path"],
)
def test_users_classes_and_functions_need_trust(value: Any) -> None:
    assert serialization.dumps(value) is None


def test_model_optimizer_and_scheduler_still_belong_together_after_loading() -> None:
    net = layers()
    optimizer = torch.optim.Adam([{"params": net[0].parameters(), "lr": 0.5}, {"params": net[1].parameters()}], lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    file = serialization.dumps({"net": net, "optimizer": optimizer, "scheduler": scheduler})
    assert file is not None
    loaded = serialization.loads(file)
    assert [group["lr"] for group in loaded["optimizer"].param_groups] == [0.5, 0.1]
    assert loaded["optimizer"].param_groups[0]["params"][0] is loaded["net"][0].weight
    assert loaded["scheduler"].optimizer is loaded["optimizer"]


class Evil:
    def __reduce__(self) -> Any:
        return os.mkdir, (os.environ["EVIL"],)


def test_file_that_would_run_code_is_refused_before_it_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EVIL", str(tmp_path / "evil"))
    file = io.BytesIO()
    torch.save({"model": Evil()}, file)
    with pytest.raises(CheckpointError, match="without trust"):
        serialization.loads(file.getvalue())
    with pytest.raises(CheckpointError, match=r"not what torch\.save has written"):
        tensors.from_bytes(tensors.to_bytes(Evil))
    assert not (tmp_path / "evil").exists()


def test_hollow_module_is_small_and_gets_its_weights_back() -> None:
    net = nn.Sequential(nn.Linear(1000, 1000), nn.BatchNorm1d(1000), nn.LSTM(1000, 10))
    file = serialization.dumps(serialization.hollow(net))
    assert file is not None
    assert len(file) < 20_000
    filled = serialization.fill(
        serialization.loads(file), tensors.from_bytes(serialization.weights_to_bytes(net))
    ).eval()
    x = torch.randn(4, 1000)
    assert torch.equal(filled(x)[0], net.eval()(x)[0])


def test_tied_weights_are_still_tied_when_filled() -> None:
    net = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    net[1].weight = net[0].weight
    filled = serialization.fill(serialization.hollow(net), net.state_dict())
    assert filled[1].weight is filled[0].weight
    assert torch.equal(filled[0].weight, net[0].weight)


def test_weights_of_another_architecture_are_refused() -> None:
    with pytest.raises(CheckpointError, match="do not fit Linear"):
        serialization.fill(nn.Linear(2, 2), nn.Linear(3, 3).state_dict())
