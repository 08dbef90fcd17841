"""From ids on the rank of their samples to pooled vectors there: the exchanges, and the lookup as a module."""
