"""LightningModules for tests."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import torch
import torchmetrics.classification as tm
from torch import nn
from torch.nn import functional as F
from torchmetrics import MetricCollection


class Classifier(pl.LightningModule):
    """Three classes of six numbers, as a tutorial of Lightning would write it."""

    def __init__(self, lr: float = 0.1, width: int = 8) -> None:
        super().__init__()
        self.save_hyperparameters()
        torch.manual_seed(3)
        self.net = nn.Sequential(nn.Linear(6, width), nn.Tanh(), nn.Linear(width, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net(x)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        loss = F.cross_entropy(self(x), y)
        self.log("train_loss", loss, prog_bar=True, on_step=True, on_epoch=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        self.log("val_loss", F.cross_entropy(self(x), y), prog_bar=True)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=self.hparams["lr"])


class Measured(Classifier):
    """Logs all kinds of values, and has a schedule that needs the number of steps."""

    def __init__(self) -> None:
        super().__init__()
        self.accuracy = tm.MulticlassAccuracy(3)
        self.val_accuracy = tm.MulticlassAccuracy(3)
        self.val_auc = tm.MulticlassAUROC(3)
        self.many = MetricCollection([tm.MulticlassPrecision(3), tm.MulticlassRecall(3)], prefix="val_")
        self.epochs_begun: list[int] = []

    def on_train_epoch_start(self) -> None:
        self.epochs_begun.append(self.current_epoch)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        output = self(x)
        loss = F.cross_entropy(output, y)
        self.accuracy(output, y)
        self.log("accuracy", self.accuracy, on_step=False, on_epoch=True)
        on_epoch = {"on_step": False, "on_epoch": True}
        self.log("train_loss", loss, **on_epoch)
        self.log("place", 100.0 * self.current_epoch + 10 * batch_idx + self.global_step, **on_epoch)
        self.log_dict({"shared": loss.detach() * 2, "begun": float(len(self.epochs_begun))}, **on_epoch)
        if batch_idx % 2 == 0:
            self.log("even", loss, **on_epoch)
        return {"loss": loss}

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        output = self(x)
        loss = F.cross_entropy(output, y)
        self.val_accuracy.update(output, y)
        self.val_auc.update(output, y)
        self.many.update(output, y)
        self.log("val_loss", loss)
        self.log("val_accuracy", self.val_accuracy)
        self.log("val_auc", self.val_auc)
        self.log_dict(self.many)
        self.log("val_place", 100.0 * self.current_epoch + 10 * batch_idx + self.global_step)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=self.hparams["lr"])
        total = self.trainer.estimated_stepping_batches
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.2, total_steps=int(total))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class Remembering(pl.Callback):
    """Keeps Lightning's own values of each epoch, in `rows`."""

    def __init__(self) -> None:
        self.rows: list[dict[str, float]] = []

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        row = {name: float(value) for name, value in trainer.callback_metrics.items()}
        self.rows.append({**row, "lr": trainer.optimizers[0].param_groups[0]["lr"]})


def trained_by_lightning(
    module: pl.LightningModule, train: Any, validation: Any, *, batch_size: int, epochs: int
) -> list[dict[str, float]]:
    """Train with Lightning's own Trainer in this process, the rows in their order; return its values by epoch."""

    def loader(rows: Any) -> Any:
        return torch.utils.data.DataLoader(torch.utils.data.TensorDataset(*rows), batch_size=batch_size)

    remembering = Remembering()
    quiet = {"enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}
    trainer = pl.Trainer(
        accelerator="cpu", max_epochs=epochs, logger=False, num_sanity_val_steps=0, callbacks=[remembering], **quiet
    )
    trainer.fit(module, loader(train), loader(validation))
    return remembering.rows
