"""Collectives among the processes of a world; the frameworks' packages are built on them.

`world.connect` makes the `group` of a world; `process` has this process's position and its groups, `process_sets` the
groups of chosen ranks. A call goes through these modules: `operations` (and `allreduce`, `objects`) has the
collectives, `calls` queues them, `negotiation` compares the members' calls, and `group` launches them in one of the
ways of `reduce`: `shared_memory`, `gpu` (NCCL) or `gloo`. `fused` reduces gradients, `replicas` compares the members'
models, and `surface` lists the names that are the same for every framework.
"""
