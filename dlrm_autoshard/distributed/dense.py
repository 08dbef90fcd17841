"""The data-parallel dense part as one flat vector: one all-reduce, one optimizer update, whatever the number of layers.

Parameters become views of `flat`, gradients views of `gradient`. The last two elements of `gradient` carry the wish to
stop and the step's loss, so that the all-reduce that every step has anyway tells all ranks both. Parameters that are
frozen (`requires_grad=False`) stay where they are.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

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
        self.module = module.to(device)
        self._group = group
        self._link = connect(group) if shared_memory and device.type == "cpu" else None
        trained = {name: parameter for name, parameter in module.named_parameters() if parameter.requires_grad}
        parameters = list(trained.values())
        size = sum(parameter.numel() for parameter in parameters)
        empty = torch.zeros(0, device=device)  # for a module without parameters
        self.flat = nn.Parameter(torch.cat([empty, *(parameter.detach().reshape(-1) for parameter in parameters)]))
        self.gradient = torch.zeros(size + 2, device=device)
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
        self._frozen = {name: p for name, p in module.named_parameters() if not p.requires_grad}
        kept = module.state_dict().keys() - self._views.keys() - self._frozen.keys()
        self._buffers = {name: buffer for name, buffer in module.named_buffers() if name in kept}
        for tensor in (*self._frozen.values(), *self._buffers.values()):
            tensor.data = tensor.data.contiguous()  # checkpoints are read straight into a tensor's memory

    def broadcast(self) -> None:
        """Rank 0's weights and buffers, on every rank."""
        for tensor in (self.flat, *self._frozen.values()):
            dist.broadcast(tensor.data, src=0, group=self._group)
        self.broadcast_buffers()

    def broadcast_buffers(self) -> None:
        """Rank 0's: BatchNorm's statistics, say, which each rank gathers from its own samples."""
        for buffer in self._buffers.values():
            dist.broadcast(buffer, src=0, group=self._group)

    def kept_buffers(self) -> dict[str, Tensor]:
        """As they are now."""
        return {name: buffer.clone() for name, buffer in self._buffers.items()}

    def restore_buffers(self, kept: dict[str, Tensor]) -> None:
        for name, buffer in self._buffers.items():
            buffer.copy_(kept[name])

    def fingerprint(self) -> int:
        """The same for the same weights, bit by bit; any single change changes it."""
        return int(self.flat.data.view(torch.int32).sum(dtype=torch.int64))

    def zero_gradient(self) -> None:
        self.gradient[:-2].zero_()  # the last step's loss can be asked for until there is another

    def start_all_reduce(self, local_loss: Tensor) -> Pending:
        """Sums gradients and loss over ranks (each rank's loss is its share of the global mean)."""
        self.gradient[-2] = float(self.stop_asked)
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
        for name, parameter in self._frozen.items():
            yield f"dense.{name}", parameter.data
        for name, buffer in self._buffers.items():
            yield f"dense_buffers.{name}", buffer
        for state, value in self.optimizer.state[self.flat].items():
            if isinstance(value, Tensor) and value.dim() > 0:
                for name in self._views:
                    yield f"dense_optimizer.{name}.{state}", self._view(value, name)

    @property
    def optimizer_steps(self) -> int:
        return int(self.optimizer.state[self.flat].get("step", 0))

    def set_optimizer_steps(self, steps: int) -> None:
        if "step" in self.optimizer.state[self.flat]:
            self.optimizer.state[self.flat]["step"] = torch.tensor(float(steps))

    def _view(self, flat: Tensor, name: str) -> Tensor:
        start, shape = self._views[name]
        return flat[start : start + shape.numel()].view(shape)


def make_optimizer(flat: nn.Parameter, config: DenseOptimizerConfig) -> torch.optim.Optimizer:
    """SGD, Adagrad or Adam over the flat vector, with its state allocated at once, so that a checkpoint of step 0 and
    one of step 1000 have the same keys. On CPU torch's fused ones, which pass over memory once."""
    optimizer: torch.optim.Optimizer
    fused = True if flat.device.type == "cpu" else None  # None: as torch chooses; it has no fused Adagrad on GPUs
    decay = config.weight_decay
    if config.name == "sgd":
        optimizer = torch.optim.SGD([flat], lr=config.lr, weight_decay=decay, fused=fused)
    elif config.name == "adagrad":
        optimizer = torch.optim.Adagrad([flat], lr=config.lr, eps=config.eps, weight_decay=decay, fused=fused)
    else:
        optimizer = torch.optim.Adam([flat], lr=config.lr, eps=config.eps, weight_decay=decay, fused=fused)
        zeros = torch.zeros_like(flat.data)
        optimizer.state[flat] = {"step": torch.tensor(0.0), "exp_avg": zeros, "exp_avg_sq": zeros.clone()}
    optimizer.param_groups[0]["initial_lr"] = config.lr
    return optimizer
