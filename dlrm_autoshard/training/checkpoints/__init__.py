"""What a job saves and loads again: checked by digests, independent of the plan and the number of ranks."""
