"""A driver that fits with checkpoints under `run_id="one"`: python -m ... FOLDER NAME.

It ends after the epoch in which `FOLDER/finish-NAME` appears, and writes its outcome to `FOLDER/outcome-NAME`, JSON:
`error` and `type` of what `fit` has raised, or `epochs`.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from spark_elastic.ml.callbacks import Callback, Logs, Run
from spark_elastic.runs import lease as run_lease

EPOCHS = 1_000_000
BEAT_S, LEASE_S = 0.4, 2.4
"""Seconds between heartbeats and of a lease, in the proportion of the real ones."""


class Finish(Callback):
    """Ends the fit after the epoch in which a file appears; each step takes 10 ms."""

    def __init__(self, file: str) -> None:
        self._file = file

    def on_batch_begin(self, run: Run) -> None:
        time.sleep(0.01)

    def on_epoch_end(self, run: Run, logs: Logs) -> None:
        if os.path.exists(self._file):
            run.stop("the file is there")


def main() -> None:
    folder, name = Path(sys.argv[1]), sys.argv[2]
    # in proportion, so that a test need not pause for a minute and more
    run_lease.WATCH_S *= BEAT_S / run_lease.BEAT_S
    run_lease.BEAT_S, run_lease.LEASE_S = BEAT_S, LEASE_S
    import torch

    from spark_elastic import ElasticTorchEstimator, LocalLauncher
    from spark_elastic.data.dataset import pack

    values = np.arange(40, dtype="<f4")
    rows = pack({"features_0": values.reshape(20, 2), "label_0": values[:20]}, folder / f"set-{name}")
    net = torch.nn.Linear(2, 1)
    estimator = ElasticTorchEstimator(
        model=net,
        optimizer=torch.optim.SGD(net.parameters(), lr=1e-6),
        loss=torch.nn.MSELoss(),
        label_shapes=[[1]],
        batch_size=10,
        callbacks=[Finish(str(folder / f"finish-{name}"))],
        num_proc=1,
        run_options={"launcher": LocalLauncher(preimport=("torch",))},
        verbose=0,
        epochs=EPOCHS,
        checkpoint_dir=str(folder / "runs"),
        checkpoint_interval=1,
        keep_checkpoints=3,
        run_id="one",
    )
    try:
        outcome: dict[str, Any] = {"epochs": len(estimator.from_dataset_path(rows).history)}
    except Exception as error:
        outcome = {"error": str(error), "type": type(error).__name__}
    (folder / f"outcome-{name}.partial").write_text(json.dumps(outcome))
    (folder / f"outcome-{name}.partial").rename(folder / f"outcome-{name}")


if __name__ == "__main__":
    main()
