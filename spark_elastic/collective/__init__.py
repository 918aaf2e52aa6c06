"""Collectives among the processes of a world; the frameworks' frontends are built on them.

A call goes through these modules: `operations` (and `allreduce`, `objects`) has the collectives, `calls` queues them,
`negotiation` compares the members' calls, `group` selects the way (shared memory, NCCL, or Gloo in `gloo`).
`process` and `process_sets` have the position in the world and the groups; `fused` reduces gradients.
`surface` lists the names that are the same for every framework.
"""
