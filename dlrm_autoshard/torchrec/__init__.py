"""Plans unmodified TorchRec models by measurements, and moves their tables while they train.

Takes an EmbeddingBagCollection or a DistributedModelParallel; makes TorchRec sharding plans, decisions and reports.
TorchRec is imported on first use and is no dependency of this package. Tested: 1.9 with torch 2.14, 1.8 with 2.13.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
