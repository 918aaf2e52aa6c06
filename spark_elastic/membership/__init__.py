"""Pure values and decisions: no threads, sockets, clocks or logging. Time comes in as an argument."""
