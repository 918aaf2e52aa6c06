"""What users who write their first programs meet: columns in another order, files of different length, early stops."""

from __future__ import annotations

import logging

import pytest

from spark_elastic.data.arrow_values import Fault, error_of
from spark_elastic.errors import InvalidSettingsError
from spark_elastic.ml.added_columns import OutputShape
from spark_elastic.ml.keras.compiling import check_order
from spark_elastic.ml.training.dry_run import DryRunResult, warn_of_no_prediction
from spark_elastic.reporting.progress import stop_line


def test_column_with_the_name_of_another_input_is_refused() -> None:
    with pytest.raises(InvalidSettingsError, match=r"'store' to 'day': .*in order, day, numbers, store"):
        check_order("feature_cols", "inputs", ["day", "numbers", "store"], [["store"], ["day"], ["price", "rooms"]])


def test_columns_in_order_or_with_names_of_their_own_are_accepted() -> None:
    check_order("feature_cols", "inputs", ["day", "store"], [["day"], ["store"]])
    check_order("feature_cols", "inputs", ["input_1", "input_2"], [["store"], ["day"]])
    check_order("feature_cols", "inputs", None, [["store"]])
    check_order("label_cols", "outputs", [None, None], [["store"], ["day"]])


def test_lengths_that_differ_in_each_partition_make_one_line() -> None:
    faults = [
        Fault("content", 3, 1, f"byte strings of {500 + n}", f"byte strings of {400 + n} as in the first row", "Pad", n)
        for n in range(30)
    ]
    message = str(error_of(faults, 900))
    assert message.count("content") == 1
    assert "90 of 900 rows" in message


@pytest.mark.parametrize(
    ("rule", "of_classes", "warned"), [(None, True, True), (None, False, False), ("argmax", True, False)]
)
def test_missing_prediction_is_warned_of_where_labels_are_classes(
    rule: str | None, of_classes: bool, warned: bool, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "spark_elastic.ml"):
        warn_of_no_prediction(DryRunResult((OutputShape("<f4", (3,)),), rule, of_classes=of_classes))
    assert ("prediction='argmax'" in caplog.text) == warned


def test_stop_says_after_which_epoch_and_why() -> None:
    said = " ".join(stop_line(56, 100, "the budget is used up").split())
    assert said == "spark_elastic: training was stopped after epoch 56/100: the budget is used up"
