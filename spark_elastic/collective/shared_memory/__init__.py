"""Reductions among the processes of one host, through shared memory: `peers` finds them, `reducer` adds up.

`segment` is the memory of one process that the others read.
"""
