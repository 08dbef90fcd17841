"""Costs of sets of tables on a rank, and of exchanges, learned from measurements of many sets."""
