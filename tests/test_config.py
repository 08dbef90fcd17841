"""The YAML file: what is right is read as people mean it, what is wrong is an error with key, value and remedy."""

from pathlib import Path

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from dlrm_autoshard.config import Config, ConfigError, load_config, parse_config

CONFIGS = sorted(Path(__file__).parents[1].glob("configs/*.yaml"))


def load(tmp_path: Path, text: str, *overrides: str) -> Config:
    path = tmp_path / "config.yaml"
    path.write_text(text)
    return load_config(path, overrides)


def complaint(tmp_path: Path, *overrides: str, text: str = "data: {source: movielens}\n") -> str:
    with pytest.raises(ConfigError) as caught:
        load(tmp_path, text, *overrides)
    return str(caught.value)


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.name)
def test_the_configs_that_come_along_are_valid(path: Path) -> None:
    config = load_config(path)
    assert parse_config(yaml.safe_load(config.to_yaml())) == config


def test_every_config_that_people_were_promised_is_there() -> None:
    promised = {"movielens", "debug_cpu", "synthetic_skewed", "criteo_kaggle", "mlperf_dcnv2"}
    assert promised <= {path.stem for path in CONFIGS}


def test_a_mapping_may_be_merged_into_another(tmp_path: Path) -> None:
    text = "data: {source: movielens}\ncallbacks: []\ntrain: {<<: &few {epochs: 2, batch_size: 8}, epochs: 3}\n"
    config = load(tmp_path, text)
    assert (config.train.epochs, config.train.batch_size) == (3, 8)


@pytest.mark.parametrize("text", ["1e-3", "1E-3", "1.0e-3", "0.001", "+1e-3", ".1e-2"])
def test_every_way_to_write_a_thousandth_is_that_number(text: str, tmp_path: Path) -> None:
    file = f"data: {{source: movielens}}\ntables:\n  optimizer:\n    lr: {text}\n"
    assert load(tmp_path, file).tables.optimizer.lr == 0.001
    assert load(tmp_path, "data: {source: movielens}\n", f"tables.optimizer.lr={text}").tables.optimizer.lr == 0.001


@settings(deadline=None)
@given(st.floats(min_value=1e-12, max_value=1e12))
def test_a_number_survives_the_saved_yaml(lr: float) -> None:
    config = parse_config({"data": {"source": "movielens"}, "tables": {"optimizer": {"lr": lr}}})
    assert parse_config(yaml.safe_load(config.to_yaml())) == config


