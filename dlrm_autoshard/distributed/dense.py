"""The data-parallel dense part as one flat vector: one all-reduce, one optimizer update, whatever the number of layers.

Parameters become views of `flat`, gradients views of `gradient`. The last two elements of `gradient` carry the wish to
stop and the step's loss, so that the all-reduce that every step has anyway tells all ranks both. Parameters that are
frozen (`requires_grad=False`) stay where they are.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from dlrm_autoshard.config import DenseOptimizerConfig
from dlrm_autoshard.distributed.lookup.exchange import Pending
from dlrm_autoshard.distributed.lookup.shared_memory import connect


class DataParallelDense:
    """Owns the dense parameters' memory, their gradients and their optimizer. `module` must be equal on all ranks."""

    def __init__(
        self,
        module: nn.Module,
        config: DenseOptimizerConfig,
        group: dist.ProcessGroup,
        device: torch.device,
        *,
        shared_memory: bool = True,
    ) -> None:
        """shared_memory: reduce through it where the ranks are all on one host."""
        self.module, self._group = module.to(device), group
        self._link = connect(group) if shared_memory and device.type == "cpu" else None
        trained = {name: parameter for name, parameter in module.named_parameters() if parameter.requires_grad}
        empty = torch.zeros(0, device=device)  # for a module without parameters
        weights = [parameter.detach().reshape(-1) for parameter in trained.values()]
        self.flat = nn.Parameter(torch.cat([empty, *weights]))
        self.gradient = torch.zeros(len(self.flat) + 2, device=device)
        self.stop_asked = False  # set it where this rank wants the job to end
        self.stop_agreed = False  # after a step: whether any rank wanted it; on all ranks alike
        self._stops: deque[tuple[Tensor, torch.cuda.Event]] = deque()  # on their way from the GPU
        self._views: dict[str, tuple[int, torch.Size]] = {}
        start = 0
        for name, parameter in trained.items():
            self._views[name] = (start, parameter.shape)
            end = start + parameter.numel()
            parameter.data = self.flat.data[start:end].view(parameter.shape)
            parameter.grad = self.gradient[start:end].view(parameter.shape)
            start = end
        self.flat.grad = self.gradient[:-2]
        self.optimizer = make_optimizer(self.flat, config)
        self._max_norm = config.max_gradient_norm
        self._frozen = {name: p for name, p in module.named_parameters() if not p.requires_grad}
        self._kept = module.state_dict().keys() - self._views.keys() - self._frozen.keys()
        _row_by_row(self._frozen)

    @property
    def _buffers(self) -> dict[str, Tensor]:
        """As they are now: a module may put another in a buffer's place."""
        return _row_by_row({name: buffer for name, buffer in self.module.named_buffers() if name in self._kept})

    def broadcast(self) -> None:
        """Rank 0's weights and buffers, on every rank."""
        for tensor in (self.flat.data, *(tensor for _, tensor in self.untrained())):
            dist.broadcast(tensor, src=0, group=self._group)

    def broadcast_buffers(self) -> None:
        """Rank 0's: BatchNorm's statistics, say, which each rank gathers from its own samples."""
        for buffer in self._buffers.values():
            dist.broadcast(buffer.data, src=0, group=self._group)

    def kept_buffers(self) -> dict[str, Tensor]:
        """As they are now."""
        return {name: buffer.clone() for name, buffer in self._buffers.items()}

    def restore_buffers(self, kept: dict[str, Tensor]) -> None:
        for name, buffer in self._buffers.items():
            buffer.data.copy_(kept[name])

    def fingerprint(self) -> int:
        """The same for the same weights, bit by bit; any single change changes it."""
        return int(self.flat.data.view(torch.int32).sum(dtype=torch.int64))

    def zero_gradient(self) -> None:
        self.gradient[:-2].zero_()  # the last step's loss can be asked for until there is another

    def start_all_reduce(self, local_loss: Tensor) -> Pending:
        """Sums gradients and loss over ranks (each rank's loss is its share of the global mean)."""
        self.gradient[-2:-1] = float(self.stop_asked)  # a slice is filled; one element would be copied, which waits
        self.gradient[-1] = local_loss
        if dist.get_world_size(self._group) == 1:
            return Pending(None, self.gradient)
        if self._link is not None:
            return Pending(self._link.all_reduce(self.gradient), self.gradient)
        return Pending(dist.all_reduce(self.gradient, group=self._group, async_op=True).wait, self.gradient)

    @property
    def global_loss(self) -> Tensor:
        """Loss of the last all-reduced step: the mean over the global batch."""
        return self.gradient[-1]

    def step(self, lr_scale: float) -> None:
        group = self.optimizer.param_groups[0]
        group["lr"] = group["initial_lr"] * lr_scale
        if self._max_norm is not None:  # on all ranks by the same factor, of the same sum
            nn.utils.clip_grad_norm_([self.flat], self._max_norm)
        self.optimizer.step()
        self._read_stop()

    def _read_stop(self) -> None:
        """On GPUs as it was two steps ago, which waits for nothing."""
        if self.gradient.device.type == "cpu":
            self.stop_agreed = bool(self.gradient[-2])
            return
        self._stops.append((torch.empty(1, pin_memory=True), torch.cuda.Event()))
        self._stops[-1][0].copy_(self.gradient[-2:-1], non_blocking=True)
        self._stops[-1][1].record()
        if len(self._stops) > 2:
            stop, arrived = self._stops.popleft()
            arrived.synchronize()
            self.stop_agreed = bool(stop)

    def named_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Live views of everything a checkpoint needs, by names that depend on the model alone."""
        for name in self._views:
            yield f"dense.{name}", self._view(self.flat.data, name)
        yield from self.untrained()
        for state, value in self.optimizer.state[self.flat].items():
            if isinstance(value, Tensor) and value.dim() > 0:
                for name in self._views:
                    yield f"dense_optimizer.{name}.{state}", self._view(value, name)

    def untrained(self) -> Iterator[tuple[str, Tensor]]:
        """Those of them that no optimizer updates: the model's own business."""
        yield from ((f"dense.{name}", parameter.data) for name, parameter in self._frozen.items())
        yield from ((f"dense_buffers.{name}", buffer.data) for name, buffer in self._buffers.items())

    @property
    def optimizer_steps(self) -> int:
        return int(self.optimizer.state[self.flat].get("step", 0))

    def set_optimizer_steps(self, steps: int) -> None:
        if "step" in self.optimizer.state[self.flat]:
            self.optimizer.state[self.flat]["step"] = torch.tensor(float(steps))

    def _view(self, flat: Tensor, name: str) -> Tensor:
        start, shape = self._views[name]
        return flat[start : start + shape.numel()].view(shape)


