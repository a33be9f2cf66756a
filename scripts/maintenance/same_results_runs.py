"""Data and runs that same_results.py records."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from pyarrow import parquet

SYNTHETIC = "--rows 6000 --cardinalities 3000 1200 600 300 100 60 30 12"
FEW = "--rows 1500 --like kaggle --cap 500"
DATA = {  # what makes each directory of data; {device} is that of --device
    "synthetic": f"make_synthetic --output synthetic {SYNTHETIC} --device {{device}}",
    "raw": f"make_synthetic --output raw {FEW} --format tsv --device cpu",
    "raw_new": f"make_synthetic --output raw_new {FEW} --format tsv --device cpu --seed 1",
    "prepared": "prepare_criteo raw/train.txt --output prepared --min-count 2",
    "prepared_all": "prepare_criteo raw/train.txt --output prepared_all --vocabulary all "
    "--split 0.8 0.1 0.1 --cap 300 --dense-transform log3 --limit 1200",
    "prepared_as": "prepare_criteo raw_new/train.txt --output prepared_as --ids-of prepared",
    "multi_hot": "describe_parquet multi_hot --train train.parquet --val val.parquet "
    "--test test.parquet",
}
NEEDS = {  # the data that others are made from
    **{"prepared": ["raw"], "prepared_all": ["raw"], "multi_hot": ["synthetic"]},
    "prepared_as": ["raw_new", "prepared"],
}

COMMON: dict[str, Any] = {
    **{"data": "synthetic", "output": "runs", "batch_size": 128, "max_steps": 12},
    **{"model.bottom_mlp": "[32]", "model.top_mlp": "[32]", "tables.threshold": 300},
    **{"optim.warmup_steps": 5, "log_every": 1, "populate_every": 2, "checkpoint": "false"},
}
KINDS: dict[str, dict[str, Any]] = {
    "dense": {"emb": "dense"},
    "tt": {"emb": "tt", "tt.rank": 4},
    "tt_cached": {"emb": "tt", "tt.rank": 4, "tt.cache_rows": 40},
    **{f"qr_{how}": {"emb": "qr", "qr.operation": how} for how in ("multiply", "add", "concat")},
    "block": {"emb": "block", "block.keep": 100},
    "hash": {"emb": "hash", "hash.rows": 64},
    "drop": {"emb": "drop", "drop.keep": 64},
    "robe": {"emb": "robe", "robe.rows": 64},
    "cafe": {"emb": "cafe", "cafe.rows": 100},
    "basis": {"emb": "basis", "basis.clusters": 16},
    "paged": {"emb": "paged", "paged.page_size": 256, "paged.devices": "[cpu, cpu]"},
    "offload": {"emb": "offload", "offload.cache_rows": 300, "offload.half_life": 2},
    "mixed": {
        "tables.kinds": "{C1: offload, C2: tt, C3: qr, C4: cafe, C5: robe, C6: block, C7: basis}",
        **{"offload.cache_rows": 300, "tt.rank": 4, "tt.cache_rows": 40, "cafe.rows": 100},
        **{"robe.rows": 50, "basis.clusters": 16},
    },
}
MIXED = KINDS["mixed"]


def both(rule: str) -> dict[str, Any]:
    """One rule for the dense part and the embeddings."""
    return {"optim.dense": rule, "optim.embeddings": rule}


RULES = {
    "sgd": both("sgd") | {"optim.momentum": 0.9},
    "adagrad": both("adagrad") | {"optim.weight_decay": 0.01},
    "rmsprop": both("rmsprop") | {"optim.momentum": 0.5},
    **{rule: both(rule) for rule in ("rowwise_adagrad", "adam", "adamw", "adamax", "adadelta")},
}
STOPPED = MIXED | both("adam") | {"checkpoint": "true"}
COLLECTIVE = {"sharding.threshold": 100, "sharding.exchange": "collective"}
LONG = {"tables.threshold": 20, "max_steps": 60, "epochs": 2, "log_every": 5}
CPU_RUNS: dict[str, dict[str, Any]] = {
    **KINDS,
    **{f"rule_{rule}": MIXED | options for rule, options in RULES.items()},
    **{f"multi_hot_{kind}": options | {"data": "multi_hot"} for kind, options in KINDS.items()},
    **{f"bf16_rows_{kind}": options | {"tables.dtype": "bf16"} for kind, options in KINDS.items()},
    "bf16_products": MIXED | {"precision": "bf16"},
    "cross_network": MIXED | {"model.interaction": "dcn", "model.cross_rank": 8},
    "clipped": MIXED | {"optim.clip_norm": 0.1},
    "schedule": both("sgd") | {"optim.decay_start": 6, "optim.decay_steps": 5},
    "two_epochs": MIXED | {"batch_size": 512, "max_steps": 19, "epochs": 2, "eval_every": 4},
    "row_cache": {"emb": "offload", "offload.cache_rows": 1000, "offload.half_life": 2, **LONG},
    "seldom_logged": MIXED | {"log_every": 6},
    "criteo": MIXED | {"data": "prepared", "eval_batch_size": 100, "max_steps": 8},
    **{
        f"budget_{kind}": {"emb": kind, "budget": "5x", "tables.threshold": 0, "max_steps": 2}
        for kind in ("auto", "basis", "block", "cafe", "drop", "hash", "qr", "robe", "tt")
    },
    "trained": both("adam") | {"checkpoint": "true", "max_steps": 25},
    **{
        f"compressed_{kind}": options | {"init_from": "trained", "max_steps": 4}
        for kind, options in (KINDS | {"auto": {"emb": "auto", "budget": "5x"}}).items()
    },
    "unstopped": STOPPED | {"max_steps": 20},
    "stopped": STOPPED | {"max_steps": 10},
    "resumed": {"resume": "stopped", "max_steps": 20},
    "processes_sharded": COLLECTIVE
    | {"sharding.tables": "{C1: replicate, C2: column, C3: row, C4: table}"},
    "processes_peers": COLLECTIVE | both("rowwise_adagrad") | {"sharding.exchange": "peers"},
    "processes_replicated": KINDS["tt_cached"] | both("adam"),
    "processes_paged": COLLECTIVE | both("adam") | {"emb": "paged", "checkpoint": "true"},
    "resumed_by_one": {"resume": "processes_paged", "max_steps": 16},
}  # those named processes_ run as two
MUST_EQUAL = {"resumed": "unstopped"}  # the losses of these
# One graph is captured for steps that are logged, and one for others, each after its third step.
BOTH_GRAPHS = {"log_every": 2, "max_steps": 16, "batch_size": 256, "precision": "bf16"}
FP32 = {"precision": "fp32"}
GPU_RUNS: dict[str, dict[str, Any]] = {
    **{
        f"{name}_{mode}": KINDS[kind] | rule | BOTH_GRAPHS | {"data": data} | options
        for mode, options in {"fast": {}, "exact": {"deterministic": "true"}}.items()
        for kind in ("dense", "tt", "qr_multiply", "block", "robe", "offload", "drop")
        for name, rule, data in (
            *((f"{kind}_{r}", both(r), "synthetic") for r in ("sgd", "rowwise_adagrad", "adam")),
            (f"{kind}_multi_hot", both("adagrad"), "multi_hot"),
        )
    },
    **{
        f"{kind}_exact_fp32": KINDS[kind] | BOTH_GRAPHS | {"deterministic": "true"} | FP32
        for kind in ("dense", "tt", "tt_cached", "mixed")
    },
}


def multi_hot(source: Path, target: Path) -> None:
    """Write rows with bags of 0 to 3 ids in some columns, in row groups of 500."""
    target.mkdir()
    for path in source.glob("*.parquet"):
        table = parquet.read_table(path)
        for number, name in enumerate(("C1", "C2", "C5", "C8")):
            lengths = (np.arange(len(table)) * 7 + number) % 4
            offsets = np.concatenate([[0], lengths.cumsum()]).astype(np.int32)
            ids = np.resize(np.roll(table[name].to_numpy(), number), offsets[-1])
            bags = pa.ListArray.from_arrays(offsets, ids)
            table = table.set_column(table.column_names.index(name), name, bags)
        split = path.name.partition("-")[0]
        parquet.write_table(table, target / f"{split}.parquet", row_group_size=500)