def test_overrides_replace_the_files_values_and_reach_sections_that_it_lacks(tmp_path: Path) -> None:
    text = "data: {source: movielens}\ntrain:\n  epochs: 2\nmodel:\n"
    config = load(tmp_path, text, "train.epochs=5", "autoshard.reshard.min_gain=0.1", "model.interaction=cat")
    assert (config.train.epochs, config.autoshard.reshard.min_gain, config.model.interaction) == (5, 0.1, "cat")
    assert load(tmp_path, text, "tables.embedding_dims={user: 32}").tables.embedding_dims == {"user": 32}


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("train.batchsize=3", "unknown key 'train.batchsize'. Did you mean 'train.batch_size'?"),
        ("batch_size=3", "unknown key 'batch_size'. Did you mean 'train.batch_size'?"),
        ("model.embedding_dim=8", "unknown key 'model.embedding_dim'. Did you mean 'tables.embedding_dim'?"),
        (
            "data.foo=1",
            "unknown key 'data.foo'. Section 'data' has on_bad_id, prefetch_batches, reader_threads, source, dir, "
            "split, seed.",
        ),
        ("train.batch_size=many", "'train.batch_size' is 'many'; it must be a whole number."),
        ("train.batch_size=0", "'train.batch_size' is 0; it must be more than 0."),
        ("train.batch_size=1.5", "'train.batch_size' is 1.5; it must be a whole number."),
        ("train.epochs=", "'train.epochs' is empty; it must be a whole number."),
        ("tables.optimizer.lr=.inf", "'tables.optimizer.lr' is inf; it must be a finite number."),
        ("tables.optimizer.lr=-1", "'tables.optimizer.lr' is -1; it must be more than 0."),
        (
            "tables.optimizer=sgd",
            "'tables.optimizer' is 'sgd'; it is a section. Section 'tables.optimizer' has name, lr",
        ),
        (
            "tables.optimizer.name=adagard",
            "must be one of rowwise_adagrad, adagrad, sgd, adam. Did you mean 'adagrad'?",
        ),
        ("tables.embedding_dim=10", "tables.embedding_dim is 10; fbgemm needs a multiple of 4 (try 12)."),
        ("tables.embedding_dims.user=7", "tables.embedding_dims.user is 7; fbgemm needs a multiple of 4 (try 8)."),
        ("model.over_arch_layer_sizes=[8]", "model.over_arch_layer_sizes must end in 1"),
        ("model.over_arch_layer_sizes=[]", "'model.over_arch_layer_sizes' is []; it must be a list of at least 1."),
        ("run.pin_cores=maybe", "'run.pin_cores' is 'maybe'; it must be true or false."),
        ("run.name=3", "'run.name' is 3; it must be text (in quotes, if it looks like a number)."),
        ("autoshard.memory_gib=lots", "'autoshard.memory_gib' is 'lots'; it must be a number."),
        ("autoshard.memory_gib=[1, -2]", "'autoshard.memory_gib.1' is -2; it must be more than 0."),
        ("autoshard.splits.min_dim=6", "autoshard.splits.min_dim is 6; fbgemm needs a multiple of 4 (try 8)."),
        ("autoshard.splits.max_parts=0", "'autoshard.splits.max_parts' is 0; it must be more than 0."),
        ("autoshard.together=a", "'autoshard.together' is 'a'; it must be a list, such as [a, b]."),
        (
            "data.source=criteoo",
            "it must be one of synthetic, movielens, criteo, dlrm_datasets, parquet, custom. Did you mean 'criteo'?",
        ),
        ("train", "override 'train' is not of the form section.key=value."),
        ("train.epochs=[1", "override 'train.epochs=[1': '[1' is not YAML: line 1, column 3"),
    ],
)
def test_what_is_wrong_is_said_with_key_value_and_what_is_allowed(override: str, expected: str, tmp_path: Path) -> None:
    assert expected in complaint(tmp_path, override)


def test_all_wrong_keys_are_named_at_once(tmp_path: Path) -> None:
    said = complaint(tmp_path, "train.eopchs=3", "train.batch_size=0", "trian.epochs=3")
    assert said.count("\n") == 2
    assert "'train.epochs'?" in said and "'train.batch_size' is 0" in said and "Did you mean 'train'?" in said


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", "has no sections; it needs at least 'data:'"),
        ("- a\n", "has no sections"),
        ("train: {epochs: 1}\n", "'data' is missing."),
        ("data: {split: time}\n", "'data.source' is missing; it must be one of synthetic"),
        ("data: {source: criteo}\n", "'data.dir' is missing."),
        ("data: {source: movielens\ntrain: 1", "is not YAML: line 2"),
        (
            "data: {source: movielens}\ntrain: {epochs: 1}\ntrain: {epochs: 2}\n",
            "line 3, column 1: key 'train' is there twice",
        ),
    ],
)
def test_a_file_that_is_no_config_is_named_with_the_place(text: str, expected: str, tmp_path: Path) -> None:
    said = complaint(tmp_path, text=text)
    assert expected in said and str(tmp_path / "config.yaml") in said


def test_a_file_that_is_not_there_or_not_text_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nowhere.yaml' cannot be read: No such file"):
        load_config(tmp_path / "nowhere.yaml")
    (tmp_path / "binary.yaml").write_bytes(b"\xff\x00")
    with pytest.raises(ConfigError, match=r"binary.yaml' is not text: byte 0"):
        load_config(tmp_path / "binary.yaml")
