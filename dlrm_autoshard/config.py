"""The YAML file as typed sections; errors name the key and what is allowed.

    config = load_config(Path("configs/movielens.yaml"), ["train.epochs=3"])

`Config` at the bottom lists the sections in the order of a YAML file.
"""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

import pydantic
import yaml
from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from dlrm_autoshard.config_data import DataConfig, EmbeddingDim
from dlrm_autoshard.config_errors import sentences
from dlrm_autoshard.errors import UserError
from dlrm_autoshard.formats.json_file import FormatError
from dlrm_autoshard.formats.local_path import LocalPath
from dlrm_autoshard.formats.section import Section
from dlrm_autoshard.formats.sentences import show
from dlrm_autoshard.formats.yaml_file import parse_yaml, read_yaml
from dlrm_autoshard.optimizers import OptimizerChanges
from dlrm_autoshard.optimizers import TableOptimizerConfig as TableOptimizerConfig
from dlrm_autoshard.tables import Pooling, TableDtype, TableInit

Algorithm = Literal[
    "auto", "dreamshard", "autoshard", "rnn", "search",
    "random", "size_greedy", "dim_greedy", "lookup_greedy", "size_lookup_greedy",
]  # fmt: skip


_IN_A_WHEEL = Path(__file__).parent / "configs"
SHIPPED = _IN_A_WHEEL if _IN_A_WHEEL.is_dir() else Path(__file__).parents[1] / "configs"
"""The folder of the shipped configs."""

ChoiceMetric = Literal["auc", "logloss", "ne"]  # on the val split; higher auc is better, lower logloss and ne


class ConfigError(UserError):
    """The config cannot be used; the message names the key and what is allowed."""


class RunConfig(Section):
    """Name, directory and device of a run."""

    name: str = "run"  # the run directory is <dir>/<name>
    dir: LocalPath = "runs"  # the folder of runs, on a disk that all machines share
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0  # of initial weights
    device: Literal["auto", "cpu", "cuda"] = "auto"  # auto: GPUs if there are any
    threads_per_rank: PositiveInt = 1  # on CPU more than one makes fbgemm's backward erratic
    pin_cores: bool = True  # bind each rank to cores that no other job uses, if there are enough
    collective_timeout_seconds: PositiveFloat = (
        300.0  # a rank that others wait for longer is reported, and the job ends
    )
    log_level: Literal["debug", "info", "warning", "error"] = "info"  # of terminal messages

    @pydantic.field_validator("name")
    @classmethod
    def _name_is_one_folders(cls, name: str) -> str:
        """Refuses a name that is not a single folder in run.dir."""
        if name == "latest" or name[:1] in ("", ".") or "/" in name or not name.isprintable() or len(name) > 200:
            raise ValueError(
                f"'run.name' is {name!r}; it must be the name of one folder in run.dir, without '/' and no '.' at its "
                "start, and not 'latest', which points at the newest run"
            )
        return name


class SequenceConfig(Section):
    """A feature whose vectors are not pooled: the model gets one vector per id."""

    max_length: Annotated[int, Field(gt=0, le=10**5)]  # of a sample's ids; longer lists are cut
    keep: Literal["newest", "oldest"] = "newest"  # the last ids of a list, or the first


class TableSettings(Section):
    """Settings of one table; others are those of `tables`."""

    dim: EmbeddingDim | None = None  # all of these stand under the table's name: per_table: {item: {dim: 64}}
    pooling: Pooling | None = None
    dtype: TableDtype | None = None
    optimizer: OptimizerChanges | None = None  # keys that differ from tables.optimizer
    lr: PositiveFloat | None = None  # short for optimizer.lr; schedules scale it like all rates
    frozen: bool = False  # the table is never updated
    init: TableInit | None = None  # its initial values


