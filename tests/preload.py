"""What the server from which the ranks of tests are forked has imported before the first of them: see ranks.py."""

import gc
import os

import hypothesis  # noqa: F401
import pytest  # noqa: F401
import torch._dynamo  # which the first optimizer of a process imports
import torch.profiler  # noqa: F401
import vl_convert

import dlrm_autoshard.report.html  # noqa: F401
import tests.trainers  # noqa: F401
from dlrm_autoshard.benchmarks.peer_torchrec import find_torchrec

if find_torchrec() is None:
    import torchrec.distributed.model_parallel  # noqa: F401

_make_bundle, _made = vl_convert.javascript_bundle, os.memfd_create("bundle")


def _bundle() -> str:
    """The charts' library: 1.7 s of work for always the same bytes, made by the first rank that writes a report."""
    found = os.pread(_made, 1 << 24, 0)
    if not found:
        found = _make_bundle().encode()  # type: ignore[call-arg]  # its stub wants what is optional
        os.pwrite(_made, found, 0)
    return found.decode()


vars(vl_convert)["javascript_bundle"] = _bundle
gc.collect()
gc.freeze()  # or every rank's collector goes, and copies page by page, through all of this at each of its ends
