"""Trains a DLRM from a YAML file on ranks that you start yourself. `dlrm-autoshard train` starts them for you.

OMP_NUM_THREADS=1 torchrun --nproc_per_node=2 launch/train.py --config configs/movielens.yaml [section.key=value ...]
"""

import sys

from dlrm_autoshard.commands.rank import main

if __name__ == "__main__":
    sys.exit(main())
