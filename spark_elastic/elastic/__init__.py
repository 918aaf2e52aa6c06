"""States that outlive a change of the world, and the loop that retries a user's function; free of any framework.

Start with `loop` and `state.ElasticState`. `frontend` leaves and joins worlds for them; `handlers` copies and restores
values by type, `mark` counts steps and decides where to resume, `plain_values` has the values without a handler.
"""
