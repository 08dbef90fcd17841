"""Imports of the server from which tests fork their ranks: see ranks.py."""

import gc

import hypothesis  # noqa: F401
import pytest  # noqa: F401
import torch._dynamo  # which the first optimizer of a process imports
import torch.profiler  # noqa: F401

import dlrm_autoshard.report.html  # noqa: F401
import tests.trainers  # noqa: F401
from dlrm_autoshard.benchmarks.peer_torchrec import find_torchrec

if find_torchrec() is None:
    import torchrec.distributed.model_parallel  # noqa: F401

gc.collect()
gc.freeze()  # or every rank's collector goes, and copies page by page, through all of this at each of its ends
