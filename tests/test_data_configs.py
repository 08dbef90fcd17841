"""The configs that come with the package: each loads, and its data opens where it needs no download."""

from __future__ import annotations

from pathlib import Path

import pytest

from dlrm_autoshard.config import load_config
from dlrm_autoshard.data.loader import Loader
from dlrm_autoshard.data.open import open_source
from dlrm_autoshard.data.sources.criteo.sample import MULTI_HOT_SIZES, write_sample_layout

CONFIGS = Path(__file__).parents[1] / "configs"
NAMES = [
    "movielens", "movielens_sequence", "debug_cpu", "demo", "synthetic_skewed", "criteo_kaggle", "mlperf_dcnv2",
    "parquet",
]  # fmt: skip


def test_these_are_all() -> None:
    assert sorted(path.stem for path in CONFIGS.glob("*.yaml")) == sorted(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_a_config_loads_and_says_how_to_run_it(name: str) -> None:
    path = CONFIGS / f"{name}.yaml"
    config = load_config(path)
    assert config.run.name == name
    assert f"dlrm-autoshard train {name}" in path.read_text()
    if config.model.interaction == "dot":
        assert config.model.dense_arch_layer_sizes[-1] == config.tables.embedding_dim


@pytest.mark.parametrize("name", ["debug_cpu", "demo", "synthetic_skewed"])
def test_synthetic_configs_open(name: str) -> None:
    config = load_config(CONFIGS / f"{name}.yaml")
    source = open_source(config.data, config.tables)
    batch = next(iter(Loader(source, "train", 0, config.train.batch_size, 1, 2)))
    assert batch.size == config.train.batch_size


@pytest.mark.parametrize("name", ["criteo_kaggle", "mlperf_dcnv2"])
def test_criteo_configs_open_on_a_made_up_log_and_shrink(name: str, tmp_path: Path) -> None:
    write_sample_layout(tmp_path / "npy", [300, 100])
    overrides = [f"data.dir={tmp_path / 'npy'}", "data.row_scale=0.0005"]
    config = load_config(CONFIGS / f"{name}.yaml", overrides)
    source = open_source(config.data, config.tables)
    assert sum(batch.size for batch in Loader(source, "train", 0, 64, 0, 1)) == 300
    if name == "mlperf_dcnv2":
        assert sum(table.num_embeddings for table in source.tables) < 200_000
        assert next(iter(Loader(source, "train", 0, 1, 0, 1))).lengths_TB[:, 0].tolist() == list(MULTI_HOT_SIZES)


def test_mlperf_has_its_true_sizes() -> None:
    config = load_config(CONFIGS / "mlperf_dcnv2.yaml")
    assert config.data.source == "criteo" and config.data.num_embeddings is not None
    assert sum(config.data.num_embeddings) == 204_184_588
    assert config.tables.embedding_dim == 128
