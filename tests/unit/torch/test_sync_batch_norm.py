"""Batch statistics of all ranks' rows: how they are shared out changes neither outputs nor gradients."""

import copy
import io
import itertools
import pickle

import pytest
import torch

import spark_elastic.torch as hvd
from spark_elastic.collective.batch_statistics import without_rows
from spark_elastic.torch.sync_batch_norm import unconverted
from tests.nightly import by_night
from tests.unit.worlds import together

ROWS = 8
SHARES = {
    "equal": {1: [8], 2: [4, 4], 4: [2, 2, 2, 2]},
    "unequal": {1: [8], 2: [7, 1], 4: [3, 1, 3, 1]},
    "some without rows": {1: [8], 2: [8, 0], 4: [0, 5, 0, 3]},
}


def build(dtype=torch.float64, sync=True):
    torch.manual_seed(1)
    net = torch.nn.Sequential(
        torch.nn.Conv2d(2, 4, 3),
        torch.nn.BatchNorm2d(4),
        torch.nn.ReLU(),
        torch.nn.Conv2d(4, 4, 2),
        torch.nn.BatchNorm2d(4, momentum=None),
        torch.nn.Flatten(),
        torch.nn.Linear(16, 6),
        torch.nn.BatchNorm1d(6, affine=False),
        torch.nn.Linear(6, 3),
    ).to(dtype)
    return hvd.SyncBatchNorm.convert_sync_batchnorm(net) if sync else net


def rows(dtype=torch.float64):
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(ROWS, 2, 5, 5, generator=generator, dtype=torch.float64) * 3 + 5
    return x.to(dtype), torch.arange(ROWS) % 3


def share_of(counts, x, y):
    edges = [0, *itertools.accumulate(counts)]
    mine = slice(edges[hvd.rank()], edges[hvd.rank() + 1])
    return x[mine], y[mine]


def gradients(counts, dtype, sync=True):
    """Of the mean loss of all rows."""
    hvd.init()
    model = build(dtype, sync)
    x, y = share_of(counts, *rows(dtype))
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.0), model.named_parameters(), op=hvd.Sum
    )
    for _ in range(2):  # from the second step on buckets are sent while backward runs
        optimizer.zero_grad()
        (torch.nn.functional.cross_entropy(model(x), y, reduction="sum") / ROWS).backward()
        optimizer.step()
    return [p.grad.double().tolist() for p in model.parameters()], [b.double().tolist() for b in model.buffers()]


TYPES = (torch.float64, torch.float32, torch.bfloat16)


def in_worker(cases):
    return [{dtype: gradients(*case[:1], dtype, *case[1:]) for dtype in TYPES} for case in cases]


def in_a_world(size, cases):
    """Of all ranks and cases: the case and its result by type."""
    return [pair for of_cases in together(in_worker, cases, count=size) for pair in zip(cases, of_cases, strict=True)]


def flat(nested):
    return torch.cat([torch.tensor(each, dtype=torch.float64).reshape(-1) for each in nested])


def distance(found, expected):
    return float((flat(found) - flat(expected)).norm() / flat(expected).norm())


@pytest.fixture(scope="module")
def of_one_process():
    ((_, result),) = in_a_world(1, [([ROWS], False)])
    return result


BOUNDS = {torch.float64: 1e-13, torch.float32: 2e-6, torch.bfloat16: 0.1}


@pytest.mark.parametrize("size", by_night([2, 4], but=[2]))
def test_gradients_are_those_of_one_process_with_the_same_rows(size, of_one_process):
    for case, by_type in in_a_world(size, [(shares[size],) for shares in SHARES.values()]):
        for dtype, (found, running) in by_type.items():
            expected, buffers = of_one_process[dtype]
            print(f"{size} workers, {case[0]}, {dtype}: off by {distance(found, expected):.1e}")
            assert distance(found, expected) < BOUNDS[dtype]
            assert distance(running, buffers) < BOUNDS[dtype]


def far_from_zero(dtype, offset):
    """A tiny spread about a large mean, which sums of squares would lose."""
    hvd.init()
    torch.manual_seed(0)
    x = (torch.randn(64, 3, dtype=torch.float64) + offset).to(dtype)
    layer = hvd.SyncBatchNorm(3, dtype=dtype)
    mine = x[:5] if hvd.rank() == 0 else x[5:]
    out = layer(mine).detach()
    expected = torch.nn.BatchNorm1d(3, dtype=torch.float64)(x.double()).detach()
    return float((out.double() - (expected[:5] if hvd.rank() == 0 else expected[5:])).abs().max()), out.dtype == dtype


@pytest.mark.parametrize(("dtype", "offset", "bound"), [(torch.float32, 1e4, 5e-3), (torch.float64, 1e7, 1e-7)])
def test_a_small_variance_about_a_large_mean_is_kept(dtype, offset, bound):
    for error, same_type in together(far_from_zero, dtype, offset):
        assert error < bound
        assert same_type