class TablesConfig(Section):
    """Shapes of the tables, pooling and optimizer."""

    embedding_dim: EmbeddingDim = 16  # of tables whose dim the data source does not set
    embedding_dims: dict[str, EmbeddingDim] = {}  # table -> dim, if it differs
    shared: dict[str, list[str]] = {}  # table -> features that look it up; other features have a table of their name
    sequences: dict[str, SequenceConfig] = {}  # features that are not pooled, for a model.factory that takes them
    rows_once: Literal["auto"] | bool = "auto"  # send each distinct row of a rank's sequence once per batch
    # Tables whose pooled features send each distinct id of a rank's batch once; one id per bag, on CPU. For slow links.
    # auto: tables whose ids repeat, if the start measures that exchanges between hosts get faster.
    dedup: Literal["auto", "none"] | list[str] = "none"
    pooling: Pooling = "sum"
    poolings: dict[str, Pooling] = {}  # table -> pooling, if it differs
    dtype: TableDtype = "fp32"
    # Tables copied to every rank: names, or auto: those for which that sends fewer bytes.
    replicate: Literal["auto", "none"] | list[str] = "none"
    optimizer: TableOptimizerConfig = TableOptimizerConfig()
    per_table: dict[str, TableSettings] = {}  # table -> its own settings
    location: Literal["device", "managed_caching"] = "device"  # managed_caching: CUDA, tables larger than the device
    cache_load_factor: Annotated[float, Field(gt=0, le=1)] = (
        0.2  # managed_caching: fraction of rows cached on the device
    )

    @pydantic.model_validator(mode="after")
    def _tables_agree(self) -> TablesConfig:
        for table, own in self.per_table.items():
            key = f"tables.per_table.{table}"
            self.optimizer_of(table)
            if own.frozen and (own.optimizer is not None or own.lr is not None):
                what = "lr" if own.optimizer is None else "optimizer"
                raise ValueError(f"{key} is frozen, but has {key}.{what}: leave one of them out")
            if own.lr is not None and own.optimizer is not None and own.optimizer.lr is not None:
                raise ValueError(f"{key} has lr and optimizer.lr: leave one out")
            for one, other, values in (
                ("dim", "embedding_dims", self.embedding_dims),
                ("pooling", "poolings", self.poolings),
            ):
                if getattr(own, one) is not None and table in values:
                    raise ValueError(f"{key}.{one} and tables.{other}.{table} set the same: leave one out")
        return self

    def settings_of(self, table: str) -> TableSettings:
        """Returns a table's own settings, from whichever keys set them."""
        own = self.per_table.get(table, TableSettings())
        dim, pooling = self.embedding_dims.get(table, own.dim), self.poolings.get(table, own.pooling)
        return own.model_copy(update={"dim": dim, "pooling": pooling})

    def optimizer_of(self, table: str) -> TableOptimizerConfig | None:
        """Returns the table's own optimizer; None if it has the common one."""
        own = self.settings_of(table)
        if own.frozen:
            return TableOptimizerConfig(name="frozen")
        changes = {} if own.optimizer is None else own.optimizer.model_dump(exclude_none=True)
        changes |= {} if own.lr is None else {"lr": own.lr}
        optimizer = TableOptimizerConfig.model_validate({**self.optimizer.model_dump(), **changes})
        return None if optimizer == self.optimizer else optimizer


class ModelConfig(Section):
    """The dense part."""

    # Bottom MLP; for dot the last size is the dim of all vectors.
    dense_arch_layer_sizes: list[PositiveInt] = Field(default=[64, 16], min_length=1)
    over_arch_layer_sizes: list[PositiveInt] = Field(default=[64, 1], min_length=1)  # top MLP; the last is 1, the logit
    interaction: Literal["dot", "cat", "dcn"] = "dot"  # dcn: low-rank cross network
    dcn_num_layers: PositiveInt = 3  # layers of dcn
    dcn_low_rank_dim: PositiveInt = 512  # rank of dcn's weights
    # Replaces all of the above: file.py:name or package.module:name, a DenseArch from (num_dense, tables, **options).
    factory: str | None = None
    options: dict[str, Any] = {}


class DenseOptimizerConfig(Section):
    """Optimizer of the dense part."""

    name: Literal["sgd", "adagrad", "adam"] = "adagrad"
    lr: PositiveFloat = 0.02
    eps: NonNegativeFloat = 1e-8
    weight_decay: NonNegativeFloat = 0.0
    momentum: Annotated[float, Field(ge=0, lt=1)] = 0.0  # sgd's
    max_gradient_norm: PositiveFloat | None = None  # of all dense weights; longer gradients are scaled down to it


class ScheduleConfig(Section):
    """Learning rate of tables and dense part: linear warm-up, constant, polynomial decay (as in MLPerf DLRM)."""

    warmup_steps: NonNegativeInt = 0  # steps from 0 to the full rate
    decay_start_step: NonNegativeInt = 0  # the step at which decay begins
    decay_steps: NonNegativeInt = 0  # 0: no decay
    decay_power: PositiveFloat = 2.0  # exponent of the decay
    end_lr_ratio: Annotated[float, Field(ge=0, le=1)] = 0.0  # final rate / full rate


class EarlyStopping(Section):
    """Training ends after so many evaluations in a row without a new best."""

    metric: ChoiceMetric = "logloss"
    patience: PositiveInt = 3


ExchangeDtype = Literal["fp32", "fp16", "bf16", "int8"]


