"""The data-parallel dense part as one flat vector: one all-reduce, one optimizer update, whatever the number of layers.

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
    """Owns the dense parameters' memory, their gradients and their optimizer. `module` has the same layers on all
    ranks, and each backward pass reaches the same of them.

    Parameters become views of `flat`, gradients views of `gradient`. The last two elements of `gradient` carry the wish
    to stop and the step's loss, so that the all-reduce that every step has anyway tells all ranks both. Parameters that
    are frozen (`requires_grad=False`) stay where they are.
    """

    overlap = True
    """False: the all-reduce starts in `step`."""

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
        """optimizer: a class of torch's that treats each number alone (SGD, Adagrad, Adam, AdamW), with its `options`;
        rank 0's weights become all ranks'. A config is the trainer's, which sees to that itself. group: default:
        torch.distributed's. device: default: the parameters'. clock: times the all-reduce and the update in sampled
        steps (`bags.clock`).

        average: the loss is the mean over this rank's samples, and gradients are averaged over ranks, as by DDP; False:
        it is this rank's share of the mean over all samples, and they are summed. shared_memory: reduce through it
        within a host. max_gradient_norm: a longer gradient, of all weights, is scaled to it.
        replicas: `bags.replicas`, tables of which every rank has a copy: their gradients travel with the dense ones.
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
        self.stop_asked = False  # set it where this rank wants the job to end
        self.stop_agreed = False  # after a step: whether any rank wanted it; on all ranks alike
        self._stop = LateFlag()
        self._views: dict[str, tuple[int, torch.Size]] = {}
        self._trained: list[tuple[nn.Parameter, Tensor]] = []  # and the view that is its gradient
        made = weakref.WeakMethod(self._made)  # parameters hold their hooks where Python's collector does not see them
        start = 0
        for name, parameter in trained.items():
            self._views[name] = (start, parameter.shape)
            end = start + parameter.numel()
            parameter.data = self.flat.data[start:end].view(parameter.shape)
            parameter.grad = self.gradient[start:end].view(parameter.shape)
            self._trained.append((parameter, parameter.grad))
            parameter.register_post_accumulate_grad_hook(lambda _: (own := made()) and own())
            start = end
        self._all_made = False  # of those that autograd makes of the parameters
        self._missing = 0  # gradients of the backward pass whose last one starts the all-reduce
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
        """UserError, on all ranks, where they have other parameters: gradients are summed by place."""
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
            raise UserError(f"parameter '{half}' is no float32: train it in float32, and its products under autocast.")

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
        own = int(self.flat.data.view(torch.int32).sum(dtype=torch.int64))
        return own if self._replicas is None else own + self._replicas.fingerprint()

    # -- a step ------------------------------------------------------------------------------------------------------

    def backward(self, loss: Tensor, *, counted: bool = True) -> None:
        """`loss.backward()` of a step's last loss. Gradients of others, whose `backward()` was called before, are in
        the sum. counted: False where `gradients_made` is called, for gradients that no autograd node writes."""
        if self._reduced is not None:  # of a step that was left out
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
        """All gradients of this step are there, but for the replicas' where their lookup was waited for before."""
        self._all_made = True
        self._start_if_complete()

    def _start_if_complete(self) -> None:
        if not self._all_made or (self._replicas is not None and self._replicas.outstanding):
            return
        if self.overlap and (self.clock is None or not self.clock.sampled):
            self.start_all_reduce(self._loss)

    def step(self, lr_scale: float | None = None) -> None:
        """Waits for all ranks' gradients and updates the weights. lr_scale: of the first learning rate."""
        clock = self.clock
        if clock is not None:
            clock.barrier("grad_allreduce")
        with nullcontext() if clock is None else clock.stage("grad_allreduce"):
            self._wait_for_sum()
        with nullcontext() if clock is None else clock.stage("dense_optim"):
            self._update_replicas()
            self.update(lr_scale)

    def all_reduce(self) -> None:
        """Parameters' gradients are all ranks' afterwards: the first half of `step`, for an optimizer of your own."""
        self._wait_for_sum()
        self._update_replicas()

    def _wait_for_sum(self) -> None:
        (self._reduced or self.start_all_reduce(self._loss)).wait()
        self._reduced, self._loss, self._all_made = None, self._unknown, False

    def _update_replicas(self) -> None:
        if self._replicas is not None:
            self._replicas.update()

    def update(self, lr_scale: float | None = None) -> None:
        """Updates the weights of this rank, and clears the gradients."""
        group = self.optimizer.param_groups[0]
        if lr_scale is not None:
            group["lr"] = group["initial_lr"] * lr_scale
        self.flat.grad = self._own_gradient
        if self._max_norm is not None:  # on all ranks by the same factor, of the same sum
            nn.utils.clip_grad_norm_([self.flat], self._max_norm)
        self.optimizer.step()
        self.zero_gradient()
        stop = self._stop.read_late(self.gradient[-2:-1])
        self.stop_agreed = self.stop_agreed if stop is None else stop

    def zero_gradient(self) -> None:
        self._own_gradient.zero_()  # the last step's loss can be asked for until there is another

    def start_all_reduce(self, local_loss: Tensor) -> Pending:
        """Sums, or averages, gradients and loss over ranks."""
        for parameter, view in self._trained:
            if parameter.grad is not view:  # `zero_grad()` of a module or an optimizer puts None there
                view.zero_() if parameter.grad is None else view.copy_(parameter.grad)
                parameter.grad = view
        self.gradient[-2:-1] = float(self.stop_asked)  # a slice is filled; one element would be copied, which waits
        self.gradient[-1] = local_loss
        if self._divisor > 1:  # the replicas' are as their lookups average them
            self._own_gradient /= self._divisor
            self.gradient[-2:] /= self._divisor
        self._reduced = self._sum(self.gradient)
        return self._reduced

    def _not_too_late(self) -> None:
        if self._reduced is not None:
            raise UserError(
                "a gradient came after their sum over ranks had begun. Of a step with several losses call backward() "
                "of all others first, then `dense.backward(last)`; activation checkpoints need use_reentrant=False."
            )

    def _made(self) -> None:
        """A gradient of a backward pass."""
        self._not_too_late()
        self._missing -= 1
        if self._missing == 0:
            self.gradients_made()

    @property
    def global_loss(self) -> Tensor:
        """Loss of the last all-reduced step: the mean over the global batch; NaN where `backward` was not told it."""
        return self.gradient[-1]

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
