from __future__ import annotations

import threading
from pathlib import Path

import pytest

from spark_elastic.data.store import Store
from spark_elastic.driver.output import MAX_WAITING_BYTES, OutputFiles, OutputPrinter
from tests.integration.processes import wait_until


def test_each_rank_has_its_own_files_besides_the_printed_lines(tmp_path: Path, capsys) -> None:
    files = OutputFiles(tmp_path)
    printer = OutputPrinter(copy=files.add)
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
        files.add("0", "stdout", text)
        files.close()
    assert (tmp_path / "rank.0" / "stdout").read_text() == "first\nsecond\n"


def test_storage_without_append_gets_one_file_per_flush(tmp_path: Path) -> None:
    fsspec = pytest.importorskip("fsspec")
    store = Store.create("memory://logs")
    for text in ("first", "second"):
        files = OutputFiles(store)
        files.add("0", "stdout", text)
        files.close()
    assert [entry.path for entry in store.list("rank.0")] == ["rank.0/stdout.00001", "rank.0/stdout.00002"]
    fsspec.filesystem("memory").store.clear()


def test_failing_store_does_not_fail_the_job(tmp_path: Path, caplog) -> None:
    (tmp_path / "rank.0").write_text("in the way of the folder")
    files = OutputFiles(tmp_path)
    files.add("0", "stdout", "lost")
    files.close()
    assert "what workers print cannot be written to" in caplog.text


def test_lines_come_whole_into_files_of_a_fast_store(tmp_path: Path) -> None:
    files = OutputFiles(tmp_path)
    line = "x" * 9_999
    for number in range(10_000):  # 100 MB, within about a second
        files.add("0", "stdout", line)
        if number % 100 == 99:
            wait_until(lambda: files._bytes < MAX_WAITING_BYTES // 2, 30, "lines are written")
    files.close()
    assert (tmp_path / "rank.0" / "stdout").stat().st_size == 100_000_000


def test_file_says_how_much_was_dropped_and_of_whom(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    going = threading.Event()
    write = OutputFiles._write
    monkeypatch.setattr(OutputFiles, "_write", lambda *args: going.wait(30) and write(*args))
    files = OutputFiles(tmp_path)
    line = "x" * 2**20
    for _ in range(200):
        files.add("0", "stdout", line)
    files.add("1", "stderr", "short")
    going.set()
    files.close()
    said = (tmp_path / "rank.0" / "stdout").read_text()
    dropped = 200 - said.count(line)
    assert dropped > 0
    assert f"{dropped} lines ({dropped * 2**20 / 1e6:.1f} MB) were dropped: they came faster than {tmp_path}" in said
    assert "dropped" not in (tmp_path / "rank.1" / "stderr").read_text()