class ExchangeDtypes(Section):
    """Dtypes in which pooled vectors and their gradients travel."""

    vectors: ExchangeDtype = "fp32"
    gradients: ExchangeDtype = "fp32"

    @pydantic.model_validator(mode="before")
    @classmethod
    def _both(cls, asked: object) -> object:
        if isinstance(asked, (dict, cls)):
            return asked
        if asked not in get_args(ExchangeDtype):
            raise ValueError(
                f"'train.exchange_dtype' is {show(asked)}; it must be one of {', '.join(get_args(ExchangeDtype))}, or "
                "{vectors: ..., gradients: ...}"
            )
        return {"vectors": asked, "gradients": asked}

    def __str__(self) -> str:
        return self.vectors if self.vectors == self.gradients else f"{self.vectors}, gradients {self.gradients}"


class TrainConfig(Section):
    """Length and precision of training."""

    batch_size: PositiveInt = 1024  # per rank
    accumulate: PositiveInt = 1  # parts of a batch that go through the dense part one by one; weights update once
    epochs: Annotated[int, Field(gt=0, le=10**9)] = 1
    max_steps: PositiveInt | None = None  # most steps in all
    eval_batch_size: PositiveInt | None = None  # per rank; default: batch_size
    eval_every_steps: PositiveInt | None = None  # in addition to each epoch's end; on val if there is one
    early_stopping: EarlyStopping | None = None
    on_nan: Literal["stop", "skip"] = "stop"  # if the loss is not finite: end the job, or skip the batch
    exchange_dtype: ExchangeDtypes = ExchangeDtypes()  # dtypes between ranks; or one word for both
    dense_dtype: Literal["fp32", "bf16"] = "fp32"  # bf16: matrix products of the dense part; its parameters stay fp32
    tf32: bool = True  # on GPUs: fp32 products with 10 bits of mantissa, several times as fast
    cuda_graphs: bool | None = None  # on GPUs: launch the dense part as one graph; default: only for the built-in DLRM
    overlap: bool = True  # send the next batch's ids and the dense gradients while the step computes
    log_every_steps: PositiveInt = (
        50  # steps between lines of metrics.jsonl, and of the terminal without a progress bar
    )


class CheckpointConfig(Section):
    """When checkpoints are written, and which are kept."""

    enabled: bool = True
    every_steps: PositiveInt | None = None  # in addition to each epoch's end
    every_epochs: PositiveInt = 1
    initial: bool = True  # write the initial weights before the first step
    keep: PositiveInt = 2
    keep_best: ChoiceMetric | None = None  # also keep checkpoints/best, the best by an evaluation on val
    asynchronous: bool = False  # write while training continues, from a copy of the tables in host memory
    on_error: Literal["stop", "warn"] = "stop"  # if one cannot be written: end the job, or warn and train on


class ProfileConfig(Section):
    """Which steps are sampled."""

    enabled: bool = True
    every_steps: PositiveInt | None = None  # sampled steps have barriers; default: every 20th, fewer on a quiet machine
    warmup_steps: NonNegativeInt = 5  # first steps of each epoch, never sampled
    trace_steps: list[NonNegativeInt] = []  # steps for which to write a torch.profiler trace


class ReshardConfig(Section):
    """When tables may move during training, and what a move must gain."""

    enabled: bool = True  # false: tables stay where the start put them
    every_epochs: PositiveInt = 1  # 1: epochs longer than 1,000 steps and than a 20th of the job are divided
    every_steps: PositiveInt | None = None  # instead of epochs
    on_change: bool = True  # also decide as soon as sampled steps show that ranks wait longer for each other
    min_gain: Annotated[float, Field(ge=0, lt=1)] = 0.01  # fraction of the step time that a move must save
    rollback: bool = True  # a move that turns out to cost more than it saves is undone
    max_move_gib_per_step: PositiveFloat | None = None  # GiB; larger moves are divided, larger tables stay
    checksums: bool = False  # compare a checksum of every moved tensor before and after


RowSplits = Literal["auto", "faster", "never"]


class SplitsConfig(Section):
    """Column and row shards of one table on several ranks; row-wise Adagrad: see tables.optimizer.per_part."""

    max_parts: PositiveInt = 4  # most shards of a table; 1: split none
    min_dim: EmbeddingDim = 16  # fewest columns of a shard, a multiple of 4
    rows: RowSplits = (
        "auto"  # row shards; auto: of tables that fit no rank otherwise; faster: also of those that slow ranks
    )


