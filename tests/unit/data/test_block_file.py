"""Blocks of a remote file on the local disk: fetched once for all processes, dropped only if no process reads them."""

from __future__ import annotations

import errno
import os
import threading
import zlib

import numpy as np
import pytest

from spark_elastic.data import block_file
from spark_elastic.data.block_file import BLOCK, BlockFile
from spark_elastic.errors import StoreError

CONTENT = np.random.default_rng(0).bytes(5 * BLOCK + 100)


class Origin:
    def __init__(self):
        self.requests = []

    def __call__(self, offset, nbytes):
        self.requests.append((offset, nbytes))
        return CONTENT[offset : offset + nbytes]


def bytes_of(file, start, stop):
    with file.path.open("rb") as stream:
        stream.seek(start)
        return stream.read(stop - start)


def test_only_absent_blocks_are_fetched_and_neighbours_in_one_request(tmp_path):
    origin = Origin()
    file = BlockFile(tmp_path / "a.data", len(CONTENT), origin)
    assert file.hold(BLOCK + 5, BLOCK + 9) == BLOCK
    assert file.hold(0, len(CONTENT)) == len(CONTENT) - BLOCK
    assert origin.requests == [(BLOCK, BLOCK), (0, BLOCK), (2 * BLOCK, 3 * BLOCK + 100)]
    assert bytes_of(file, 0, len(CONTENT)) == CONTENT
    assert file.complete() == zlib.crc32(CONTENT)
    file.close()


def test_block_is_dropped_only_after_the_last_reader_of_any_process_released_it(tmp_path):
    ours = BlockFile(tmp_path / "a.data", len(CONTENT), Origin())
    theirs = BlockFile(tmp_path / "a.data", len(CONTENT), Origin())  # locks belong to the open file: like a process
    ours.hold(0, 10)
    ours.hold(5, 20)
    assert theirs.hold(0, 10) == 0  # already fetched by the other one
    ours.release(0, 10)
    assert ours.drop(0) == theirs.drop(0) == 0
    ours.release(5, 20)
    assert theirs.drop(0) == 0  # it still holds the block itself
    theirs.release(0, 10)
    assert ours.drop(0) == BLOCK
    assert ours.drop(0) == 0
    assert ours.hold(0, 10) == BLOCK
    ours.close()
    theirs.close()


def test_mapped_file_never_becomes_shorter(tmp_path):
    theirs = BlockFile(tmp_path / "a.data", len(CONTENT), Origin())
    theirs.hold(0, len(CONTENT))
    BlockFile(tmp_path / "a.data", 100, Origin()).close()
    assert bytes_of(theirs, 0, len(CONTENT)) == CONTENT
    assert theirs.complete() == zlib.crc32(CONTENT)
    theirs.close()


def test_close_releases_all_blocks(tmp_path):
    dead = BlockFile(tmp_path / "a.data", len(CONTENT), Origin())
    dead.hold(0, len(CONTENT))
    dead.close()
    alive = BlockFile(tmp_path / "a.data", len(CONTENT))
    assert alive.drop(2) == BLOCK
    alive.close()


def test_failed_fetch_leaves_the_block_absent_and_unlocked(tmp_path):
    answers = [OSError("gone"), CONTENT[: BLOCK - 1], CONTENT[:BLOCK]]

    def origin(offset, nbytes):
        answer = answers.pop(0)
        if isinstance(answer, OSError):
            raise answer
        return answer

    file = BlockFile(tmp_path / "a.data", len(CONTENT), origin)
    with pytest.raises(OSError, match="gone"):
        file.hold(0, 10)
    with pytest.raises(StoreError, match="65535 of 65536 bytes"):
        file.hold(0, 10)
    assert file.hold(0, 10) == BLOCK
    file.close()


def test_failed_hold_releases_its_blocks(tmp_path):
    content = bytes(70 * BLOCK)

    def origin(offset, nbytes):
        if offset:
            raise StoreError("gone")
        return content[:nbytes]

    file = BlockFile(tmp_path / "a.data", len(content), origin)
    with pytest.raises(StoreError, match="gone"):
        file.hold(0, len(content))
    assert file.drop(0) == BLOCK
    file.close()


def test_full_disk_is_reported_as_store_error(tmp_path, monkeypatch):
    file = BlockFile(tmp_path / "a.data", len(CONTENT), Origin())
    room = [BLOCK // 2]

    def pwrite(file, data, offset):  # like a full disk: the first call writes a part, the next one fails
        if not room:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return room.pop()

    monkeypatch.setattr(os, "pwrite", pwrite)
    with pytest.raises(StoreError, match=r"No space left on device.*cache_bytes"):
        file.hold(0, 10)
    assert file.drop(0) == 0
    file.close()


class Overtaken(BlockFile):
    """Between the search for absent blocks and the fetch, another reader fetches block 1 and keeps it."""

    overtaken = False

    def _fetch_run(self, *args):
        if not self.overtaken:
            self.overtaken = True
            self.hold(BLOCK, 2 * BLOCK)
        return super()._fetch_run(*args)


def test_blocks_that_others_fetched_and_hold_are_not_waited_for(tmp_path, monkeypatch):
    monkeypatch.setattr(block_file, "_LOCK_TIMEOUT_S", 2.0)  # a failure would otherwise take minutes
    file = Overtaken(tmp_path / "a.data", len(CONTENT), Origin())
    assert file.hold(0, 3 * BLOCK) == 2 * BLOCK
    file.close()


def test_concurrent_threads_and_processes_read_correct_bytes_while_blocks_are_dropped(tmp_path):
    files = [BlockFile(tmp_path / "a.data", len(CONTENT), Origin()) for _ in range(3)]
    wrong = []

    def read(file, seed):
        random = np.random.default_rng(seed)
        for _ in range(150):
            start = int(random.integers(0, len(CONTENT) - 1))
            stop = min(len(CONTENT), start + int(random.integers(1, 2 * BLOCK)))
            file.hold(start, stop)
            if bytes_of(file, start, stop) != CONTENT[start:stop]:
                wrong.append((start, stop))
            file.release(start, stop)
            file.drop(int(random.integers(0, 6)))

    threads = [threading.Thread(target=read, args=(file, number)) for number, file in enumerate(files * 2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=120)
    assert not any(thread.is_alive() for thread in threads)
    assert wrong == []
    for file in files:
        file.close()
