"""Which workers train, where and in which world: pure values and decisions, without threads, sockets, clocks or logs.

Start with `machine`: events in, commands out. Below it, `worlds` decides on worlds and members (with `decisions` and
`ranking`), and `slots` decides where processes run. `failures` makes pauses and gives jobs up, `registry` records what
exists, `states` has every transition. `reasons` has the reasons as data, and the sentences about them.
"""
