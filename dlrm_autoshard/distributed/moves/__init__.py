"""Moves tables to other ranks while a job runs: agree, transfer in chunks, adopt."""
