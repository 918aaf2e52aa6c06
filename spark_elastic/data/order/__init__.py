"""Orders of an epoch's rows, computed from (rows, seed, epoch) rather than stored.

`permutation` has the keyed permutation and the order "global", `windows` the order "lanes" for datasets larger than
memory, `sampling` the order and the shares of `ElasticSampler` and `ElasticDataset`.
"""
