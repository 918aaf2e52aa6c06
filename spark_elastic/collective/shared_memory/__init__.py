"""Reductions among the processes of one host through memory that they share; start reading at `reducer`."""
