"""Arrow batches become records, without Spark, independently of where the batches are cut."""

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from spark_elastic.data.arrow_values import RowsRefused
from spark_elastic.data.columns import Column, Tensor
from spark_elastic.data.encode import Encoder
from spark_elastic.data.manifest import Kind
from spark_elastic.data.write_task import Receipt, WriteTask, validation_rows

NUMBER = Tensor("n", (Column("n", "scalar", "<i8"),), "<i4", Kind.DENSE, False, None, None, False)
MATRIX = Tensor("m", (Column("m", "list", "<f4", 2),), "<f4", Kind.DENSE, True, None, None, False)
RAGGED = Tensor("r", (Column("r", "list", "<i4", 1),), "<i8", Kind.ARRAY, False, None, None, False)
PADDED = Tensor("p", (Column("r", "list", "<i4", 1),), "<f8", Kind.DENSE, False, None, 6, False)
TEXT = Tensor("t", (Column("t", "string", "|u1"),), "|u1", Kind.STRING, False, None, None, False)
TENSORS = (NUMBER, MATRIX, RAGGED, PADDED, TEXT)

row = st.fixed_dictionaries(
    {
        "n": st.integers(-(2**31), 2**31 - 1),
        "m": st.lists(
            st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=2, max_size=2),
            min_size=3,
            max_size=3,
        ),
        "r": st.lists(st.integers(-(2**31), 2**31 - 1), max_size=6),
        "t": st.text(max_size=5),
    }
)


def table(rows, large):
    text = pa.large_string() if large else pa.string()
    schema = {"n": pa.int64(), "m": pa.list_(pa.list_(pa.float32())), "r": pa.list_(pa.int32()), "t": text}
    return pa.Table.from_pylist(rows, pa.schema(list(schema.items())))


def cut(blob):
    ends = np.cumsum(blob.lengths)
    return [blob.data[end - length : end].tobytes() for end, length in zip(ends, blob.lengths, strict=True)]


@given(rows=st.lists(row, min_size=1, max_size=20), size=st.integers(1, 20), large=st.booleans())
def test_records_do_not_depend_on_the_batches(rows, size, large):
    encoder, blocks, blobs = Encoder(TENSORS), [], {"r": [], "t": []}
    for batch in table(rows, large).to_batches(max_chunksize=size):  # slices: their offsets do not start at 0
        block = encoder.encode(batch)
        blocks.append(block.records.copy())
        for name, found in blobs.items():
            found += cut(block.blobs[name])
    records = np.concatenate(blocks)
    assert encoder.rows == len(rows)
    assert records["n"].tolist() == [r["n"] for r in rows]
    np.testing.assert_array_equal(records["m"], np.array([r["m"] for r in rows], np.float32))
    assert [np.frombuffer(value, np.int64).tolist() for value in blobs["r"]] == [r["r"] for r in rows]
    assert records["p"].tolist() == [r["r"] + [0] * (6 - len(r["r"])) for r in rows]
    assert [value.decode() for value in blobs["t"]] == [r["t"] for r in rows]


@given(rows=st.lists(row, min_size=1, max_size=20), data=st.data())
def test_chosen_rows_keep_their_values_of_variable_length(rows, data):
    block = Encoder(TENSORS).encode(table(rows, False).combine_chunks().to_batches()[0])
    chosen = data.draw(st.lists(st.integers(0, len(rows) - 1), max_size=10))
    taken = block.take(np.array(chosen, np.int64))
    assert taken.records["n"].tolist() == [rows[index]["n"] for index in chosen]
    assert [value.decode() for value in cut(taken.blobs["t"])] == [rows[index]["t"] for index in chosen]
    start, stop = sorted(data.draw(st.tuples(*[st.integers(0, len(rows))] * 2)))
    assert [value.decode() for value in cut(block[start:stop].blobs["t"])] == [r["t"] for r in rows[start:stop]]


def test_rows_are_counted_over_the_batches_of_a_partition():
    encoder = Encoder((replace(NUMBER, dtype="|i1"),))
    encoder.encode(pa.RecordBatch.from_pydict({"n": [1, 2, 3]}))
    with pytest.raises(RowsRefused) as caught:
        encoder.encode(pa.RecordBatch.from_pydict({"n": [4, 500, 600]}))
    (fault,) = caught.value.faults
    assert (fault.column, fault.rows, fault.row) == ("n", 2, 4)


