"""`amp`: the values of torch.autocast and GradScaler in one process, in worlds, and in checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import spark_elastic.torch as hvd
from spark_elastic.data.dataset import Dataset
from spark_elastic.errors import CheckpointError, InvalidSettingsError
from spark_elastic.ml.callbacks import Callback
from spark_elastic.ml.torch.train import assemble
from tests.unit.ml.in_worlds import at_call
from tests.unit.ml.torch import trainings
from tests.unit.ml.torch.estimators import estimator, make_net, weights_of
from tests.unit.world_link import die, link, tell
from tests.unit.worlds import WorldDriver, together

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


def steep(output: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
    """A loss whose gradients, times the first loss scale, are infinite in float16."""
    return 1e3 * F.cross_entropy(output, label)


def trained_by_torch(dataset: Dataset, amp: str, loss: Any, epochs: int) -> tuple[list[float], float]:
    """Train as torch's documentation does; return the weights, and the loss scale at the end."""
    net = make_net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.001 if loss is steep else 0.1)
    scaler = torch.amp.GradScaler("cpu", enabled=amp == "fp16")
    for epoch in range(epochs):
        with dataset.reader("train", batch_size=16, shuffle=False, prefetch=0) as reader:
            for batch in reader.epoch(epoch):
                x, y = (torch.tensor(batch.tensors[name]) for name in ("features_0", "label_0"))
                optimizer.zero_grad()
                with torch.autocast("cpu", DTYPES[amp]):
                    value = loss(net(x), y)
                scaler.scale(value).backward()
                scaler.unscale_(optimizer)
                nn.utils.clip_grad_norm_(net.parameters(), 0.5)
                scaler.step(optimizer)
                scaler.update()
    return [number for value in net.state_dict().values() for number in value.reshape(-1).tolist()], scaler.get_scale()


def changes(amp: str | None, loss: Any) -> dict[str, Any]:
    net = make_net()
    lr = 0.001 if loss is steep else 0.1
    return {
        "model": net,
        "optimizer": torch.optim.SGD(net.parameters(), lr=lr),
        "loss": loss,
        "amp": amp,
        "shuffle": False,
        "gradient_clip_norm": 0.5,
        "epochs": 3,
    }


@pytest.mark.parametrize(
    ("amp", "loss", "scale"),
    [("bf16", F.cross_entropy, 1.0), ("fp16", F.cross_entropy, 65536.0), ("fp16", steep, None)],
)
def test_amp_gives_the_weights_of_plain_autocast(amp: str, loss: Any, scale: float | None, dataset: Dataset) -> None:
    expected, expected_scale = trained_by_torch(dataset, amp, loss, 3)
    if scale is None:  # steps were left out, and there were others
        assert 1.0 < expected_scale < 65536.0
    else:
        assert expected_scale == scale
    found = weights_of(estimator(**changes(amp, loss)).from_dataset_path(dataset))
    assert found == pytest.approx(expected, rel=1e-6)
    full = weights_of(estimator(**changes(None, loss)).from_dataset_path(dataset))
    assert full != pytest.approx(expected, rel=1e-4)


def strict(output: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
    assert output.dtype == torch.float32
    return F.cross_entropy(output, label)


def dtype_of(output: torch.Tensor, label: torch.Tensor) -> float:
    return float(output.dtype == torch.float32)


def test_losses_and_metrics_get_float32_and_the_model_stays_it(dataset: Dataset) -> None:
    model = estimator(**changes("bf16", strict), metrics={"full": dtype_of}).from_dataset_path(dataset)
    assert model.history["full"] == [1.0] * 3
    assert {value.dtype for value in model.module.state_dict().values()} == {torch.float32}


def test_a_training_that_resumes_has_the_loss_scale_of_the_checkpoint(dataset: Dataset, tmp_path: Path) -> None:
    settings = {**changes("fp16", steep), "run_id": "one"}
    whole = weights_of(estimator(**{**settings, "checkpoint_dir": str(tmp_path / "a")}).from_dataset_path(dataset))
    for epochs in (1, 3):
        made = estimator(**{**settings, "checkpoint_dir": str(tmp_path / "b"), "epochs": epochs})
        model = made.from_dataset_path(dataset)
    assert weights_of(model) == whole
    with pytest.raises(CheckpointError, match=r"amp was .*fp16"):
        estimator(**{**settings, "checkpoint_dir": str(tmp_path / "b"), "amp": "bf16"}).from_dataset_path(dataset)


def test_amp_is_bf16_or_fp16_and_not_exact(dataset: Dataset) -> None:
    with pytest.raises(InvalidSettingsError, match="'bf16', 'fp16'"):
        estimator(amp="half")
    with pytest.raises(InvalidSettingsError, match="amp='bf16' may make the result depend"):
        estimator(amp="bf16", consistency="exact").from_dataset_path(dataset)
    with pytest.raises(InvalidSettingsError, match="torch refuses BCELoss under autocast"):
        estimator(amp="bf16", loss=nn.BCELoss()).from_dataset_path(dataset)


# --- in worlds ------------------------------------------------------------------------------------------


class UntilThree(Callback):
    """Tells of the tenth step, and ends the training some steps after there are three workers."""

    together = 0

    def on_batch_end(self, run: Any) -> None:
        if run.step == 10:
            tell("ten")
        self.together = self.together + 1 if run.size == 3 else 0
        if self.together == 5:
            run.stop("enough")


def scaled_in_worker(data: Path, folder: Path, dies: int, **changes: Any) -> dict[str, Any]:
    """Train with a scaler; worker `dies` ends itself in a backward pass."""
    net = trainings.make_net().float()
    if link().worker == dies:
        net[0].register_full_backward_pre_hook(at_call(7, die))
    settings = {"loss": steep, "metrics": {}, "amp": "fp16", "epochs": 10_000, "callbacks": [UntilThree()]}
    optimizer = torch.optim.SGD(net.parameters(), lr=0.001)
    training = trainings.make_training(data, folder, model=net, optimizer=optimizer, **{**settings, **changes})
    hvd.init()
    trainer = assemble(training)
    trainer.run()
    weights = [number for value in net.state_dict().values() for number in value.reshape(-1).tolist()]
    return {"scaler": trainer.engine.scaler.state_dict(), "weights": weights, "size": hvd.size()}


def test_workers_share_the_loss_scale_after_a_loss_and_with_newcomers(tmp_path: Path) -> None:
    trainings.make_set(tmp_path / "set", float32=True)
    with WorldDriver(start_with=2) as driver:
        driver.start(scaled_in_worker, tmp_path / "set", tmp_path / "run", 2, count=2)
        driver.wait(lambda: driver.told("ten"))
        driver.start(scaled_in_worker, tmp_path / "set", tmp_path / "run", 2, count=2)
        results = driver.results(3)
    assert [result["size"] for result in results] == [3] * 3
    assert results[0]["scaler"]["scale"] < 65536.0
    assert all(result == results[0] for result in results)


def two_rows_in_worker(data: Path, folder: Path) -> dict[str, Any]:
    return scaled_in_worker(data, folder, 0, batch_size=2, epochs=1)


def test_a_worker_without_rows_in_its_first_batch_scales_as_the_others(tmp_path: Path) -> None:
    trainings.make_set(tmp_path / "set", float32=True)
    results = together(two_rows_in_worker, tmp_path / "set", tmp_path / "run", count=3)
    assert all(result == results[0] for result in results)
