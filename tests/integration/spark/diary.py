"""Reads the diaries of `training.train`, waits for what is written there, and checks what must hold of any training."""

from __future__ import annotations

import itertools
import json
import re
import threading
from collections import Counter
from pathlib import Path
from typing import Any

from spark_elastic.membership.timeline import WorldStarted
from tests.integration.processes import wait_until
from tests.integration.spark.training import ROWS

WAIT_S = 120.0
Entry = dict[str, Any]


def is_alive(pid: int) -> bool:
    """Whether the process is there and no zombie; a stopped one is alive."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


class Diary:
    """Reads what the workers of one job write. Several threads may use one Diary."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.entries: list[Entry] = []
        self._newest: dict[int, Entry] = {}
        self._offsets: dict[Path, int] = {}
        self._reading = threading.Lock()

    def read(self) -> list[Entry]:
        """All entries so far, those of one worker in their order."""
        with self._reading:
            for path in self.folder.glob("*.diary"):
                with path.open("rb") as file:
                    file.seek(self._offsets.get(path, 0))
                    data = file.read()
                whole = data[: data.rfind(b"\n") + 1]
                self._offsets[path] = self._offsets.get(path, 0) + len(whole)
                news = [json.loads(line) for line in whole.splitlines()]
                self.entries += news
                self._newest.update((entry["pid"], entry) for entry in news if entry["what"] == "applied")
            return list(self.entries)

    def newest(self) -> dict[int, Entry]:
        """The last step of each living worker in the newest round that one of them has reached, by rank."""
        self.read()
        with self._reading:
            newest = dict(self._newest)
        steps = [entry for pid, entry in newest.items() if is_alive(pid)]
        round = max((entry["round"] for entry in steps), default=0)
        return {entry["rank"]: entry for entry in steps if entry["round"] == round}

    # --- what a test does to the training -------------------------------------------------------

    def finish(self) -> None:
        """Have the training end with the epoch."""
        (self.folder / "finish").touch()

    def hold(self, point: str, who: int | str = "any") -> None:
        """Have the first worker (with this rank) that comes to the point wait there."""
        (self.folder / f"hold-{point}-{who}").touch()

    def held(self, point: str, who: int | str = "any") -> int:
        """Wait until somebody is held there. Returns: its pid."""
        pattern = re.compile(rf"held-{point}-{who}-(\d+)$")

        def found() -> list[int]:
            return [int(match[1]) for path in self.folder.iterdir() if (match := pattern.match(path.name))]

        wait_until(found, WAIT_S, f"a worker is held at {point}")
        return found()[0]

    def release(self, point: str, who: int | str = "any") -> None:
        """Let go of those who wait there, and hold nobody any more."""
        for pattern in (f"hold-{point}-{who}", f"held-{point}-{who}-*"):  # in this order: a hold may become a held
            for path in self.folder.glob(pattern):
                path.unlink(missing_ok=True)

    # --- what a test waits for ------------------------------------------------------------------

    def wait_for_world(self, size: int, after: int = 0) -> dict[int, Entry]:
        """Wait until `size` living workers have all applied a step in one round newer than `after`.

        Returns: the newest step of each, by rank.
        """
        world: dict[int, Entry] = {}

        def together() -> bool:
            world.clear()
            world.update(self.newest())
            return len(world) == size and all(e["size"] == size and e["round"] > after for e in world.values())

        try:
            wait_until(together, WAIT_S, f"{size} workers train in a round after {after}")
        except AssertionError as error:
            raise AssertionError(f"{error}; the newest steps are {world}") from None
        return dict(world)

    def wait_for(self, what: str, count: int = 1) -> list[Entry]:
        """Wait for so many entries of a kind. Returns: them."""
        wait_until(lambda: self._of(what, count), WAIT_S, f"{count} entries {what!r}")
        return self._of(what, count)

    def _of(self, what: str, count: int) -> list[Entry]:
        found = [entry for entry in self.read() if entry["what"] == what]
        return found if len(found) >= count else []

    # --- what must hold -------------------------------------------------------------------------

    def check(self, job: Any, results: list[Entry] | None = None) -> None:
        """No step lost or done twice by a worker, equal parameters after each step, each row once an epoch.

        results: what the job returned; None: it did not finish.
        """
        self.read()
        applied = [entry for entry in self.entries if entry["what"] == "applied"]
        tries = [entry for entry in self.entries if entry["what"] == "tries"]
        counts = _check_steps(applied)
        after = _check_digests(applied, counts)
        _check_starts(tries, counts, after)
        _check_worlds(job, tries)
        _check_rows(tries, counts, whole=results is not None)
        if results is not None:
            assert [result["rank"] for result in results] == list(range(len(results)))
            assert {result["step"] for result in results} == {max(counts)}, results
            assert {result["digest"] for result in results} == {after[max(counts)]}, results

    def check_steps(self) -> None:
        """Assert that no worker lost a step or applied one twice, and that all parameters are equal after each step."""
        applied = [entry for entry in self.read() if entry["what"] == "applied"]
        _check_digests(applied, _check_steps(applied))


