"""The package's layers, in the order in which they may import each other.

test_imports.py holds the code to it, and test_readme.py the map in dlrm_autoshard/README.md.
"""

LAYERS = (
    # plain data
    *(
        "errors",
        "formats",
        "optimizers",
        "tables",
        "plan",
        "costs",
        "plug_in",
        "config_errors",
        "config_data",
        "config",
        "records",
    ),
    # what is trained, and where
    *("data", "model", "distributed"),
    # what is decided, and shown
    *("planner", "report", "probe", "autoshard"),
    # what people use
    *("torchrec", "training", "benchmarks", "commands", "__main__"),
)
"""A module at the package's root, or a folder. Each may import those before it."""
