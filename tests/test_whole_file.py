"""A file that could not be written is what it was before."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from dlrm_autoshard import ShardingPlan
from dlrm_autoshard.formats.whole_file import write_whole


def test_a_full_disk_leaves_what_was_there_and_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, plan = tmp_path / "plan" / "step_1.json", ShardingPlan({"a": 0}, 1)
    write_whole(path, plan.as_text())

    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        write_whole(path, ShardingPlan({"a": 1}, 2).as_text())
    assert ShardingPlan.load(path) == plan and os.listdir(path.parent) == [path.name]


def test_a_link_in_its_place_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").write_text("kept")
    (tmp_path / "file").symlink_to(tmp_path / "elsewhere")
    write_whole(tmp_path / "file", "new")
    assert (tmp_path / "elsewhere").read_text() == "kept" and (tmp_path / "file").read_text() == "new"


def test_a_link_in_the_place_of_the_file_or_its_draft_is_replaced_and_not_followed(tmp_path: Path) -> None:
    precious = tmp_path / "precious"
    precious.write_text("mine")
    for name in ("page.html", ".page.html.new"):
        (tmp_path / name).symlink_to(precious)
    write_whole(tmp_path / "page.html", "drawn")
    assert precious.read_text() == "mine" and (tmp_path / "page.html").read_text() == "drawn"
    assert not (tmp_path / "page.html").is_symlink() and not (tmp_path / ".page.html.new").exists()
