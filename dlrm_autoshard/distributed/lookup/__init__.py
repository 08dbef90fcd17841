"""Turns ids on the rank of their samples into pooled vectors there: the exchanges, and the lookup as a module."""
