"""A rank's own tables: memory, initial rows, optimizers, and fbgemm's kernels."""
