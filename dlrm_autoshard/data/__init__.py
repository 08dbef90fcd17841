"""Sources of samples, read by position, and the loader that reads ahead.

In: the config's `data:` and `tables:` sections. Out: a `DataSource`, and `Batch`es of one rank's samples.
Knows no ranks that run: what is read follows from (split, epoch, first, last) alone.
"""
