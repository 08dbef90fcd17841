"""Makes the picture in the README: the first screen of a run's report.

dlrm-autoshard train demo --ranks 2 && python -m tests.report_picture runs/demo      # writes tests/report.png
"""

import sys
import tempfile
from pathlib import Path

from tests.chromium import take_screenshot

PICTURE = Path(__file__).with_name("report.png")

if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as scratch:
        take_screenshot(Path(sys.argv[1]) / "report.html", PICTURE, Path(scratch), width=1000, height=1380)
