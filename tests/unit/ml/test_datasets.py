"""The datasets of fits."""

import numpy as np
import pytest

from spark_elastic.data.catalog import delete_unless_used, mark_used
from spark_elastic.data.dataset import pack
from spark_elastic.data.store import Store
from spark_elastic.ml.datasets import SharedDatasets


class Away:
    """A store that answers nothing, with an error of its own package."""

    url = "s3://away/set"

    def __getattr__(self, name):
        raise RuntimeError("HTTP 503")


def test_unreachable_store_is_logged_and_raises_nothing(caplog):
    delete_unless_used(Away())
    assert "s3://away/set could not be deleted: HTTP 503" in caplog.text


@pytest.mark.parametrize("keep", [False, True])
def test_fits_of_one_call_share_rows_until_the_last_is_done(tmp_path, keep):
    shared, written = SharedDatasets(fits=3), []

    def write():
        written.append(pack({"x": np.arange(3)}, Store.create(tmp_path / str(len(written)))))
        mark_used(written[-1].store, keep)
        return written[-1]

    found = []
    for settings in ("a", "b", "a"):
        found.append(shared.get(settings, write))
        assert all(each.store.exists() for each in found)
        shared.done()
    assert found == [written[0], written[1], written[0]]
    assert [each.store.exists() for each in written] == [keep, keep]
