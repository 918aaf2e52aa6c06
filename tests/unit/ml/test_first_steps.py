"""What users who write their first programs meet: columns in another order, outputs without a prediction."""

from __future__ import annotations

import logging

import pytest

from spark_elastic.errors import InvalidSettingsError
from spark_elastic.ml.keras.compiling import check_order
from spark_elastic.ml.serving import OutputShape
from spark_elastic.ml.training.dry_run import DryRunResult, warn_of_no_prediction


def test_column_with_the_name_of_another_input_is_refused() -> None:
    with pytest.raises(InvalidSettingsError, match=r"'store' to 'day': .*in order, day, numbers, store"):
        check_order("feature_cols", "inputs", ["day", "numbers", "store"], [["store"], ["day"], ["price", "rooms"]])


def test_columns_in_order_or_with_names_of_their_own_are_accepted() -> None:
    check_order("feature_cols", "inputs", ["day", "store"], [["day"], ["store"]])
    check_order("feature_cols", "inputs", ["input_1", "input_2"], [["store"], ["day"]])
    check_order("feature_cols", "inputs", None, [["store"]])
    check_order("label_cols", "outputs", [None, None], [["store"], ["day"]])


@pytest.mark.parametrize(
    ("rule", "of_classes", "warned"), [(None, True, True), (None, False, False), ("argmax", True, False)]
)
def test_missing_prediction_is_warned_of_where_labels_are_classes(
    rule: str | None, of_classes: bool, warned: bool, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "spark_elastic.ml"):
        warn_of_no_prediction(DryRunResult((OutputShape("<f4", (3,)),), rule, of_classes=of_classes))
    assert ("prediction='argmax'" in caplog.text) == warned