def in_eval():
    hvd.init()
    model = build()
    x, _ = rows()
    model(x[hvd.rank() :: 2])
    model.eval()
    if hvd.rank() == 0:
        return True
    plain = build(sync=False).eval()
    plain.load_state_dict(model.state_dict())
    return torch.equal(model(x), plain(x))  # one rank alone: a collective would never end


def test_eval_mode_does_not_communicate():
    assert together(in_eval) == [True, True]


@pytest.mark.parametrize("initialised", [True, False], ids=["a world of one", "before init"])
def test_in_a_world_of_one_it_equals_the_plain_layer(initialised, request):
    if initialised:
        request.getfixturevalue("alone")
    model, plain = build(torch.float32), build(torch.float32, sync=False)
    x, y = rows(torch.float32)
    for net in (model, plain):
        torch.nn.functional.cross_entropy(net(x), y).backward()
    for one, other in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(one.grad, other.grad)
    for one, other in zip(model.buffers(), plain.buffers(), strict=True):
        assert torch.equal(one, other)


def with_a_stand_in():
    hvd.init()
    model = build()
    x, y = rows()
    if hvd.rank():
        with without_rows():
            loss = model(x[:1] * 1e6).sum() * float("nan")
    else:
        loss = torch.nn.functional.cross_entropy(model(x), y)
    loss.backward()
    grads = [p.grad.tolist() for p in list(model.parameters())[:-2]]  # the last layer has no statistics behind it
    return grads, [b.tolist() for b in model.buffers()]


def test_substitute_rows_do_not_count():
    model = build(sync=False)
    x, y = rows()
    torch.nn.functional.cross_entropy(model(x), y).backward()
    (real, running), (nothing, same) = together(with_a_stand_in)
    assert distance(real, [p.grad.tolist() for p in list(model.parameters())[:-2]]) < 1e-13
    assert distance(running, [b.tolist() for b in model.buffers()]) < 1e-13
    assert running == same
    assert float(flat(nothing[:-2]).abs().max()) == 0.0


def one_value(tolerant):
    hvd.init()
    layer = hvd.SyncBatchNorm(3)
    layer.single_value_is_normalised = tolerant
    try:
        return layer(torch.ones(1 - hvd.rank(), 3)).tolist()
    except ValueError as error:
        return str(error)


@pytest.mark.parametrize("tolerant", [True, False])
def test_a_single_value_per_channel_is_refused_on_every_rank_or_uses_running_statistics(tolerant):
    results = together(one_value, tolerant)
    if tolerant:
        assert results == [[pytest.approx([1, 1, 1], rel=1e-4)], []]
    else:
        assert all("all 2 ranks together have 1" in each for each in results)


# --- conversion -----------------------------------------------------------------------------------


class Renamed(torch.nn.BatchNorm2d):
    pass


class OwnForward(torch.nn.BatchNorm1d):
    def forward(self, input):
        return super().forward(input) * 2


def test_conversion_keeps_parameters_hooks_classes_and_names():
    net = torch.nn.Sequential(torch.nn.BatchNorm1d(3), Renamed(3), OwnForward(3), torch.nn.LazyBatchNorm1d())
    before, calls = dict(net.named_parameters()), []
    net[0].register_forward_hook(lambda *_: calls.append(1))
    keys = list(net.state_dict())
    assert hvd.SyncBatchNorm.convert_sync_batchnorm(net) is net
    assert [isinstance(each, hvd.SyncBatchNorm) for each in net] == [True, True, False, False]
    assert isinstance(net[0], torch.nn.BatchNorm1d)
    assert isinstance(net[1], Renamed)
    assert unconverted(net) == ["2 (OwnForward)", "3 (LazyBatchNorm1d)"]
    assert list(net.state_dict()) == keys
    assert all(param is before[name] for name, param in net.named_parameters())
    net[0](torch.ones(2, 3))
    assert calls == [1]
    with pytest.raises(ValueError, match="expected 4D input"):
        net[1](torch.ones(2, 3))


@pytest.mark.parametrize(
    "copied",
    [copy.deepcopy, lambda net: pickle.loads(pickle.dumps(net)), lambda net: _saved(net)],
    ids=["copied", "pickled", "saved"],
)
def test_converted_layers_can_be(copied):
    net = torch.nn.Sequential(torch.nn.BatchNorm1d(3), Renamed(3), torch.nn.SyncBatchNorm(3), hvd.SyncBatchNorm(3))
    hvd.SyncBatchNorm.convert_sync_batchnorm(net)
    again = copied(net)
    assert [type(each) for each in again] == [type(each) for each in net]
    assert again[1].weight is not net[1].weight


def _saved(net):
    file = io.BytesIO()
    torch.save(net, file)
    file.seek(0)
    return torch.load(file, weights_only=False)
