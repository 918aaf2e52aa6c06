"""Virtual workers: a training whose result has the same bits for any number of real workers."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from spark_elastic.data.order.permutation import derived_key
from spark_elastic.errors import UsageError
from spark_elastic.exact import random_state
from spark_elastic.exact.buffers import ShardBuffers
from spark_elastic.exact.environment import EnvironmentCheck, environment
from spark_elastic.exact.random_state import RandomStates
from spark_elastic.exact.sums import ALIGNMENT_BYTES, PartialSums, ShardReduction, rows_of, tree_sum

_all: weakref.WeakSet[VirtualWorkers] = weakref.WeakSet()
"""The virtual workers of this process: a loop may have several, such as one for each of two models."""


class VirtualShard:
    """The part of a batch that one virtual worker computes.

    Attributes:
        index: The number of the virtual worker.
        start: The position of its first row in the batch.
        stop: The position behind its last row.
        numbers: The shard's summands, a row of a float64 matrix.
    """

    def __init__(self, index: int, start: int, stop: int, names: Mapping[str, int], numbers: Any) -> None:
        self.index, self.start, self.stop = index, start, stop
        self.numbers = numbers
        self._names = names

    @property
    def rows(self) -> slice:
        """The slice of the batch that has this shard's rows."""
        return slice(self.start, self.stop)

    def __len__(self) -> int:
        return self.stop - self.start

    def add(self, name: str, value: Any) -> None:
        """Add a number, or a tensor with one, to the sum of that name over all shards of the virtual workers."""
        if name not in self._names:
            raise UsageError(
                f"{name!r} is not one of the sums of these virtual workers ({', '.join(self._names) or 'none'}); name "
                "it in virtual_workers(..., sums=[...]), which is the same on all workers"
            )
        self.numbers[self._names[name]] += float(value.detach() if hasattr(value, "detach") else value)


