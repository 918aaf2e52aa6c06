"""Deliberate one-line breakages of the virtual workers; a loop that has one must come to another end.

A bug is one replacement in the source of one module, which is executed again, with those above it.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from spark_elastic.errors import SparkElasticError
from tests.unit.exact import loops

_SUMS = "spark_elastic.exact.sums"
_BUFFERS = "spark_elastic.exact.buffers"
_WORKERS = "spark_elastic.exact.shards"
_RANDOM = "spark_elastic.exact.random_state"
_MODULES = (_SUMS, _BUFFERS, _RANDOM, _WORKERS)


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
        "self.seed_shard(key, index)",
        "self.seed_shard(key, index - self.reduction.shards().start)",
    ),
    Bug(
        "numpy's random numbers go on from shard to shard",
        _RANDOM,
        "            kind.seed(generator, own)\n",
        "            generator is np.random.mtrand._rand or kind.seed(generator, own)\n",
    ),
    Bug(
        "generators of the model go on from shard to shard",
        _RANDOM,
        "            kind.seed(generator, own)\n",
        "            generator in [each for each, _ in self._generators[3:]] or kind.seed(generator, own)\n",
    ),
    Bug(
        "random numbers after the step are those of the last shard",
        _WORKERS,
        "        self._random.seed(derived_key(self.seed, *key, self.count), save=True)\n",
        "",
    ),
    Bug(
        "partial sums are added up as they arrive",
        _SUMS,
        "as_bytes(total.contiguous())",
        "as_bytes(functools.reduce(torch.add, reversed(received)))",
    ),
    Bug(
        "partial sums are taken for those of other shards",
        _SUMS,
        "for node in each), received, strict=True))",
        "for node in each), received.roll(1, 0), strict=True))",
    ),
    Bug(
        "buffers are left out",
        _WORKERS,
        "                self._buffers.combine(matrix[:, 1 + numbers.shape[1] :], present)\n",
        "                pass\n",
    ),
    Bug(
        "a shard starts from the buffers of the shard before",
        _WORKERS,
        "                if has_buffers:\n                    self._buffers.begin_shard()\n",
        "",
    ),
    Bug("each worker counts its own shards alone", _BUFFERS, "        self._gather(matrix)\n", ""),
    Bug(
        "an evaluation leaves its traces in the buffers",
        _WORKERS,
        "            elif has_buffers:\n                self._buffers.put_back()\n",
        "",
    ),
    Bug(
        "sums of other workers' shards are left out",
        _WORKERS,
        "        numbers.copy_(matrix[:, 1 : 1 + numbers.shape[1]])\n".replace(
            "        numbers", "            numbers"
        ),
        "",
    ),
    Bug("gradients that the optimizer does not have stay", _WORKERS, "        self._drop_gradients(keep=params)\n", ""),
)


def train_with(bug: Bug | None, virtual: int) -> tuple[str, dict[str, Any]]:
    """Train in a worker whose modules have the bug."""
    if bug is not None:
        _break(bug)
    try:
        return loops.train(virtual)
    except SparkElasticError as error:
        return str(error), {}


def _break(bug: Bug) -> None:
    for name in _MODULES[_MODULES.index(bug.module) :]:
        module = importlib.import_module(name)
        source = Path(str(module.__file__)).read_text()
        if name == bug.module:
            assert source.count(bug.right) == 1, f"{bug.what}: found {source.count(bug.right)} times"
            source = source.replace(bug.right, bug.wrong)
        exec(compile(source, str(module.__file__), "exec"), module.__dict__)
    import spark_elastic.torch as hvd

    hvd.elastic.virtual_workers = importlib.import_module(_WORKERS).virtual_workers  # type: ignore[attr-defined]
