#!/usr/bin/env bash
# Several machines. Run the same line on each, with the same code, data and a shared folder for runs:
#   NNODES=2 RANKS_PER_NODE=4 HEAD=node0:29400 bash launch/multi_node.sh configs/criteo_kaggle.yaml run.dir=/shared/runs
# HEAD is a machine of the job and a free port there, where machines meet, in any order. A machine that is replaced, or
# added later (NNODES=1:4), runs the same line, and the job continues from its newest checkpoint.
#   JOB_ID   the job's name, the same on all machines: with it the job continues even after all of them were lost.
#            Without it a job lasts as long as one of its torchrun processes, and a later start is a new job.
set -euo pipefail
usage="usage: NNODES=n RANKS_PER_NODE=n HEAD=host:port multi_node.sh CONFIG [section.key=value ...]"
config=${1:?$usage}
shift

# From the active environment, or the quickstart's.
torchrun=$(command -v torchrun || echo "${DLRM_VENV:-$(dirname "$0")/../.venv}/bin/torchrun")
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 # else torch 2.13 sends late machines to a store that is gone
# With several networks, name the one that the machines share: export GLOO_SOCKET_IFNAME=eth0 (NCCL_SOCKET_IFNAME too).
exec "$torchrun" \
    --nnodes="${NNODES:?$usage}" --nproc_per_node="${RANKS_PER_NODE:?$usage}" \
    --rdzv_backend=c10d --rdzv_endpoint="${HEAD:?$usage}" --rdzv_id="${JOB_ID:-none}" \
    --max_restarts="${MAX_RESTARTS:-3}" \
    -m dlrm_autoshard.commands.rank --config "$config" "$@"
