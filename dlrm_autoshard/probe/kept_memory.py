"""Reuses host memory, so that timed code causes no page faults.

memory = KeptMemory(64 * 2**20)
vectors = memory.empty(like, 1000)       # [1000], uninitialized
memory.take_back(at)                     # frees all allocated since `at = memory.used`
"""

from __future__ import annotations

import torch
from torch import Tensor

_ALIGNED = 64


class KeptMemory:
    """Allocates tensors for one plan after another, of different sizes, from one block of memory.

    glibc often finds no room among the freed tensors of earlier plans, so the heap grows with new pages; faulting in 8
    MB took five times as long as exchanging them. In training every step has the same sizes, and the heap settles."""

    def __init__(self, num_bytes: int) -> None:
        self._bytes = torch.zeros(num_bytes, dtype=torch.uint8)
        self.used = 0

    def __len__(self) -> int:
        return len(self._bytes)

    def empty(self, like: Tensor, count: int) -> Tensor:
        """Returns a 1-D tensor of `like`'s dtype; from the normal allocator if the block is full."""
        size = count * like.element_size()
        if self.used + size > len(self):
            return like.new_empty(count)
        start, self.used = self.used, self.used + -(-size // _ALIGNED) * _ALIGNED
        return self._bytes[start : start + size].view(like.dtype)

    def take_back(self, at: int = 0) -> None:
        self.used = at
