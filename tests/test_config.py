"""The YAML file: what is right is read as people mean it, what is wrong is an error with key, value and remedy."""

import re
from pathlib import Path

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from dlrm_autoshard.config import Config, ConfigError, load_config, parse_config
from dlrm_autoshard.config_data import SyntheticData
from dlrm_autoshard.config_errors import FOREIGN, all_keys

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


@pytest.mark.parametrize("seed", ["9" * 5000, "0x" + "f" * 5000, "-0b" + "1" * 20000, "1_0" * 3000])
def test_a_number_of_thousands_of_digits_is_a_sentence(seed: str, tmp_path: Path) -> None:
    said = complaint(tmp_path, f"run.seed={seed}"), complaint(tmp_path, text=f"data: {{source: movielens}}\na: {seed}")
    assert all("over 4,300 digits" in sentence and len(sentence) < 400 for sentence in said)


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
        ("train.accumulate=10000", "train.accumulate is 10000, more parts than a rank's batch has samples"),
        (
            "data.foo=1",
            "unknown key 'data.foo'. Section 'data' has on_bad_id, prefetch_batches, reader_threads, source, dir, "
            "split, history, seed.",
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
            "must be one of rowwise_adagrad, adagrad, sgd, adam, frozen. Did you mean 'adagrad'?",
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
        (
            "data=movielens",
            "'data' is 'movielens'; it is a section. Its key 'source' must be one of synthetic, movielens",
        ),
        ("data=source:movielens", "it is a section. A blank is missing after the colon: source: movielens"),
        ("train=[epochs: 3]", "it is a section. Its lines are 'key: value', without '- '."),
        ("checkpoint=false", "'checkpoint' is False; it is a section. Did you mean 'checkpoint.enabled'?"),
        ("train.batch_size='64'", "'train.batch_size' is '64'; it must be a whole number, without quotes."),
        ("train..epochs=3", "override 'train..epochs=3' is not of the form section.key=value."),
        ("train.epochs.more=1", "'train.epochs' is {'more': 1}; it must be a whole number."),
        ("train", "override 'train' is not of the form section.key=value."),
        ("train.epochs=[1", "override 'train.epochs=[1': '[1' is not YAML: line 1, column 3"),
    ],
)
def test_what_is_wrong_is_said_with_key_value_and_what_is_allowed(override: str, expected: str, tmp_path: Path) -> None:
    assert expected in complaint(tmp_path, override)


MADE_UP = {"data": {"source": "synthetic", "tables": [{"name": "a", "num_embeddings": 5}]}}


def test_an_override_reaches_into_a_list_by_the_name_that_complaints_use(tmp_path: Path) -> None:
    text = yaml.safe_dump(MADE_UP)
    data = load(tmp_path, text, "data.tables.0.num_embeddings=7").data
    assert isinstance(data, SyntheticData) and data.tables[0].num_embeddings == 7
    assert "'data.tables.0.num_embeddings' is 0" in complaint(tmp_path, "data.tables.0.num_embeddings=0", text=text)
    assert "there is no item '1'; items are 0 to 0" in complaint(tmp_path, "data.tables.1.name=b", text=text)


ELSEWHERE = """
model.pretrained train.pos_weight tables.row_wise autoshard.column_wise autoshard.data_parallel tables.weight_decay
data.tables.0.weight_decay train.gradient_accumulation train.fp8 train.early_stop_metric
model.activation model.batch_norm train.num_workers tables.sharding_type tables.dim tables.rows tables.trainable
train.steps train.evaluate train.save_dir train.loss_fn model.layers model.type model.hidden_size data.path data.target
train.amp train.l2 train.project train.verbose train.ema train.backend train.mixed_precision train.log_dir model.init
model.name data.train_path train.negative_sampling data.format train.compile tables.compute_kernel
"""


@pytest.mark.parametrize("key", ELSEWHERE.split())
def test_of_what_other_trainers_have_no_unrelated_key_is_suggested(key: str, tmp_path: Path) -> None:
    said = complaint(tmp_path, f"{key}=1", text=yaml.safe_dump(MADE_UP))
    assert f"unknown key '{key}'" in said and "Did you mean" not in said


def test_what_is_said_of_other_trainers_words_names_keys_that_are_there() -> None:
    keys = set(all_keys(Config))
    named = {key for said in FOREIGN.values() for key in re.findall(r"\b(?:[a-z_]+\.)+[a-z_]+", said)}
    assert named and named <= keys
    words = [word for words in FOREIGN for word in words.split()]
    assert len(set(words)) == len(words) and not keys & set(words)


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


@pytest.mark.parametrize(
    ("key", "given", "meant"),
    [
        ("run.dir", "file:///data/my%20runs", "/data/my runs"),
        ("run.dir", "file://localhost/data", "/data"),
        ("run.dir", "~/runs", str(Path.home() / "runs")),
        ("autoshard.cache_dir", "file:/costs", "/costs"),
        ("autoshard.placement", "round_robin", "round_robin"),
        ("run.dir", "C:/runs", "C:/runs"),
    ],
)
def test_a_path_is_taken_as_it_is_meant(key: str, given: str, meant: str) -> None:
    section, name = key.split(".")
    config = parse_config({"data": {"source": "movielens"}, section: {name: given}})
    assert getattr(getattr(config, section), name) == meant


@pytest.mark.parametrize("url", ["s3://bucket/runs", "gs://bucket/runs", "hdfs://name/runs", "file://other/runs"])
@pytest.mark.parametrize("key", ["run.dir", "autoshard.cache_dir", "autoshard.placement", "data.dir"])
def test_a_url_is_no_path(key: str, url: str) -> None:
    section, name = key.split(".")
    record = {"data": {"source": "movielens"}}
    record.setdefault(section, {})[name] = url
    with pytest.raises(ConfigError, match=rf"'{key}' is '{url}': (a URL, .*rclone mount|a file of the host 'other')"):
        parse_config(record)
