"""One call of `fit` or `run`, as a program: `python killed_fit.py torch FOLDER EPOCHS RESULT`. It writes a JSON file.

With "own" in place of the framework, `run` calls a loop of the user's own, of EPOCHS steps. The exit status is 3 if
that has lost all of its workers.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

from pyspark.sql import SparkSession

import spark_elastic
from spark_elastic import LocalLauncher
from spark_elastic.errors import StateLostError
from tests.integration.local import resumable_program
from tests.integration.spark import fits

STATE_LOST = 3


def run_loop(folder: Path, steps: int) -> dict[str, Any]:
    settings = resumable_program.settings(folder)
    try:
        first, *rest = spark_elastic.run(resumable_program.train, (steps, None, str(folder)), **settings)
    except StateLostError as error:
        print(error, flush=True)
        sys.exit(STATE_LOST)
    assert all(each == first for each in rest), rest
    return {"steps": first[1], "weights": first[2]}


def fit(framework: str, folder: Path, epochs: int) -> dict[str, Any]:
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
    return {"epochs": len(model.history), "weights": weights.tolist()}


def main() -> None:
    framework, folder, epochs, result = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4])
    outcome = run_loop(folder, epochs) if framework == "own" else fit(framework, folder, epochs)
    result.write_text(json.dumps(outcome))


if __name__ == "__main__":
    main()
