"""The pages of this repository, by path, and the blocks of code on them."""

from __future__ import annotations

import re
from pathlib import Path

REPOSITORY = Path(__file__).parents[1]
PAGES = {
    path.relative_to(REPOSITORY).as_posix(): path.read_text()
    for folder in (".", "launch", "configs", "dlrm_autoshard")
    for path in sorted((REPOSITORY / folder).glob("*.md" if folder == "." else "**/*.md"))
}


def blocks(page: str, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", PAGES[page], re.DOTALL)
