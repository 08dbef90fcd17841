"""TorchRec models, unmodified: planned by measurements, and their tables moved while they train.

In: an EmbeddingBagCollection, a DistributedModelParallel. Out: TorchRec sharding plans, decisions, reports. TorchRec is
imported when a name is first used; it is no dependency of ours. Tested with 1.9, which goes with torch 2.14, and 1.8,
with 2.13.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
