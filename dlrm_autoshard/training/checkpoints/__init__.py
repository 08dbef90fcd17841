"""Saves and loads a job: verified by digests, independent of the plan and the number of ranks."""
