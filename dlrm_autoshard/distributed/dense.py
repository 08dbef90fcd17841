"""The data-parallel dense part as one flat vector: one all-reduce and one optimizer update for all layers.

dense = DataParallelDense(tower, torch.optim.SGD, lr=0.1)      # on every rank; instead of DDP and an optimizer
dense.backward(loss); dense.step()           # the all-reduce starts with the last gradient, `step` waits for it
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from itertools import zip_longest
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from dlrm_autoshard.config import DenseOptimizerConfig
from dlrm_autoshard.distributed.device import LateFlag
from dlrm_autoshard.distributed.lookup.exchange import Pending
from dlrm_autoshard.distributed.lookup.replicas import Replicas
from dlrm_autoshard.distributed.ranks.groups import group_or_alone
from dlrm_autoshard.distributed.stage_clock import StageClock
from dlrm_autoshard.distributed.sums import sums_over
from dlrm_autoshard.errors import UserError


class DataParallelDense:
    """Owns the dense parameters' memory, gradients and optimizer. `module` must have the same layers on all ranks, and
    each backward pass must reach the same ones.

    Parameters become views of `flat`, gradients views of `gradient`. The last two elements of `gradient` carry the
    request to stop and the step's loss, so that the step's all-reduce tells all ranks both. Frozen parameters
    (`requires_grad=False`) stay where they are.
    """

    overlap = True
    """False: start the all-reduce in `step`."""

    def __init__(
        self,
        module: nn.Module,
        optimizer: DenseOptimizerConfig | Callable[..., torch.optim.Optimizer],
        group: dist.ProcessGroup | None = None,
        device: torch.device | None = None,
        *,
        average: bool = True,
        shared_memory: bool = True,
        max_gradient_norm: float | None = None,
        clock: StageClock | None = None,
        replicas: Replicas | None = None,
        **options: Any,
    ) -> None:
        """optimizer: an elementwise torch class (SGD, Adagrad, Adam, AdamW) with its `options`; rank 0's weights are
        copied to all ranks. A config is for the trainer, which does that itself. group: default torch.distributed's.
        device: default the parameters'. clock: times the all-reduce and the update in sampled steps (`bags.clock`).

        average: the loss is the mean over this rank's samples, and gradients are averaged over ranks like DDP; False:
        the loss is this rank's share of the mean over all samples, and gradients are summed. shared_memory: reduce
        through it within a host. max_gradient_norm: of all weights together; longer gradients are scaled down.
        replicas: `bags.replicas`, tables copied to every rank, whose gradients travel with the dense ones.
        """
        group, self.clock = group_or_alone(group), clock
        device = device or next((p.device for p in module.parameters()), torch.device("cpu"))
        self.module, self._group = module.to(device), group
        self._sum = sums_over(group, device, shared_memory=shared_memory)
        trained = {name: parameter for name, parameter in module.named_parameters() if parameter.requires_grad}
        if not isinstance(optimizer, DenseOptimizerConfig):
            self._check_alike(trained)
        empty = torch.zeros(0, device=device)  # for a module without parameters
        weights = [parameter.detach().reshape(-1) for parameter in trained.values()]
        self.flat = nn.Parameter(torch.cat([empty, *weights]))
        self._replicas, copies = replicas, 0 if replicas is None else len(replicas.gradient)
        self.gradient = torch.zeros(len(self.flat) + copies + 2, device=device)
        self._own_gradient = self.gradient[: len(self.flat)]
        if replicas is not None:
            replicas.join(self.gradient[len(self.flat) : -2], self._not_too_late, self._start_if_complete)
        self.stop_asked = False  # set by this rank to end the job
        self.stop_agreed = False  # after a step: whether any rank asked; equal on all ranks
        self._stop = LateFlag()
        self._views: dict[str, tuple[int, torch.Size]] = {}
        self._trained: list[tuple[nn.Parameter, Tensor]] = []  # with the view that is its gradient
        made = weakref.WeakMethod(self._made)  # weak, because the collector does not see hooks of parameters
        start = 0
        for name, parameter in trained.items():
            self._views[name] = (start, parameter.shape)
            end = start + parameter.numel()
            parameter.data = self.flat.data[start:end].view(parameter.shape)
            parameter.grad = self.gradient[start:end].view(parameter.shape)
            self._trained.append((parameter, parameter.grad))
            parameter.register_post_accumulate_grad_hook(lambda _: (own := made()) and own())
            start = end
        self._all_made = False  # all of autograd's gradients of parameters
        self._missing = 0  # gradients to come in this backward pass; the last one starts the all-reduce
        self._unknown = torch.full((), torch.nan, device=device)
        self._loss = self._unknown
        self._reduced: Pending | None = None
        self._divisor = dist.get_world_size(group) if average else 1
        if isinstance(optimizer, DenseOptimizerConfig):
            self.optimizer, self._max_norm = make_optimizer(self.flat, optimizer), optimizer.max_gradient_norm
        else:
            self.optimizer, self._max_norm = optimizer([self.flat], **options), max_gradient_norm
        self._frozen = {name: p for name, p in module.named_parameters() if not p.requires_grad}
        self._kept = module.state_dict().keys() - self._views.keys() - self._frozen.keys()
        _row_by_row(self._frozen)
        if not isinstance(optimizer, DenseOptimizerConfig):
            self.broadcast()

    def _check_alike(self, trained: dict[str, nn.Parameter]) -> None:
        """Raises UserError on all ranks if parameters differ: gradients are summed by position."""
        mine = [(name, tuple(p.shape), str(p.dtype).removeprefix("torch.")) for name, p in trained.items()]
        said: list[list[tuple[str, tuple[int, ...], str]]] = [[] for _ in range(dist.get_world_size(self._group))]
        dist.all_gather_object(said, mine, group=self._group)
        for rank, other in enumerate(said):
            if other != said[0]:
                pairs = zip_longest(said[0], other)
                first, instead = next((a, b) for a, b in pairs if a != b)
                raise UserError(
                    f"rank {rank}'s module has {instead} where rank 0's has {first}: make the same module, with its "
                    "layers in the same order, on every rank."
                )
        half = next((name for name, _, dtype in said[0] if dtype != "float32"), None)
        if half is not None:
            raise UserError(f"parameter '{half}' is not float32: train it in float32, and use autocast for products.")

    @property
    def _buffers(self) -> dict[str, Tensor]:
        """Present buffers: a module may replace them."""
        return _row_by_row({name: buffer for name, buffer in self.module.named_buffers() if name in self._kept})

    def broadcast(self) -> None:
        """Copies rank 0's weights and buffers to every rank."""
        for tensor in (self.flat.data, *(tensor for _, tensor in self.untrained())):
            dist.broadcast(tensor, src=0, group=self._group)

    def broadcast_buffers(self) -> None:
        """Copies rank 0's buffers to every rank, such as BatchNorm's statistics, which ranks collect on their own."""
        for buffer in self._buffers.values():
            dist.broadcast(buffer.data, src=0, group=self._group)

    def kept_buffers(self) -> dict[str, Tensor]:
        """Returns copies of the buffers."""
        return {name: buffer.clone() for name, buffer in self._buffers.items()}

    def restore_buffers(self, kept: dict[str, Tensor]) -> None:
        for name, buffer in self._buffers.items():
            buffer.data.copy_(kept[name])

    def fingerprint(self) -> int:
        """Returns a checksum of the weights; any single change changes it."""
        own = int(self.flat.data.view(torch.int32).sum(dtype=torch.int64))
        return own if self._replicas is None else own + self._replicas.fingerprint()

    # -- a step ------------------------------------------------------------------------------------------------------

    def backward(self, loss: Tensor, *, counted: bool = True) -> None:
        """Runs `loss.backward()` for a step's last loss; gradients of earlier `backward()` calls are included in the
        sum. counted: False if `gradients_made` will be called, for gradients that autograd does not write."""
        if self._reduced is not None:  # from a step that was skipped
            self.all_reduce()
            self.zero_gradient()
        if self.clock is not None:
            self.clock.begin("dense_bwd")
        self._loss, self._all_made = loss.detach(), False
        self._missing = len(self._trained) if counted else -1
        try:
            loss.backward()
        finally:
            self._missing = -1

    def gradients_made(self) -> None:
        """Starts the all-reduce once all gradients of the step exist; replicas' come when their lookup's backward has
        run."""
        self._all_made = True
        self._start_if_complete()

    def _start_if_complete(self) -> None:
        if not self._all_made or (self._replicas is not None and self._replicas.outstanding):
            return
        if self.overlap and (self.clock is None or not self.clock.sampled):
            self.start_all_reduce(self._loss)

    def step(self, lr_scale: float | None = None) -> None:
        """Waits for the gradients' sum and updates the weights. lr_scale: factor on the first learning rate."""
        clock = self.clock
        if clock is not None:
            clock.barrier("grad_allreduce")
        with nullcontext() if clock is None else clock.stage("grad_allreduce"):
            self._wait_for_sum()
        with nullcontext() if clock is None else clock.stage("dense_optim"):
            self._update_replicas()
            self.update(lr_scale)

    def all_reduce(self) -> None:
        """Leaves all ranks' sum in the parameters' gradients: the first half of `step`, for an optimizer of your
        own."""
        self._wait_for_sum()
        self._update_replicas()

    def _wait_for_sum(self) -> None:
        (self._reduced or self.start_all_reduce(self._loss)).wait()
        self._reduced, self._loss, self._all_made = None, self._unknown, False

    def _update_replicas(self) -> None:
        if self._replicas is not None:
            self._replicas.update()

    def update(self, lr_scale: float | None = None) -> None:
        """Updates this rank's weights and clears the gradients."""
        group = self.optimizer.param_groups[0]
        if lr_scale is not None:
            group["lr"] = group["initial_lr"] * lr_scale
        self.flat.grad = self._own_gradient
        if self._max_norm is not None:  # the same factor on all ranks, as the sum is the same
            nn.utils.clip_grad_norm_([self.flat], self._max_norm)
        self.optimizer.step()
        self.zero_gradient()
        stop = self._stop.read_late(self.gradient[-2:-1])
        self.stop_agreed = self.stop_agreed if stop is None else stop

    def zero_gradient(self) -> None:
        self._own_gradient.zero_()  # keeps the last step's loss, which can be read until the next

    def start_all_reduce(self, local_loss: Tensor) -> Pending:
        """Starts summing, or averaging, gradients and loss over ranks."""
        for parameter, view in self._trained:
            if parameter.grad is not view:  # `zero_grad()` of a module or an optimizer sets None
                view.zero_() if parameter.grad is None else view.copy_(parameter.grad)
                parameter.grad = view
        self.gradient[-2:-1] = float(self.stop_asked)  # fills a slice; setting an element would copy and wait
        self.gradient[-1] = local_loss
        if self._divisor > 1:  # replicas' gradients are averaged by their lookups
            self._own_gradient /= self._divisor
            self.gradient[-2:] /= self._divisor
        self._reduced = self._sum(self.gradient)
        return self._reduced

    def _not_too_late(self) -> None:
        if self._reduced is not None:
            raise UserError(
                "a gradient arrived after the sum over ranks had begun. In a step with several losses call backward() "
                "on all others first, then `dense.backward(last)`; activation checkpoints need use_reentrant=False."
            )

    def _made(self) -> None:
        """Counts a gradient of the backward pass."""
        self._not_too_late()
        self._missing -= 1
        if self._missing == 0:
            self.gradients_made()

    @property
    def global_loss(self) -> Tensor:
        """Loss of the last all-reduced step: the mean over the global batch; NaN without `dense.backward`."""
        return self.gradient[-1]

    def named_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yields live views of everything a checkpoint needs, under names that depend on the model alone."""
        for name in self._views:
            yield f"dense.{name}", self._view(self.flat.data, name)
        yield from self.untrained()
        for state, value in self.optimizer.state[self.flat].items():
            if isinstance(value, Tensor) and value.dim() > 0:
                for name in self._views:
                    yield f"dense_optimizer.{name}.{state}", self._view(value, name)

    def untrained(self) -> Iterator[tuple[str, Tensor]]:
        """Yields those that no optimizer updates: frozen parameters and buffers."""
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
    """Makes tensors contiguous, because checkpoints are read straight into them."""
    for tensor in tensors.values():
        tensor.data = tensor.data.contiguous()
    return tensors


def make_optimizer(flat: nn.Parameter, config: DenseOptimizerConfig) -> torch.optim.Optimizer:
    """Makes SGD, Adagrad or Adam for the flat vector and allocates its state at once, so that checkpoints of all steps
    have the same keys. On CPU uses torch's fused versions, which pass over memory once."""
    fused = True if flat.device.type == "cpu" else None  # None: torch's choice; it has no fused Adagrad on GPUs
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
