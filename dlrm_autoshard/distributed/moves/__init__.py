"""Tables that change owners while a job runs: agreed on, sent in chunks, adopted."""
