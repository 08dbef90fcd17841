"""What people get wrong, and the one line that each of them must be told: exit status 2, no traceback, no log."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.jobs import TINY_CONFIG

FILES = {
    "config.yaml": TINY_CONFIG,
    "empty.yaml": "",
    "list.yaml": "- 1\n",
    "tab.yaml": "train:\n\tepochs: 3\ndata: {source: movielens}\n",
    "twice.yaml": "train: {epochs: 3}\ntrain: {epochs: 4}\n",
    "no_data.yaml": "train: {epochs: 3}\n",
    "no_source.yaml": "data: {dir: x}\n",
    "torn.json": '{"schema": 1, ',
    "ranks.json": '{"schema": 1, "world_size": 3, "rank_of": {"user": 0, "item": 0}}',
    "tables.json": '{"schema": 1, "world_size": 1, "rank_of": {"user": 0, "ad": 0}}',
    "half.json": '{"schema": 1, "world_size": 1, "rank_of": {"user": 0.9, "item": 0}}',
    "rows.csv": "name,num_embeddings\nuser,5x0\n",
    "header.csv": "table,num_embeddings\nuser,500\n",
    "nothing.csv": "name,num_embeddings\n",
    "file": "",
    "binary.yaml": "\udcff\udcfe\x00",
    "indent.yaml": "data:\n  source: synthetic\n   tables: []\n",
    "number.yaml": "data: {source: movielens}\n3: 4\n",
    "runs/done/config.yaml": TINY_CONFIG,
    "runs/done/environment.json": "{}",
}
IN_MILLIONS = '{"name": "user", "num_embeddings": 4000000000, "embedding_dim": 128}'

CHANGES = {  # of the config: what is changed -> what is said
    "train.batchsize=3": "unknown key 'train.batchsize'. Did you mean 'train.batch_size'?",
    "batch_size=3": "unknown key 'batch_size'. Did you mean 'train.batch_size'?",
    "train.epoch=3": "Did you mean 'train.epochs'?",
    "model.embedding_dim=8": "Did you mean 'tables.embedding_dim'?",
    "run.dir=s3://bucket/runs": "'run.dir' is 's3://bucket/runs': a URL, but only this machine's file systems are",
    "data.foo=1": "unknown key 'data.foo'. Section 'data' has ",
    "train.batch_size=many": "'train.batch_size' is 'many'; it must be a whole number.",
    "train.batch_size=0": "'train.batch_size' is 0; it must be more than 0.",
    "train.batch_size=-5": "'train.batch_size' is -5; it must be more than 0.",
    "train.batch_size=1.5": "'train.batch_size' is 1.5; it must be a whole number.",
    "train.batch_size=yes": "'train.batch_size' is True; it must be a whole number.",
    "train.epochs=": "'train.epochs' is empty; it must be a whole number.",
    "train.exchange_dtype=fp8": "it must be one of fp32, fp16, bf16, int8, or",
    "train.on_nan=ignore": "it must be one of stop, skip.",
    "train.eval_every_steps=0": "'train.eval_every_steps' is 0; it must be more than 0.",
    "train.early_stopping=3": "'train.early_stopping' is 3; it is a section.",
    "train.early_stopping={metric: auk}": "must be one of auc, logloss, ne. Did you mean 'auc'?",
    "train.early_stopping={patience: 2}": "this data has no val samples",
    "checkpoint.keep_best=auc": "this data has no val samples",
    "checkpoint={keep_best: auc, enabled: false}": "checkpoint.keep_best needs checkpoint.enabled: true.",
    "checkpoint.keep=0": "'checkpoint.keep' is 0; it must be more than 0.",
    "tables.optimizer.lr=.inf": "'tables.optimizer.lr' is inf; it must be a finite number.",
    "tables.optimizer.lr=-1": "'tables.optimizer.lr' is -1; it must be more than 0.",
    "tables.optimizer=sgd": "'tables.optimizer' is 'sgd'; it is a section. Section 'tables.optimizer' has name, lr",
    "tables.optimizer.name=adagard": "Did you mean 'adagrad'?",
    "tables.optimizer.name=adam": "is for CUDA only; on CPU use rowwise_adagrad, adagrad or sgd",
    "tables.embedding_dim=10": "tables.embedding_dim is 10; fbgemm needs a multiple of 4 (try 12).",
    "tables.embedding_dims.user=7": "tables.embedding_dims.user is 7; fbgemm needs a multiple of 4 (try 8).",
    "tables.embedding_dims.usr=8": "Did you mean 'user'?",
    "tables.poolings={usr: mean}": "tables.poolings names a table 'usr', which the data does not have. Did you mean",
    "tables.poolings={user: max}": "'tables.poolings.user' is 'max'; it must be one of sum, mean.",
    "model.over_arch_layer_sizes=[8]": "model.over_arch_layer_sizes must end in 1",
    "model.over_arch_layer_sizes=[]": "'model.over_arch_layer_sizes' is []; it must be a list of at least 1.",
    "model.dense_arch_layer_sizes=[1000000,1000000,16]": "the dense layers have 1,000,",
    "run.threads_per_rank=100000": "run.threads_per_rank is 100000, but this host has ",
    "run.pin_cores=maybe": "'run.pin_cores' is 'maybe'; it must be true or false.",
    "run.name=3": "'run.name' is 3; it must be text (in quotes, if it looks like a number).",
    "run.name=../x": "it must be the name of one folder in run.dir",
    "run.name=latest": "it must be the name of one folder in run.dir",
    "run.device=gpu": "Did you mean 'cuda'?",
    "run.dir=file": "cannot be made: Not a directory. Set run.dir",
    "data.source=criteoo": "Did you mean 'criteo'?",
    "data={source: criteo, dir: nowhere}": "'nowhere' has no day_*_labels.npy. Make them from Criteo's text files",
    "data={source: custom, factory: nowhere}": "data.factory",
    "data={source: dlrm_datasets, files: []}": "data.files is empty",
    "data.tables=[]": "'data.tables' is []; it must be a list of at least 1.",
    "data.tables=[{name: a, num_embeddings: 0}]": "num_embeddings' is 0; it must be more than 0.",
    "data.tables=[{name: a, num_embeddings: 5}, {name: a, num_embeddings: 5}]": "one table named 'a'",
    "data.tables=[{name: a, num_embeddings: 5, mean_pooling: 1e12}]": "it must be at most 100,000.",
    f"data.tables=[{IN_MILLIONS}]": "GiB for its 1 tables but has",
    "callbacks=[nothing]": "callbacks: 'nothing' is none of tensorboard, wandb, mlflow, nor of the form",
    "autoshard.memory_gib=lots": "'autoshard.memory_gib' is 'lots'; it must be a number.",
    "autoshard.memory_gib=[1, -2]": "'autoshard.memory_gib.1' is -2; it must be more than 0.",
    "autoshard.memory_gib=0.00001": "rank 0 needs 56.6 KiB for its 2 tables but has 10.5 KiB (46.1 KiB short)",
    "autoshard.together=a": "'autoshard.together' is 'a'; it must be a list, such as [a, b].",
    "autoshard.pinned={ad: 0}": "autoshard.pinned",
    "autoshard.placement=none.json": "none.json' cannot be read: No such file",
    "autoshard.placement=torn.json": "torn.json' is not JSON",
    "autoshard.placement=ranks.json": "the plan is for 3 ranks, but this job has 1",
    "autoshard.placement=tables.json": "it does not place 'item'; it places 'ad', which the model",
    "autoshard.placement=half.json": "is 0.9; it must be a whole number",
    "train": "override 'train' is not of the form section.key=value.",
    "train.epochs=[1": "override 'train.epochs=[1': '[1' is not YAML: line 1, column 3",
    "autoshard.reshard.min_gain=5": "'autoshard.reshard.min_gain' is 5; it must be less than 1",
    "schedule={warmup_steps: 10, decay_steps: 5}": "decay_start_step is 0, before the warm-up ends (warmup_steps: 10)",
    "schedule.decay_start_step=5": "decay_start_step needs schedule.decay_steps: with 0 the rate never decays",
    "model.options={a: 1}": "model.options are for model.factory, which is not set",
    "dense_optimizer.momentum=0.9": "dense_optimizer.momentum is for sgd; dense_optimizer.name is adagrad",
    "train.epochs.more=1": "'train.epochs' is {'more': 1}; it must be a whole number.",
    "train.epochs=" + "9" * 4_000: "'train.epochs' is 9",
    "x" * 20_000: "is not of the form section.key=value.",
    "y" * 20_000 + "=1": "unknown key 'yyy",
}
if not Path("/dev/nvidia0").exists():
    CHANGES["run.device=cuda"] = "torch sees no GPU"
COMMANDS = {  # what follows dlrm-autoshard -> what is said
    "trian config.yaml": "there is no command 'trian'. Did you mean 'train'?",
    "help": "there is no command 'help'. `dlrm-autoshard --help` lists all.",
    "train debgu_cpu": "there is no file 'debgu_cpu', and no config of that name. Did you mean 'debug_cpu'?",
    "train configs/debgu_cpu.yaml": "Did you mean 'debug_cpu'?",
    "train nowhere": "The package has criteo_kaggle, debug_cpu, demo, ",
    "train runs": "'runs' is a folder. Name a YAML file, or a shipped config.",
    "train runs/done": "`dlrm-autoshard train runs/done/config.yaml --resume runs/done` continues it.",
    "train config.yaml --device cuda": "no option '--device'. Settings are written without dashes: run.device=cuda",
    "train config.yaml --batch-size=64": "without dashes: train.batch_size=64",
    "train config.yaml --train.epochs 3": "without dashes: train.epochs=3",
    "train config.yaml --lr 0.1": "There are two, tables.optimizer.lr and dense_optimizer.lr.",
    "train config.yaml --nproc_per_node=2": "The number of ranks is an option: --ranks N.",
    "train config.yaml --rnaks 2": "there is no option '--rnaks'. Did you mean '--ranks'?",
    "train --config config.yaml": "there is no option '--config'. Give the YAML file without --config.",
    "train config.yaml train.epochs 3": "'train.epochs' is not of the form section.key=value. Put no blanks",
    "train binary.yaml": "config file 'binary.yaml' is not text: byte 0, in line 1, is not UTF-8.",
    "train indent.yaml": "line 3, column 10: mapping values are not allowed here (is the line indented as",
    "train number.yaml": "the key 3 must be text; no key here is a number.",
    "evaluate config.yaml": "'config.yaml' is a file. Name a run's directory, such as runs/latest.",
    "evaluate config.yaml --ranks 2": "'config.yaml' is a file. Name a run's directory, such as runs/latest.",
    "predict runs/done/config.yaml --out x.npy": "is a file. Name a run's directory, such as runs/done.",
    "evaluate none --batch-size 3": "there is no option '--batch-size'. --help lists all.",
    "export file": "'file' is a file. Name a run's directory, such as runs/latest.",
    "export none": "'none' is no run directory: it has no config.yaml.",
    "configs debgu_cpu": "there is no config 'debgu_cpu'. Did you mean 'debug_cpu'?",
    "train none.yaml": "none.yaml",
    "train empty.yaml": "has no sections; it needs at least 'data:'.",
    "train list.yaml": "has no sections; it needs at least 'data:'.",
    "train tab.yaml": "tab.yaml' is not YAML: line 2, column 1",
    "train twice.yaml": "key 'train' is there twice",
    "train no_data.yaml": "'data' is missing.",
    "train no_source.yaml": "'data.source' is missing; it must be one of synthetic, movielens,",
    "train config.yaml --ranks 0": "--ranks is 0; it must be 1 or more.",
    "train config.yaml --restarts -1": "--restarts is -1; it must be 0 or more.",
    "train config.yaml --nodes 2": "--nodes needs --head HOST:PORT and --job ID",
    "train config.yaml --head node0:29400": "--head is for several machines: give their number with --nodes",
    "train config.yaml --nodes 2 --job ads --head node0:abc": "--head is 'node0:abc'; it must have the form HOST:PORT",
    "plan --tables tables.json --devices 2 --out .": "--out '.' is a folder. Name a file in it.",
    "bench train-wemb --out .": "--out '.' is a folder. Name a file in it.",
    "evaluate runs/done model.interaction=cat": "only data.key=value can be given",
    "train config.yaml --ranks 1 --resume run.name=nobody": "there is no run 'nobody' with a checkpoint in 'runs'",
    "train config.yaml --ranks 1 --resume=none": "'none' is no run directory: it has no checkpoints.",
    "train config.yaml --ranks 1 train.batch_size=100000000 data.train_samples=1000000000000": "a batch of 100,000,000",
    "evaluate none": "'none' is no run directory: it has no config.yaml.",
    "report s3://bucket/run": "'runs' is 's3://bucket/run': a URL, but only this machine's file systems are",
    "plan --tables tables.json --devices 2 --out gs://bucket/p.json": "'out' is 'gs://bucket/p.json': a URL, but only",
    "train config.yaml --resume=s3://bucket/run": "'--resume' is 's3://bucket/run': a URL, but only",
    "report none": "none",
    "tables": "give files of dlrm_datasets, or --from-run RUN, or --from-csv FILE, or --synthetic N.",
    "tables config.yaml": "'config.yaml' is not a .pt or .pt.gz file of dlrm_datasets",
    "tables --synthetic 0": "--synthetic is 0; it must be 1 or more.",
    "tables --synthetic 4 --dim 6": "--dim is 6; fbgemm needs a multiple of 4.",
    "tables --from-csv none.csv": "CSV file 'none.csv' cannot be read: No such file",
    "tables --from-csv rows.csv": "CSV file 'rows.csv', line 2: 'num_embeddings' is '5x0'; it must be a whole number.",
    "tables --from-csv header.csv": "CSV file 'header.csv', line 2: 'name' is missing.",
    "tables --from-csv nothing.csv": "CSV file 'nothing.csv' lists no table; it needs the columns name and",
    "plan --tables torn.json --devices 2": "torn.json' is not JSON",
    "plan --tables torn.json --devices 0": "torn.json' is not JSON",
}
MISTAKES: dict[tuple[str, ...], str] = {
    **{("train", "config.yaml", "--ranks", "1", change): said for change, said in CHANGES.items()},
    **{tuple(line.split()): said for line, said in COMMANDS.items()},
}
ALL_IN_ONE_PROCESS = """
import contextlib, io, json, sys, traceback
from dlrm_autoshard.commands.main import main
for arguments in json.load(sys.stdin):
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            status = main(arguments)
        except SystemExit as end:
            status = end.code
        except BaseException:
            status = traceback.print_exc()
    print(json.dumps([status, out.getvalue(), err.getvalue()]), file=sys.__stdout__)