class AutoshardConfig(Section):
    """How tables are placed."""

    enabled: bool = True  # plan and move tables; false, and on one rank: round robin, never moved
    placement: LocalPath | None = None  # first plan: round_robin, or a plan file; null: the planner's, if enabled
    algorithm: Algorithm = "auto"  # of the first plan; auto: the best of all by predicted cost
    # GiB per rank for tables and their optimizer state, or a list by rank; null: the free memory.
    memory_gib: Annotated[list[PositiveFloat] | PositiveFloat | None, Field(union_mode="left_to_right")] = None
    budget_seconds: PositiveFloat = 20.0  # for the first plan; less if it serves few steps
    cache_dir: LocalPath | None = (
        "auto"  # of costs measured here, for later jobs; auto: run.dir/.costs; null: keep none
    )
    measure_plans: NonNegativeInt = 12  # most finalists to measure on the running ranks, if that pays
    pinned: dict[str, NonNegativeInt] = {}  # table -> rank (all of its shards), or shard -> rank: `item[0:64]`
    together: list[list[str]] = []  # groups of tables that share a rank
    apart: list[list[str]] = []  # groups of tables, no two of which share a rank
    exclude_ranks: list[NonNegativeInt] = []  # ranks without tables
    splits: SplitsConfig = SplitsConfig()
    stats_batches: PositiveInt = 8  # first batches, from which table statistics are measured
    reshard: ReshardConfig = ReshardConfig()


class Config(Section):
    """A job's settings: all sections of the YAML file."""

    run: RunConfig = RunConfig()
    data: DataConfig
    tables: TablesConfig = TablesConfig()
    model: ModelConfig = ModelConfig()
    dense_optimizer: DenseOptimizerConfig = DenseOptimizerConfig()
    schedule: ScheduleConfig = ScheduleConfig()
    train: TrainConfig = TrainConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    profile: ProfileConfig = ProfileConfig()
    autoshard: AutoshardConfig = AutoshardConfig()
    callbacks: list[str] = []  # tensorboard, wandb, mlflow, or package:factory, called as factory(run_dir, config)

    @pydantic.model_validator(mode="before")
    @classmethod
    def _empty_sections(cls, record: Any) -> Any:
        """Takes 'train:' with nothing under it (null in YAML) as a section with defaults."""
        if isinstance(record, dict):
            return {key: value for key, value in record.items() if value is not None}
        return record

    @pydantic.model_validator(mode="after")
    def _sections_agree(self) -> Config:
        if self.model.over_arch_layer_sizes[-1] != 1:
            raise ValueError("model.over_arch_layer_sizes must end in 1: the last layer is the logit")
        if self.checkpoint.keep_best and not self.checkpoint.enabled:
            raise ValueError("checkpoint.keep_best needs checkpoint.enabled: true")
        if self.train.accumulate > self.train.batch_size:
            raise ValueError(
                f"train.accumulate is {self.train.accumulate}, more parts than a rank's batch has samples "
                f"(train.batch_size: {self.train.batch_size}). Set it to that at most"
            )
        dense, schedule = self.dense_optimizer, self.schedule
        if dense.momentum and dense.name != "sgd":
            raise ValueError(f"dense_optimizer.momentum is for sgd; dense_optimizer.name is {dense.name}")
        if schedule.decay_steps and schedule.decay_start_step < schedule.warmup_steps:
            raise ValueError(
                f"schedule.decay_start_step is {schedule.decay_start_step}, before the warm-up ends (warmup_steps: "
                f"{schedule.warmup_steps}); the rate would jump"
            )
        if schedule.decay_start_step and not schedule.decay_steps:
            raise ValueError("schedule.decay_start_step needs schedule.decay_steps: with 0 the rate never decays")
        dtypes, narrowest = self.train.exchange_dtype, self.autoshard.splits.min_dim
        if "int8" in (dtypes.vectors, dtypes.gradients) and narrowest < 16:
            raise ValueError(
                f"autoshard.splits.min_dim is {narrowest}; with train.exchange_dtype: int8 it must be at least 16, "
                "because columns that share a scale must stay together"
            )
        if self.tables.sequences and self.model.factory is None:
            name = next(iter(self.tables.sequences))
            raise ValueError(
                f"tables.sequences has {show(name)}, but the built-in DLRM pools every feature. Set model.factory to a "
                "DenseArch that takes sequences (launch/examples/attention.py is one), or remove it from "
                "tables.sequences to have it pooled"
            )
        if self.tables.sequences and self.autoshard.splits.rows == "faster":
            name = next(iter(self.tables.sequences))
            raise ValueError(
                f"autoshard.splits.rows is faster, but tables.sequences has {show(name)}, whose table needs all rows "
                "on one rank. Leave autoshard.splits.rows at auto"
            )
        if self.model.options and self.model.factory is None:
            raise ValueError("model.options are for model.factory, which is not set")
        for name, dim in {
            "autoshard.splits.min_dim": self.autoshard.splits.min_dim,
            "tables.embedding_dim": self.tables.embedding_dim,
            **{f"tables.embedding_dims.{table}": dim for table, dim in self.tables.embedding_dims.items()},
            **{f"tables.per_table.{table}.dim": own.dim for table, own in self.tables.per_table.items()},
        }.items():
            if dim is not None and dim % 4:
                raise ValueError(f"{name} is {dim}; fbgemm needs a multiple of 4 (try {-(-dim // 4) * 4})")
        return self

    def to_yaml(self) -> str:
        return yaml.safe_dump(self.model_dump(mode="json"), sort_keys=False)


