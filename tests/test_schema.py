"""SCHEMA.md: its example of tables.json is read, and it describes each key of result.json."""

import json
import re
from pathlib import Path

from dlrm_autoshard.plan import ShardingPlan
from dlrm_autoshard.planner.dreamshard.pool import TablePool
from dlrm_autoshard.records.run import RunRecord
from dlrm_autoshard.training.run_log import result_of

SCHEMA = (Path(__file__).parents[1] / "dlrm_autoshard" / "records" / "SCHEMA.md").read_text()


def section(title: str) -> str:
    return SCHEMA.split(f"\n## {title}\n")[1].split("\n## ")[0]


def test_its_tables_are_read_back_as_they_are_written(tmp_path: Path) -> None:
    (example,) = re.findall(r"```json\n(.*?)```", section("tables.json"), re.DOTALL)
    (tmp_path / "tables.json").write_text(example)
    assert TablePool.load(tmp_path / "tables.json").to_json() == json.loads(example)


def test_every_key_of_a_result_is_described() -> None:
    result = result_of(RunRecord("mine", {}, ()), ShardingPlan({"user": 0}, 1), {})
    described = set(re.findall(r"`(\w+)`", section("result.json")))
    assert set(result) - {"schema"} <= described
