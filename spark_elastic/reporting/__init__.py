"""What people see of a job: sentences about its changes, progress bars, log lines and plots.

Start with `announcer`, which the driver feeds. `event_log` makes the changes, `progress` the model of the bar and its
texts, `screens` draws it; `history` holds what a training has measured, and `figure` draws a finished job.
"""
