"""Orders of an epoch's rows, computed from (rows, seed, epoch) rather than stored.

`permutation` has the keyed permutations, the order "global" and the order of `ElasticSampler` and `ElasticDataset`;
`windows` has the order "lanes" for datasets larger than memory.
"""
