"""The folder of a run: its checkpoints, and the lease of the driver that writes there.

Estimators and loops of one's own use the same. `checkpoints` has the files, `lease` who may write them, `tensors` what
is in them, and `trust` when files may run code as they are loaded.
"""
