"""Learning rate over steps, tables and dense part alike: linear warm-up, constant, polynomial decay (MLPerf DLRM)."""

from __future__ import annotations

from dlrm_autoshard.config import ScheduleConfig


def lr_scale(step: int, config: ScheduleConfig) -> float:
    """Factor on the configured learning rate at `step`, counted from 0."""
    if step < config.warmup_steps:
        return (step + 1) / config.warmup_steps
    if config.decay_steps == 0 or step < config.decay_start_step:
        return 1.0
    done = min((step - config.decay_start_step) / config.decay_steps, 1.0)
    return config.end_lr_ratio + (1.0 - config.end_lr_ratio) * (1.0 - done) ** config.decay_power