"""
"""For importing torch takes longer than all of them."""


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> dict[Sequence[str], tuple[int, str, str]]:
    """Of each mistake: exit status, standard output, standard error."""
    folder = tmp_path_factory.mktemp("mistakes")
    for name, text in FILES.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text, errors="surrogateescape")
    path = os.pathsep.join(filter(None, [str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH")]))
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path, "PYTHONWARNINGS": "ignore"}
    ended = subprocess.run(
        [sys.executable, "-c", ALL_IN_ONE_PROCESS], input=json.dumps(list(MISTAKES)), cwd=folder, timeout=150,
        capture_output=True, text=True, env=environment,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr[-2000:]
    assert not list(folder.glob("runs/*/checkpoints/step_*")), "none of them trains"
    assert not (folder / "none").exists(), "what is not there is not made"
    return dict(zip(MISTAKES, map(json.loads, ended.stdout.splitlines()), strict=True))


@pytest.mark.parametrize(
    "line", MISTAKES, ids=lambda line: " ".join(line)[:60].removeprefix("train config.yaml --ranks 1 ")
)
def test_one_line_says_what_is_wrong(line: Sequence[str], answers: dict[Sequence[str], tuple[int, str, str]]) -> None:
    status, out, err = answers[line]
    assert status == 2, f"{status} {out[-300:]} {err[-600:]}"
    assert MISTAKES[tuple(line)] in err, err[-600:]
    assert "Traceback" not in out + err
    assert err.count("\n") == 1 and len(err) < 700, err[:2000]
