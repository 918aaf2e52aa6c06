"""Folders of trainings that are there for as long as their fit, and what is left of them if the driver was killed."""

from __future__ import annotations

import contextlib
import logging
import re
import uuid
from collections.abc import Iterator

from spark_elastic import clock
from spark_elastic.data.cache import ORPHAN_AGE_S, is_leased, leased
from spark_elastic.data.store import Store

log = logging.getLogger("spark_elastic.ml")

_OURS = re.compile(r"(run\.json|history\.json|model\.\w+|checkpoints/.*|leases/.*|.*\.partial)$")
_ID = re.compile(r"[0-9a-f]{32}$")


@contextlib.contextmanager
def leased_if_possible(folder: Store) -> Iterator[None]:
    """While the block runs nobody's clean-up takes the folder. Where nothing can be written it goes without."""
    lease = contextlib.ExitStack()
    try:
        lease.enter_context(leased(folder))
    except Exception as error:  # each filesystem has errors of its own
        log.info("no lease on %s, which others may remove: %s", folder.url, error)
    try:
        yield
    finally:
        try:
            lease.close()
        except Exception as error:  # it runs out by itself, and is no reason to lose what was trained
            log.info("the lease on %s could not be given back: %s", folder.url, error)


@contextlib.contextmanager
def passing_run(runs: Store) -> Iterator[Store]:
    """A folder below `runs` for as long as the block runs."""
    with contextlib.suppress(Exception):  # somebody else's left-overs are no reason not to train
        collect_runs(runs, clock.wall())
    run = runs.sub(uuid.uuid4().hex)
    try:
        with leased_if_possible(run):
            yield run
    finally:
        with contextlib.suppress(Exception):  # a store that is gone is not what the caller has to hear of
            run.delete()


def collect_runs(runs: Store, now: float, age_s: float = ORPHAN_AGE_S) -> list[str]:
    """Remove folders of `passing_run` whose process was killed: nobody renews their lease, and all in them is old.

    Returns: their names.
    """
    removed = []
    for entry in runs.list():
        if not entry.is_dir or not _ID.match(entry.path):
            continue
        run = runs.sub(entry.path)
        files = [file for file in run.list(recursive=True) if not file.is_dir]
        newest = max((file.modified_s for file in files), default=entry.modified_s)
        if newest < now - age_s and all(_OURS.match(file.path) for file in files) and not is_leased(run, now):
            run.delete()
            removed.append(entry.path)
    return removed
