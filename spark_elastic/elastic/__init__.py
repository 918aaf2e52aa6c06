"""States that outlive a change of the world, and the loop that retries a user's function; free of any framework.

Start with `state.ElasticState` and `loop`. `handlers` copies and restores values by type, `steps` counts steps and
decides where to resume, `plain_values` undoes plain values with a step that is done again.
"""
