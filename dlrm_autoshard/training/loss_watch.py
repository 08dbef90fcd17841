"""Whether the loss is finite, after every step on CPU and seldom on GPUs; and the end of a job whose loss is not.

loss = watch.check(steps_done)       # both raise TrainError, on all ranks alike, where there is no going on
watch.left_out(steps_done)          # a batch that was left out because of its loss (train.on_nan: skip)
"""

from __future__ import annotations

import math

from dlrm_autoshard.distributed.ranks.runtime import Runtime
from dlrm_autoshard.distributed.step import TrainStep
from dlrm_autoshard.training.state import TrainError, TrainingState

_MOST_SKIPPED = 10  # losses in a row that are not finite; after so many it is the weights, and skipping can't help


class LossWatch:
    """Looks at losses: not finite, batches left out, replicas that drift apart."""

    def __init__(self, runtime: Runtime, step: TrainStep, state: TrainingState) -> None:
        self._runtime, self._step, self._state = runtime, step, state
        self._left_out = 0  # batches in a row

    def check(self, steps_done: int) -> float:
        """The last step's global loss, a finite one."""
        loss = float(self._step.dense.global_loss)
        if not math.isfinite(loss):
            self._stop(f"is {loss} at", steps_done)
        return loss

    def compare_replicas(self, steps_done: int) -> None:
        """TrainError where what all ranks have a copy of is not the same on all, bit by bit. A collective."""
        fingerprints = self._runtime.all_gather(self._step.dense.fingerprint())
        other = [rank for rank, fingerprint in enumerate(fingerprints) if fingerprint != fingerprints[0]]
        if other:
            copies = "" if self._step.bags.replicas is None else ", or copies of tables,"
            raise TrainError(
                f"the dense weights{copies} of rank(s) {', '.join(map(str, other))} are not those of rank 0 after step "
                f"{steps_done - 1}: a rank's memory or arithmetic is at fault, or the model's code changes them on one "
                f"rank only. {self._state.last_checkpoint(steps_done)}"
            )

    def updated(self) -> None:
        """The last step's batch was learned from."""
        self._left_out = 0

    def left_out(self, steps_done: int) -> None:
        """The last step's batch changed nothing, for its loss was not finite."""
        self._left_out += 1
        if self._left_out >= _MOST_SKIPPED:
            self._stop(f"has not been finite for {self._left_out} steps, up to", steps_done)

    def _stop(self, what: str, steps_done: int) -> None:
        bad = [r for r, fine in enumerate(self._runtime.all_gather(self._step.last_loss_finite)) if not fine]
        where = f"rank {bad[0]}" if bad else "no single rank (the sum overflowed)"
        failed = steps_done - 1
        # A checkpoint made just before the failed step has the very weights that failed.
        raise TrainError(f"the loss {what} step {failed}, from {where}. {self._state.last_good(failed)}")