@pytest.mark.parametrize(
    ("kind", "dtype", "fine", "rounded"),
    [
        ("int64", "<f4", [2**24, -(2**24), 20_000_002], [20_000_001, -(2**24) - 1, 2**63 - 1]),
        ("int32", "<f4", [2**24, -(2**31)], [2**24 + 1, 2**31 - 1]),
        ("int64", "<f8", [2**53, 2**62], [2**53 + 1]),
        ("int16", "<f2", [2048], [2049]),
    ],
)
def test_integers_that_a_float_would_round_are_refused(kind, dtype, fine, rounded):
    tensor = Tensor("n", (Column("n", "scalar", np.dtype(kind).str),), dtype, Kind.DENSE, True, None, None, True)
    batch = lambda values: pa.RecordBatch.from_arrays([pa.array(values, kind)], ["n"])  # noqa: E731
    assert Encoder((tensor,)).encode(batch(fine)).records["n"][:, 0].tolist() == fine
    for value in rounded:
        with pytest.raises(RowsRefused) as caught:
            Encoder((tensor,)).encode(batch([*fine, value, 1]))
        (fault,) = caught.value.faults
        assert (fault.rows, fault.row, fault.setting) == (1, len(fine), "dtypes")
        assert fault.found == f"integers such as {value}"
        assert "all integers up to" in fault.expected


def test_decimals_of_scale_0_are_not_rounded_and_fractions_may_be():
    for whole in (True, False):
        column = Column("d", "scalar", "<f8", whole=whole)
        tensor = Tensor("d", (column,), "<f4", Kind.DENSE, True, None, None, True)
        encoder = Encoder((tensor,))
        encoder.encode(pa.RecordBatch.from_pydict({"d": [1.0, 2.0**24]}))
        batch = pa.RecordBatch.from_pydict({"d": [20_000_001.0]})
        if not whole:
            assert encoder.encode(batch).records["d"].tolist() == [[20_000_000.0]]
            continue
        with pytest.raises(RowsRefused):
            encoder.encode(batch)


@pytest.mark.parametrize("dtype", ["<i8", "<f8"])
def test_decimals_that_a_double_may_have_rounded_are_refused(dtype):
    tensor = Tensor("d", (Column("d", "scalar", "<f8", whole=True),), dtype, Kind.DENSE, True, None, None, False)
    encoder = Encoder((tensor,))
    known = [float(2**53 - 1), -float(2**53 - 1)]
    assert encoder.encode(pa.RecordBatch.from_pydict({"d": known})).records["d"][:, 0].tolist() == known
    with pytest.raises(RowsRefused) as caught:
        encoder.encode(pa.RecordBatch.from_pydict({"d": [1.0, float(2**53 + 1)]}))
    (fault,) = caught.value.faults
    assert (fault.rows, fault.row) == (1, 3)


def test_refused_partition_leaves_no_file(tmp_path):
    from spark_elastic.data.store import Store

    task = WriteTask(Store.create(tmp_path), "run", (("n",),), (NUMBER,), 1 << 20, 0.5, 0)
    batches = [pa.RecordBatch.from_pydict({"n": values}) for values in ([1, 2, 3], [4, None])]
    receipt = task.write(iter(batches), 7)
    assert (receipt.partition, receipt.rows, receipt.splits) == (7, 5, {})
    assert [(fault.partition, fault.row) for fault in receipt.faults] == [(7, 4)]
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]
    assert Receipt.loads(receipt.dumps()) == receipt


@given(
    fraction=st.floats(0.01, 0.99), seed=st.integers(-(2**63), 2**64), cuts=st.lists(st.integers(0, 300), max_size=5)
)
def test_validation_rows_do_not_depend_on_the_batches(fraction, seed, cuts):
    whole = validation_rows(fraction, seed, 3, 0, 300)
    edges = [0, *sorted(cuts), 300]
    parts = [validation_rows(fraction, seed, 3, lo, hi - lo) for lo, hi in pairwise(edges)]
    assert np.concatenate(parts).tolist() == whole.tolist()
    assert abs(validation_rows(fraction, seed, 3, 0, 20_000).mean() - fraction) < 0.02
