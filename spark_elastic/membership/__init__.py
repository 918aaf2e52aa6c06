"""Who trains, where and in which world: pure values and decisions, without threads, sockets, clocks or logs.

Start with `machine`: events in, commands out. Below it, `worlds` decides who trains together (with `gathering` and
`decisions`), and `slots` decides where processes run (with `backoff`). `crashes` judges processes that die, `registry`
records what exists, `states` has every transition. `reasons` are data, and `wording` makes sentences of them.
"""
