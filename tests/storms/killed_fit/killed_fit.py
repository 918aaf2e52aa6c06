"""One call of `fit`, as a program: `python killed_fit.py torch FOLDER EPOCHS RESULT`. Its result is a JSON file."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

from pyspark.sql import SparkSession

from spark_elastic import LocalLauncher
from tests.integration.spark import fits


def main() -> None:
    framework, folder, epochs, result = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4])
    Path(json.loads(os.environ["KILLED_FIT"])["driver"]).write_text(str(os.getpid()))
    (folder / "finish").unlink(missing_ok=True)
    builder = SparkSession.builder.master("local[1]").config("spark.ui.enabled", "false")
    with builder.getOrCreate() as spark:
        preimport = ("tensorflow" if framework == "keras" else "torch",)
        estimator = fits.estimator(
            "keras" if framework == "keras" else "torch",
            folder,
            epochs=epochs,
            checkpoint_interval=1,
            run_id="one",
            num_proc=2,
            callbacks=[fits.FitDiary(str(folder), 0.001)],
            run_options={"launcher": LocalLauncher(preimport=preimport)},
        )
        model = estimator.fit(fits.rows(spark))
    weights = fits.weights_of(getattr(model, "module", None) or model.keras_model)
    result.write_text(json.dumps({"epochs": len(model.history), "weights": weights.tolist()}))


if __name__ == "__main__":
    main()
