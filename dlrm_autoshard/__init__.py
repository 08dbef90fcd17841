"""dlrm_autoshard: a DLRM trainer that places, measures and moves its embedding tables."""

__version__ = "0.1.0"
