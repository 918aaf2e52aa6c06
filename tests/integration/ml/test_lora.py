"""A LoRA adapter that is trained from a DataFrame, with a kill, beside plain torch in one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from spark_elastic import ElasticTorchEstimator
from tests.integration.ml.test_lightning import DiesOnce
from tests.unit.ml.torch import test_frozen as unit

pytestmark = pytest.mark.nightly


@pytest.mark.parametrize("as_function", [False, True])
def test_adapter_is_as_undisturbed_after_a_kill(as_function: bool, spark: Any, tmp_path: Path) -> None:
    texts = unit.make_texts(tmp_path / "texts")
    plain = unit.trained_by_torch(texts)
    with texts.reader("train", batch_size=unit.ROWS, shuffle=False) as reader:
        columns = [next(iter(reader.epoch(0)))[name].tolist() for name in ("features_0", "features_1", "label_0")]
    schema = "input_ids array<long>, attention_mask array<long>, labels long"
    table = spark.createDataFrame(list(zip(*columns, strict=True)), schema).coalesce(1).cache()
    estimator = ElasticTorchEstimator.from_transformers(
        unit.adapted if as_function else unit.adapted(),
        **unit.NAMES,
        optimizer=unit.adam,
        shuffle=False,
        batch_size=unit.BATCH,
        epochs=unit.EPOCHS,
        callbacks=[DiesOnce(tmp_path / "died", 7)],
        num_proc=2,
        min_num_proc=1,
        store=str(tmp_path),
        verbose=0,
    )
    fitted = estimator.fit(table)
    assert [event["kind"] for event in fitted.events].count("lost") == 1
    unit.assert_weights(fitted.module.model.state_dict(), plain)
    ids = torch.tensor(columns[0])
    expected = plain(input_ids=ids, attention_mask=torch.ones_like(ids)).logits.detach()
    rows = fitted.transform(table).select("output", "prediction").collect()
    torch.testing.assert_close(torch.tensor([row.output for row in rows], dtype=torch.float64), expected)
    assert [row.prediction for row in rows] == expected.argmax(1).tolist()
