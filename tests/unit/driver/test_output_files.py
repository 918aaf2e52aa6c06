from __future__ import annotations

from pathlib import Path

import pytest

from spark_elastic.data.store import Store
from spark_elastic.driver.output import OutputFiles, OutputPrinter


def test_each_rank_has_its_own_files_besides_the_printed_lines(tmp_path: Path, capsys) -> None:
    files = OutputFiles(tmp_path)
    printer = OutputPrinter(copy=files.take)
    printer.worker_lines("0", "stdout", ("one", "two"))
    printer.worker_lines("1", "stderr", ("three",))
    printer.worker_lines("slot 3", "stderr", ("four",))
    printer.close()
    files.close()
    found = {str(path.relative_to(tmp_path)): path.read_text() for path in tmp_path.rglob("*") if path.is_file()}
    assert found == {"rank.0/stdout": "one\ntwo\n", "rank.1/stderr": "three\n", "slot.3/stderr": "four\n"}
    assert capsys.readouterr().out == "[0]<stdout>:one\n[0]<stdout>:two\n"


def test_a_second_job_adds_to_the_first_ones_files(tmp_path: Path) -> None:
    for text in ("first", "second"):
        files = OutputFiles(tmp_path)
        files.take("0", "stdout", text)
        files.close()
    assert (tmp_path / "rank.0" / "stdout").read_text() == "first\nsecond\n"


def test_storage_without_append_gets_one_file_per_flush(tmp_path: Path) -> None:
    fsspec = pytest.importorskip("fsspec")
    store = Store.create("memory://logs")
    for text in ("first", "second"):
        files = OutputFiles(store)
        files.take("0", "stdout", text)
        files.close()
    assert [entry.path for entry in store.list("rank.0")] == ["rank.0/stdout.00001", "rank.0/stdout.00002"]
    fsspec.filesystem("memory").store.clear()


def test_failing_store_does_not_fail_the_job(tmp_path: Path, caplog) -> None:
    (tmp_path / "rank.0").write_text("in the way of the folder")
    files = OutputFiles(tmp_path)
    files.take("0", "stdout", "lost")
    files.close()
    assert "what workers print cannot be written to" in caplog.text