def shipped_configs() -> dict[str, Path]:
    """Returns name -> file of the shipped configs."""
    return {path.stem: path for path in sorted(SHIPPED.glob("*.yaml"))}


def find_config(given: str) -> Path:
    """Returns the given file, else the shipped config of that name in any spelling (demo, configs/demo.yaml)."""
    path = Path(given)
    if path.exists() and not path.is_dir():
        return path
    shipped = shipped_configs().get(path.stem)
    if shipped is not None and path.suffix in ("", ".yaml"):
        return shipped
    if given and (path / "config.yaml").is_file():
        raise UserError(
            f"'{given}' is a folder, perhaps a run's: `dlrm-autoshard train {path / 'config.yaml'} --resume {given}` "
            "continues it."
        )
    if given and path.is_dir():
        raise UserError(f"'{given}' is a folder. Name a YAML file, or a shipped config.{like_shipped(given)}")
    raise UserError(f"there is no file '{given}', and no config of that name.{like_shipped(given)}")


def like_shipped(given: str) -> str:
    """Suggests the shipped config that `given` may be a misspelling of, else lists all."""
    names = list(shipped_configs())
    close = difflib.get_close_matches(Path(given).stem, names, n=1)
    return f" Did you mean '{close[0]}'?" if close else f" The package has {', '.join(names)}."


def load_config(path: Path, overrides: Sequence[str] = ()) -> Config:
    """Reads a YAML file and applies overrides such as 'train.epochs=3'. ConfigError names each mistake."""
    try:
        record = read_yaml(path, "config file")
    except FormatError as error:
        raise ConfigError(str(error)) from error
    if not isinstance(record, dict):
        raise ConfigError(f"config file '{path}' has no sections; it needs at least 'data:'.")
    apply_overrides(record, overrides)
    try:
        return parse_config(record)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error


def parse_config(record: dict[str, Any]) -> Config:
    """Checks a config. ConfigError has a sentence for each mistake."""
    try:
        return Config.model_validate(record)
    except pydantic.ValidationError as error:
        raise ConfigError("\n".join(sentences(Config, error))) from error


def parse_sections(**sections: Any) -> Config:
    """Checks these sections for a job whose data does not come from a config, with errors as for a file."""
    return parse_config({"data": {"source": "movielens"}, **sections})


def apply_overrides(record: dict[str, Any], overrides: Sequence[str]) -> None:
    """Applies overrides 'section.key=value' to the record of a config."""
    for override in overrides:
        _apply(record, override)


def _apply(record: dict[str, Any], override: str) -> None:
    key, equals, text = override.partition("=")
    *sections, last = key.split(".")
    if not equals or not all((*sections, last)):
        raise ConfigError(
            f"override {show(override)} is not of the form section.key=value. Put no blanks around '=', and quotes "
            "around a value with blanks."
        )
    inside: Any = record
    for section in sections:
        if isinstance(inside, dict) and inside.get(section) is None:
            inside[section] = {}
        inside = inside[_place(inside, section, override)]
    place = _place(inside, last, override)
    try:
        inside[place] = parse_yaml(text)
    except FormatError as error:
        raise ConfigError(f"override {show(override)}: {show(text)} {error}.") from error


def _place(inside: Any, name: str, override: str) -> str | int:
    """Returns `name` as a key of a section or an index of a list: data.tables.0.num_embeddings."""
    if isinstance(inside, list) and name.isdecimal() and int(name[:9]) < len(inside):
        return int(name)
    if isinstance(inside, list):
        raise ConfigError(f"override {show(override)}: there is no item {show(name)}; {_items(len(inside))}.")
    if not isinstance(inside, dict):
        raise ConfigError(
            f"override {show(override)}: {show(inside)} is a value, not a section with a key {show(name)}."
        )
    return name


def _items(number: int) -> str:
    return "the list is empty" if number == 0 else f"items are 0 to {number - 1}"
