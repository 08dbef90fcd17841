"""Placements that make the predicted step short: greedy, local search, splits; and names for equal ranks."""
