"""Saving and loading a job: checked by digests, independent of the plan and the number of ranks."""