def _check_steps(applied: list[Entry]) -> dict[int, int]:
    """Returns: step → the round in which it was applied for good.

    A step may be applied a second time, in a later round, if all who had applied it before are dead by then.
    """
    by_worker: dict[int, list[Entry]] = {}
    for entry in applied:
        by_worker.setdefault(entry["pid"], []).append(entry)
    for pid, entries in by_worker.items():
        for one, next in itertools.pairwise(entries):
            assert next["step"] > one["step"], f"{pid} did a step again: {one}, then {next}"
            assert next["step"] == one["step"] + 1 or next["round"] > one["round"], f"{pid} jumped: {one}, {next}"
    counts: dict[int, int] = {}
    for entry in applied:
        counts[entry["step"]] = max(entry["round"], counts.get(entry["step"], 0))
    steps = sorted(counts)
    assert steps == list(range(1, len(steps) + 1)), f"steps are missing: {steps}"
    rounds = [counts[step] for step in steps]
    assert rounds == sorted(rounds), f"a later step belongs to an earlier round: {counts}"
    return counts


def _check_digests(applied: list[Entry], counts: dict[int, int]) -> dict[int, str]:
    """Returns: step → digest of parameters and momentum after it."""
    after: dict[int, str] = {}
    for entry in applied:
        if entry["round"] == counts[entry["step"]]:
            known = after.setdefault(entry["step"], entry["after"])
            assert known == entry["after"], f"parameters differ after step {entry['step']}: {entry}"
    return after


def _check_starts(tries: list[Entry], counts: dict[int, int], after: dict[int, str]) -> None:
    """Every step starts from the parameters that the step before has left, also on a worker that has just come."""
    for entry in tries:
        before = entry["step"] - 1
        if counts.get(entry["step"]) == entry["round"] and before in after:
            assert entry["before"] == after[before], f"did not start from step {before}: {entry}"


def _check_worlds(job: Any, tries: list[Entry]) -> None:
    """The workers are where the driver says they are: size and first step of each round, and one worker a rank."""
    worlds = {record.round: record for record in job.timeline() if isinstance(record, WorldStarted)}
    first: dict[tuple[int, int], Entry] = {}
    for entry in tries:
        key = (entry["round"], entry["rank"])
        one = first.setdefault(key, entry)
        assert one["pid"] == entry["pid"], f"two workers had one rank in one round: {one}, {entry}"
    for (round, _), entry in first.items():
        world = worlds[round]
        assert entry["size"] == world.size, (entry, world)
        assert entry["step"] == (world.progress or 0) + 1, (entry, world)


def _check_rows(tries: list[Entry], counts: dict[int, int], *, whole: bool) -> None:
    """Each row exactly once an epoch. The last step of an epoch may repeat a few where a share was one row short."""
    epochs: dict[int, list[Entry]] = {}
    for entry in tries:
        if counts.get(entry["step"]) == entry["round"]:
            epochs.setdefault(entry["epoch"], []).append(entry)
    for epoch, entries in epochs.items():
        last = max(entry["step"] for entry in entries)
        before = Counter(row for entry in entries if entry["step"] < last for row in entry["rows"])
        assert all(times == 1 for times in before.values()), f"epoch {epoch}: rows more than once: {before}"
        in_last = [row for entry in entries if entry["step"] == last for row in entry["rows"]]
        if whole or epoch < max(epochs):
            missing = set(range(ROWS)) - set(before) - set(in_last)
            assert not missing, f"epoch {epoch}: rows {sorted(missing)} were left out"
            size = next(entry["size"] for entry in entries if entry["step"] == last)
            again = len(before) + len(in_last) - ROWS
            assert again < size, f"epoch {epoch}: {again} rows were used again in its last step"
