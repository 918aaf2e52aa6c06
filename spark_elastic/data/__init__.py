"""DataFrames as packed records on shared storage, and batches from them at memory speed."""
