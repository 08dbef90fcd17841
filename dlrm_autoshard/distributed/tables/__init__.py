"""A rank's own tables: their memory, first values, optimizers, and fbgemm's kernels on them."""
