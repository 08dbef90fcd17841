"""Measured over predicted, here and now: one posterior, its terms, and what it is conditioned on."""
