"""Users' loops end as if nothing had failed, and bugs planted in the states are caught."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import spark_elastic
from tests.nightly import by_night
from tests.simulation.planted_bugs import Bug

PACKAGE = Path(spark_elastic.__file__).parent
ROOT = Path(__file__).parents[2]
LOOPS = "user_loops", "wide_loops"
BY_DAY = {"plain values stay as they are when tensors return to the commit", "states of metrics stay"}
"""One bug for each kind of loops."""

BUGS = {
    Bug(
        "values stay as they are where only the interrupted step is repeated",
        "elastic/state",
        "            self._handlers.assign_light_values((light, plain))\n",
        "            pass\n",
    ): ("user_loops", 1),
    Bug(
        "plain values stay as they are when tensors return to the commit",
        "elastic/handlers",
        "self.plain.restore()",
        "",
    ): ("user_loops", 1),
    Bug(
        "a commit copies nothing, and what is restored is what there is",
        "elastic/handlers",
        "        copy_all(self._copies, tensors)\n",
        "        self._copies = list(tensors)\n",
    ): ("user_loops", 1),
    Bug("parameters that were written to count as unchanged", "torch/elastic/state", "then[1] != now[1]", "False"): (
        "user_loops",
        12,
    ),
    Bug(
        "running means of the interrupted step stay",
        "torch/elastic/state",
        "            self._buffers[name].restore()\n",
        "            pass\n",
    ): ("wide_loops", 22),
    Bug(
        "an optimizer's tensors outside of its state stay",
        "torch/elastic/handlers",
        "            own.update({name: put(own.get(name), value, device) for name, value in held.items()})\n",
        "            pass\n",
    ): ("wide_loops", 10),
    Bug(
        "states of metrics stay",
        "torch/elastic/handlers",
        'own[name] = put(None, state, getattr(named[path], "device", torch.device("cpu")))',
        "pass",
    ): ("wide_loops", 1),
    Bug(
        "plain values go back to the first mark",
        "elastic/state",
        "None if committed else self._handlers.light_values()",
        "None if committed else self._mark or self._handlers.light_values()",
    ): ("user_loops", 4),
    Bug(
        "a mark between the passes of a step counts", "torch/elastic/state", "if each._reducer.is_in_step", "if False"
    ): ("user_loops", 20),
}
"""The loops and the first seed that catch each bug: others take minutes to find one."""


def first_difference(package_in: Path, env: dict[str, str], loops: str, first: int, last: int) -> str:
    """Return the first difference that `user_loops` or `wide_loops` finds with the package in this folder."""
    env = {**os.environ, **env, "PYTHONPATH": f"{package_in}{os.pathsep}{ROOT}"}
    command = [sys.executable, "-W", "ignore", "-m", f"tests.simulation.{loops}", str(first), str(last)]
    done = subprocess.run(command, cwd=package_in, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.parametrize(("first", "last"), by_night([(1, 4), (5, 8), (9, 25)], but=[(1, 4)]))
@pytest.mark.parametrize("loops", LOOPS)
def test_loops_whose_collectives_fail_end_as_if_nothing_had_failed(loops, first, last):
    assert first_difference(ROOT, {}, loops, first, last) == ""


@pytest.mark.parametrize(
    "bug", [pytest.param(bug, id=bug.what, marks=[] if bug.what in BY_DAY else pytest.mark.nightly) for bug in BUGS]
)
def test_a_planted_bug_is_caught(tmp_path, bug):
    shutil.copytree(PACKAGE, tmp_path / "spark_elastic", ignore=shutil.ignore_patterns("__pycache__"))
    module = tmp_path / "spark_elastic" / f"{bug.module}.py"
    source = module.read_text()
    assert source.count(bug.right) == 1, f"{bug.right!r} is {source.count(bug.right)} times in {bug.module}"
    module.write_text(source.replace(bug.right, bug.wrong))
    loops, seed = BUGS[bug]
    assert "seed" in first_difference(tmp_path, {"PYTHONDONTWRITEBYTECODE": "1"}, loops, seed, seed)
