"""Digests of tensors, by which workers compare their models."""

import torch

from spark_elastic.collective.digest import digest


def test_a_digest_changes_with_any_change_by_training():
    torch.manual_seed(0)
    table = torch.eye(300)
    others = [
        table[torch.randperm(300)],  # rows in another order have the same sums
        table[:, torch.randperm(300)],
        table.flip(0),
        table.double().float().add_(torch.zeros(300, 300).index_fill_(0, torch.tensor([7]), 1e-7)),
        table.roll(1, 0),
    ]
    digests = {digest(tensor) for tensor in [table, *others]}
    assert len(digests) == 6
    assert digest(table.clone()) == digest(table) == digest(table.t().contiguous())
    moved = torch.empty(300 * 300 + 1)[1:].copy_(table.reshape(-1)).view(300, 300)  # at another address
    assert digest(moved) == digest(table)
    for small in (torch.tensor(3), torch.tensor([True]), torch.zeros(0), torch.ones(3, dtype=torch.complex64)):
        assert digest(small) == digest(small.clone())
