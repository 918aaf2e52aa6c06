"""Reductions among the processes of one host, through memory that they share.

Start with `reducer`; `segments` has the memory, its order and the counters, and `peers` finds the other members.
"""