def _row_by_row(tensors: dict[str, Any]) -> dict[str, Any]:
    """As they lie in memory: checkpoints are read straight into them."""
    for tensor in tensors.values():
        tensor.data = tensor.data.contiguous()
    return tensors


def make_optimizer(flat: nn.Parameter, config: DenseOptimizerConfig) -> torch.optim.Optimizer:
    """SGD, Adagrad or Adam over the flat vector, with its state allocated at once, so that a checkpoint of step 0 and
    one of step 1000 have the same keys. On CPU torch's fused ones, which pass over memory once."""
    fused = True if flat.device.type == "cpu" else None  # None: as torch chooses; it has no fused Adagrad on GPUs
    make: Any = {"sgd": torch.optim.SGD, "adagrad": torch.optim.Adagrad, "adam": torch.optim.Adam}[config.name]
    own = {"momentum": config.momentum} if config.name == "sgd" else {"eps": config.eps}
    optimizer: torch.optim.Optimizer = make([flat], lr=config.lr, weight_decay=config.weight_decay, fused=fused, **own)
    if config.momentum:
        optimizer.state[flat] = {"momentum_buffer": torch.zeros_like(flat.data)}
    if config.name == "adam":
        zeros = torch.zeros_like(flat.data)
        optimizer.state[flat] = {"step": torch.tensor(0.0), "exp_avg": zeros, "exp_avg_sq": zeros.clone()}
    optimizer.param_groups[0]["initial_lr"] = config.lr
    return optimizer
