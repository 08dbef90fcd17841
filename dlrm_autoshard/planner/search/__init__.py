"""Placements that make the predicted step short: greedy, local search, splits; and what moving costs."""