class VirtualWorkers:
    """Computes each batch in a fixed number of shards, of which each worker of the present world computes some.

    A loop with virtual workers gives the same bits for any number of workers, kills and arrivals::

        workers = hvd.elastic.virtual_workers(8, model, optimizer, seed=1, sums=["loss"])

        for shard in workers.shards(len(batch), step=state.step):
            rows = batch[shard.rows]
            loss = cross_entropy(model(features[rows]), labels[rows], reduction="sum") / len(batch)
            loss.backward()
            shard.add("loss", loss)
        optimizer.step()

    Put it into the `TorchState` and into your own checkpoints (`state_dict`): it warns when a training continues where
    its bits may differ.

    Args:
        count: The number of shards that each batch is cut into, the same for the whole training. Real workers beyond it
            have nothing to compute.
        model: The model, on the CPU. Batch normalisation takes the statistics of each shard by itself.
        optimizer: A plain torch optimizer, not a `DistributedOptimizer`.
        seed: The seed of the shards' random numbers. All generators are seeded at once.
        threads: The number of torch's threads in this process from now on. Bits may depend on it.
        sums: The names of numbers that shards `add`.
        generators: The random generators that shards draw from besides the global ones of torch, numpy and `random`,
            such as one in an attribute of the model: each a `torch.Generator`, `numpy.random.Generator`,
            `numpy.random.RandomState` or `random.Random`.

    Raises:
        UsageError: The model or the optimizer cannot be used so.
    """

    def __init__(
        self,
        count: int,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        seed: int = 0,
        threads: int = 1,
        sums: Iterable[str] = (),
        generators: Iterable[Any] = (),
    ) -> None:
        if count < 1 or threads < 1:
            raise UsageError(f"virtual workers and threads must be at least 1, not {count} and {threads}")
        _check(model, optimizer)
        self.count, self.seed, self.threads = count, seed, threads
        self.sums: dict[str, float] = {}
        """The sums of the numbers that the shards of the last batch have added, by name, the same on all workers."""
        self._names = {name: place for place, name in enumerate(sums)}
        self._model, self._optimizer = model, optimizer
        self.environment_check = EnvironmentCheck(environment(threads))
        self._random = RandomStates(generators)
        about = f"seed {seed}, {threads} threads, sums {list(self._names)}, {len(self._random)} generators"
        self.reduction = ShardReduction(count, about, self.environment_check.compare_members)
        self._buffers = ShardBuffers(model, self.reduction.gather)
        self._reduced = False
        """The gradients are those of a whole batch that no step has used yet."""
        self._hooks = _guard(optimizer, self)
        _all.add(self)
        align(model)
        self._use_threads()
        self._random.seed(derived_key(seed, count), save=True)  # for what is drawn before the first batch

    # --- one batch ------------------------------------------------------------------------------------

    def shards(self, rows: int, step: int) -> Generator[VirtualShard]:
        """Return this worker's shards of a batch, one after another; go through all of them.

        Call `backward` for each with its share of the batch's loss: the sum over its rows / `rows`. At the end of the
        iteration, which waits for the other workers, `param.grad` is the gradient of the whole batch and `sums` has the
        sums. With `torch.no_grad()`, only the sums are computed, and buffers keep their values.

        While a shard is computed, random numbers of torch, numpy, `random` and the named generators are those of (seed,
        step, shard); after the last one, those of (seed, step). If the step fails, they are as before it.

        Args:
            rows: The rows of the batch; shards are empty, and left out, if there are fewer than virtual workers.
            step: The number of the step, which must be the same on all workers, and again if the step is made again.

        Raises:
            HorovodInternalError: A peer is gone. Nothing was changed.
            UsageError: A gradient is sparse, or shards have changed a buffer in ways that cannot be combined.
        """
        bounds = [rows_of(shard, self.count, rows) for shard in self.reduction.shards()]
        numbers = torch.zeros((self.count, len(self._names)), dtype=torch.float64)
        yield from self.compute(bounds, (step,), numbers)
        totals = tree_sum(numbers).tolist()
        self.sums = {name: totals[place] for name, place in self._names.items()}

    def compute(
        self, bounds: Sequence[tuple[int, int]], key: tuple[int, ...], numbers: torch.Tensor, votes: Sequence[int] = ()
    ) -> Generator[VirtualShard, None, list[float]]:
        """Return this worker's shards as `shards` does, with any bounds, at the place `key` of the training.

        `numbers` is a matrix of float64 with a row for each shard: the caller fills those of this worker's shards, and
        finds all of them filled afterwards. Returns the sums of all workers' `votes`, whole numbers, as of workers that
        want to stop.
        """
        self._reduced = False
        self._use_threads()
        trains = torch.is_grad_enabled()
        check_others = _watch_others(self) if trains else lambda: None
        params = self._params() if trains else []
        given = torch.zeros(len(params), dtype=torch.float64)
        has_buffers = (width := self._buffers.begin_step()) > 0
        width = width if trains else 0
        matrix = torch.zeros((self.count, 1 + numbers.shape[1] + width), dtype=torch.float64)
        sums = self.reduction.partial_sums()
        self._drop_gradients()
        try:
            for index, (start, stop) in zip(self.reduction.shards(), bounds, strict=True):
                if start == stop:
                    sums.add(None)
                    continue
                if has_buffers:
                    self._buffers.begin_shard()
                self.seed_shard(key, index)
                yield VirtualShard(index, start, stop, self._names, numbers[index])
                sums.add(self._taken(params, given) if trains else [])
                matrix[index, 0] = 1.0
                matrix[index, 1 : 1 + numbers.shape[1]] = numbers[index]
                if width:
                    matrix[index, 1 + numbers.shape[1] :] = self._buffers.end_shard(index)
            check_others()
            summed = self._exchange(params, sums, given, matrix, votes)
            numbers.copy_(matrix[:, 1 : 1 + numbers.shape[1]])
            if width:
                present = [index for index in range(self.count) if matrix[index, 0]]
                self._buffers.combine(matrix[:, 1 + numbers.shape[1] :], present)
            elif has_buffers:
                self._buffers.put_back()
        except BaseException:
            self._drop_gradients()
            if has_buffers:
                self._buffers.put_back()
            random_state.put_back()
            raise
        self._drop_gradients(keep=params)
        self._reduced = trains
        self._random.seed(derived_key(self.seed, *key, self.count), save=True)
        return summed

    def seed_shard(self, key: tuple[int, ...], index: int) -> None:
        """Seed all generators for one shard of the step with this key."""
        self._random.seed(derived_key(self.seed, *key, index))

    @contextmanager
    def buffers_kept(self) -> Iterator[Callable[[], None]]:
        """Return a context that puts the model's buffers back at its end, and a function that does so at once."""
        self._buffers.begin_step()
        try:
            yield self._buffers.put_back
        finally:
            self._buffers.put_back()

    def close(self) -> None:
        """Detach from the optimizer."""
        _all.discard(self)
        for hook in self._hooks:
            hook.remove()

    def _use_threads(self) -> None:
        if torch.get_num_threads() != self.threads:
            torch.set_num_threads(self.threads)

    def _params(self) -> list[torch.Tensor]:
        return [param for group in self._optimizer.param_groups for param in group["params"] if param.requires_grad]

    def _drop_gradients(self, keep: Sequence[torch.Tensor] = ()) -> None:
        """Drop gradients, also those of parameters that the optimizer does not have: they differ between workers."""
        kept = {id(param) for param in keep}
        for param in (*self._model.parameters(), *self._params()):
            if id(param) not in kept:
                param.grad = None

    @staticmethod
    def _taken(params: Sequence[torch.Tensor], given: torch.Tensor) -> list[torch.Tensor]:
        """Return a shard's gradients, with zeros for missing ones, and reset those of the parameters.

        Sets the entries of `given`, shape (parameters,), to 1 where there was a gradient.
        """
        gradients = []
        for at, param in enumerate(params):
            gradient, param.grad = param.grad, None
            if gradient is not None and gradient.is_sparse:
                raise UsageError(
                    f"a gradient is sparse (of a parameter of shape {list(param.shape)}); virtual workers add up dense "
                    "gradients alone: use sparse=False in torch.nn.Embedding"
                )
            if gradient is not None:
                given[at] = 1.0
            gradients.append(torch.zeros_like(param) if gradient is None else gradient.detach())
        return gradients

    def _exchange(
        self,
        params: Sequence[torch.Tensor],
        sums: PartialSums,
        given: torch.Tensor,
        matrix: torch.Tensor,
        votes: Sequence[int],
    ) -> list[float]:
        vector = torch.cat([matrix.view(-1), given, torch.tensor(votes, dtype=torch.float64)])
        results = self.reduction.exchange(params, sums, vector)
        matrix.copy_(vector[: matrix.numel()].view(matrix.shape))
        rest = vector[matrix.numel() :].tolist()
        for param, result, count in zip(params, results, rest, strict=False):
            param.grad = result if count else None
        return rest[len(params) :]

    # --- what the bits depend on ------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return the number of virtual workers, the seed, random states, and what the bits of the result depend on."""
        return {
            "count": self.count,
            "seed": self.seed,
            "environment": dict(self.environment_check.environment),
            "random": self._random.encoded(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Set random states, compare with the training that is continued, and warn if bits may differ from now on.

        Raises:
            UsageError: The number of virtual workers or of generators, or the seed, differs, so the result would, too.
        """
        for name, then, now in (
            ("count", state["count"], self.count),
            ("seed", state["seed"], self.seed),
            ("number of generators", len(state["random"]), len(self._random)),
        ):
            if then != now:
                raise UsageError(
                    f"the training was begun with {name}={then} of its virtual workers, and {name} is {now} now, which "
                    "gives another result; use the same"
                )
        self.environment_check.compare(state["environment"])
        self._random.load(state["random"])


virtual_workers = VirtualWorkers


def _check(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    if not isinstance(model, torch.nn.Module) or not isinstance(optimizer, torch.optim.Optimizer):
        raise UsageError(
            "virtual workers are for PyTorch alone: give a torch.nn.Module and a torch optimizer, not "
            f"{type(model).__name__} and {type(optimizer).__name__}"
        )
    if hasattr(optimizer, "skip_synchronize"):
        raise UsageError(
            "virtual workers need the optimizer itself, not a DistributedOptimizer, whose sums depend on the number of "
            "workers"
        )
    if isinstance(optimizer, torch.optim.LBFGS):
        raise UsageError("LBFGS evaluates the loss several times a step, which virtual workers do not allow")
    for name, value in (*model.named_parameters(), *model.named_buffers()):
        if value.device.type != "cpu":
            raise UsageError(
                f"{name} of the model is on {value.device}; virtual workers compute on the CPU: the bits of a GPU's "
                "sums are not guaranteed"
            )
    for name, module in model.named_modules():
        if any(kind.__name__ == "SyncBatchNorm" for kind in type(module).__mro__):
            raise UsageError(
                f"{name} is a SyncBatchNorm, whose statistics are those of the real workers' rows; use BatchNorm: "
                "virtual workers take the statistics of each shard"
            )


def _guard(optimizer: torch.optim.Optimizer, workers: VirtualWorkers) -> list[Any]:
    """Refuse a step of the optimizer without the gradients of a whole batch."""
    owner = weakref.ref(workers)

    def before(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        found = owner()
        if found is None:
            return
        if any(each is not None for each in (*args[1:], *kwargs.values())):
            raise UsageError("optimizer.step() with a closure evaluates the loss again; call it without one")
        if not found._reduced:
            raise UsageError(
                "optimizer.step() without the gradients of a whole batch: go through all of workers.shards(...) before "
                "each step. With several virtual workers, step each optimizer before the shards of the next one, which "
                "may change its gradients"
            )

    def after(*_: Any) -> None:
        found = owner()
        if found is not None:
            found._reduced = False

    return [optimizer.register_step_pre_hook(before), optimizer.register_step_post_hook(after)]


def _watch_others(workers: VirtualWorkers) -> Callable[[], None]:
    """Return a check of all other virtual workers here, to call after the shards of these have run.

    If the shards have changed gradients of others, it refuses their step; for a buffer of theirs it raises UsageError.
    """
    others = [each for each in _all if each is not workers]
    own = {id(buffer) for buffer in workers._model.buffers()} if others else set()
    pending = [(each, _gradients(each)) for each in others if each._reduced]
    buffers = [
        (name, buffer, buffer._version)
        for each in others
        for name, buffer in each._model.named_buffers()
        if id(buffer) not in own and not buffer.is_inference()
    ]

    def check() -> None:
        for other, before in pending:
            if _gradients(other) != before:
                other._reduced = False
        for name, buffer, version in buffers:
            if buffer._version != version:
                raise UsageError(
                    f"a shard has changed the buffer {name}, which is not one of the model of these virtual workers, "
                    "but of other ones: each worker would keep its own value. Give both the same model, "
                    "torch.nn.ModuleList([...]) of all modules that their shards call"
                )

    return check


def _gradients(workers: VirtualWorkers) -> list[tuple[int, int]]:
    """Return the identity and torch's counter of in-place changes of each gradient."""
    found = [param.grad for param in workers._params()]
    return [(0, 0) if each is None else (id(each), each._version) for each in found]


def align(model: torch.nn.Module) -> None:
    """Move parameters and buffers to memory as torch allocates it: bits may depend on where a tensor begins."""
    with torch.no_grad():
        for value in (*model.parameters(), *model.buffers()):
            value.data = align_tensor(value.data)


def align_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor, or a copy of it if it does not begin at a multiple of 64 bytes."""
    return tensor.clone() if tensor.numel() and tensor.data_ptr() % ALIGNMENT_BYTES else tensor
