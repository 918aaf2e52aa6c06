"""Deliberate one-line breakages of Keras' virtual workers; a loop that has one must come to another end.

A bug is one replacement in the source of one module, which is executed again, with those above it.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.unit.keras import exact_loops
from tests.unit.world_link import tell

_SUMS = "spark_elastic.collective.shard_sums"
_RANDOM = "spark_elastic.keras.elastic.random_state"
_VARIABLES = "spark_elastic.keras.elastic.shard_variables"
_WORKERS = "spark_elastic.keras.elastic.virtual_shards"
_MODULES = (_SUMS, _RANDOM, _VARIABLES, _WORKERS)


@dataclass(frozen=True)
class Bug:
    what: str
    module: str
    right: str
    wrong: str


BUGS = (
    Bug(
        "a shard has the random numbers of its place on the worker",
        _WORKERS,
        "                self._seed(key, index)\n",
        "                self._seed(key, index - self._reduction.shards().start)\n",
    ),
    Bug(
        "generators of the model and of the loop go on from shard to shard",
        _WORKERS,
        "        self._own.seed(seed)\n",
        "",
    ),
    Bug(
        "numpy's random numbers go on from shard to shard",
        _RANDOM,
        "        np.random.seed((seed & 0xFFFFFFFF, seed >> 32))\n",
        "",
    ),
    Bug("Python's random numbers go on from shard to shard", _RANDOM, "        random.seed(seed)\n", ""),
    Bug("TensorFlow's go on from shard to shard", _RANDOM, "        self._set_tensorflow(two_seeds(seed)[0])\n", ""),
    Bug(
        "the layers' random numbers are those of the worker",
        _WORKERS,
        "two_seeds(derived_key(seed, number)) for",
        "two_seeds(derived_key(self._reduction.shards().start, number)) for",
    ),
    Bug(
        "the global generators' numbers are those of the worker",
        _WORKERS,
        "values += random_states.values(derived_key(seed, own))",
        "values += random_states.values(derived_key(self._reduction.shards().start, own))",
    ),
    Bug(
        "random numbers after the step are those of the last shard",
        _WORKERS,
        "        seeds = self._seed(key, self.count, keep=True)\n",
        "        seeds = 0, 0\n",
    ),
    Bug(
        "partial sums are added up as they arrive",
        _SUMS,
        "as_bytes(value((0, root)).contiguous())",
        "as_bytes(functools.reduce(torch.add, reversed(received)))",
    ),
    Bug(
        "partial sums are taken for those of other shards",
        _SUMS,
        "for node in each), received, strict=True))",
        "for node in each), received.roll(1, 0), strict=True))",
    ),
    Bug(
        "moving statistics and metrics are left out",
        _WORKERS,
        "            self._variables.combine(matrix[:, 1 + summed :], matrix[:, 0], training)\n",
        "",
    ),
    Bug(
        "metrics are left out",
        _VARIABLES,
        "tree_sum(sums.contiguous())",
        "tree_sum(sums.contiguous()) * 0.0",
    ),
    Bug(
        "moving statistics are those of the worker's last shard",
        _VARIABLES,
        "tree_sum((averages * weights).contiguous())",
        "averages[len(averages) // 2]",
    ),
    Bug(
        "a shard starts from the variables of the shard before",
        _WORKERS,
        "(self._variables.set_seeds if keep else self._variables.begin_shard)(values)",
        "self._variables.set_seeds(values)",
    ),
    Bug("each worker counts its own shards alone", _VARIABLES, "        self._gather(matrix)\n", ""),
    Bug(
        "an evaluation leaves its traces in the counters",
        _VARIABLES,
        "if training and others and bool(flags.any())",
        "if others and bool(flags.any())",
    ),
    Bug(
        "sums of other workers' shards are left out",
        _WORKERS,
        "            numbers.copy_(matrix[:, 1 : 1 + summed])\n",
        "",
    ),
)


def train_with_each(virtual: int, bugs: Sequence[Bug]) -> list[tuple[str, str]]:
    """Train with each bug, one after the other, and at the end without one; return what and the hash."""
    found = []
    for bug in (*bugs, None):
        found.append((bug.what if bug else "", _train_with(bug, virtual)))
        tell("trained with", found[-1])
    return found


def _train_with(bug: Bug | None, virtual: int) -> str:
    _execute_with(bug)
    try:
        return exact_loops.train(virtual, epochs=1)[0]
    finally:
        _execute_with(None)


def _execute_with(bug: Bug | None) -> None:
    for name in _MODULES:
        module = importlib.import_module(name)
        source = Path(str(module.__file__)).read_text()
        if bug is not None and name == bug.module:
            assert source.count(bug.right) == 1, f"{bug.what}: found {source.count(bug.right)} times"
            source = source.replace(bug.right, bug.wrong)
        exec(compile(source, str(module.__file__), "exec"), module.__dict__)
