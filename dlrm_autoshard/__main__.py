"""Runs `python -m dlrm_autoshard ...` as the console script."""

import sys

from dlrm_autoshard.commands.main import main

if __name__ == "__main__":
    sys.exit(main())
