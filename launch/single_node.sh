#!/usr/bin/env bash
# One machine, N ranks:  bash launch/single_node.sh 4 configs/synthetic_skewed.yaml [section.key=value ...]
# A rank that dies ends the job; torchrun starts it again from the last checkpoint, up to MAX_RESTARTS times.
# JOB_ID names the job: a later start with the same name continues its run. Without it, each start is a new job.
set -euo pipefail
ranks=${1:?how many ranks? usage: single_node.sh RANKS CONFIG [section.key=value ...]}
config=${2:?which config? usage: single_node.sh RANKS CONFIG [section.key=value ...]}
shift 2

# From the active environment, or the quickstart's.
torchrun=$(command -v torchrun || echo "${DLRM_VENV:-$(dirname "$0")/../.venv}/bin/torchrun")
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} # one thread per rank: with more, fbgemm's CPU backward becomes erratic
exec "$torchrun" --rdzv_backend=c10d --rdzv_endpoint=localhost:0 --rdzv_id="${JOB_ID:-$(cat /proc/sys/kernel/random/uuid)}" \
    --nnodes=1 --nproc_per_node="$ranks" --max_restarts="${MAX_RESTARTS:-3}" \
    -m dlrm_autoshard.commands.rank --config "$config" "$@"
