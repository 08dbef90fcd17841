"""A DLRM trainer that places, measures and moves its embedding tables.

    from dlrm_autoshard import PlacementTask, Planner, TableConfig, TableStats, Topology

`__init__.pyi` lists the public names. Each is loaded on first use, so `import dlrm_autoshard` is cheap.
"""

import lazy_loader

__version__ = "0.2.0.dev0"

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
