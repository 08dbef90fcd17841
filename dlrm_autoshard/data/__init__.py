"""Data sources, which are read by position, and the loader that reads ahead.

Takes the config's `data:` and `tables:` sections; returns a `DataSource` and `Batch`es of one rank's samples. Needs no
running ranks: what is read depends on (split, epoch, first, last) alone.
"""
