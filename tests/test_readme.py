"""The README's promises: files that are linked exist, its YAML loads, its scripts and configs are there."""

import re
from pathlib import Path

import pytest
import yaml

from dlrm_autoshard.config import parse_config

REPOSITORY = Path(__file__).parents[1]
README = (REPOSITORY / "README.md").read_text()


@pytest.mark.parametrize("target", sorted(set(re.findall(r"\]\(([^)#]+)\)", README))))
def test_links_lead_somewhere(target: str) -> None:
    assert target.startswith("http") or (REPOSITORY / target).exists()


@pytest.mark.parametrize("path", sorted(set(re.findall(r"(?:launch|configs)/[\w.]+", README))))
def test_scripts_and_configs_are_there(path: str) -> None:
    assert (REPOSITORY / path).exists()


@pytest.mark.parametrize("block", re.findall(r"```yaml\n(.*?)```", README, re.DOTALL))
def test_its_yaml_is_valid(block: str) -> None:
    record = {"data": {"source": "movielens"}, **yaml.safe_load(block)}
    assert parse_config(record).to_yaml()
