"""Host memory that is handed out again and again, so that what is timed faults no new page in.

memory = KeptMemory(64 * 2**20)
vectors = memory.empty(like, 1000)       # [1000], anything in it
memory.take_back(at)                     # all that was handed out since `at = memory.used`
"""

from __future__ import annotations

import torch
from torch import Tensor

_ALIGNED = 64


class KeptMemory:
    """For tensors of one plan after another, each of another size: among what was freed of the last plans' glibc often
    finds no room for the next one's, so that the heap grows on and on, and its pages are new. To fault 8 MB in took
    five times as long as to exchange them. In training, where each step's tensors are the last one's, it has settled
    after some steps."""

    def __init__(self, num_bytes: int) -> None:
        self._bytes = torch.zeros(num_bytes, dtype=torch.uint8)
        self.used = 0

    def __len__(self) -> int:
        return len(self._bytes)

    def empty(self, like: Tensor, count: int) -> Tensor:
        """One dimension of `like`'s type. Where no room is left it is new memory, as ever."""
        size = count * like.element_size()
        if self.used + size > len(self):
            return like.new_empty(count)
        start, self.used = self.used, self.used + -(-size // _ALIGNED) * _ALIGNED
        return self._bytes[start : start + size].view(like.dtype)

    def take_back(self, at: int = 0) -> None:
        self.used = at
