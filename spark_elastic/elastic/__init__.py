"""States that outlive a change of the world, and the loop that retries a user's function; free of any framework.

Start with `state.ElasticState` and `loop`. `handlers` copies and restores values by type, `steps` counts steps,
`undo_log` undoes plain values with a step that is done again, `recovery` decides where to resume, `frontend` joins and
leaves worlds.
"""
