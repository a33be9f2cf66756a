"""``dlrm.fit``: a table in memory, or files, to a trained model, by the parts of the commands."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext, redirect_stdout
from dataclasses import fields, replace
from difflib import get_close_matches
from fractions import Fraction
from io import StringIO
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq
import torch

from dlrm.commands.train import Run
from dlrm.config.cli import check
from dlrm.config.options import option_schema
from dlrm.config.schema import RunConfig
from dlrm.data.prepare.column_options import TableOptions
from dlrm.data.prepare.plan_summary import format_plan
from dlrm.data.prepare.raw_rows import as_batch
from dlrm.data.prepare.table import open_and_plan, prepare_table
from dlrm.data.schema import META_FILE
from dlrm.distributed.world import World
from dlrm.embeddings import available
from dlrm.training.predictor import Predictor
from dlrm.training.profiling import out_of_memory_advice
from dlrm.utils.messages import print_error

if TYPE_CHECKING:
    import pandas as pd

OF_TABLE = frozenset(field.name for field in fields(TableOptions))
OWN = {
    "data": "give the rows, files or prepared directory as the first argument",
    "resume": "use dlrm train --resume",
    "dry_run": "use dlrm train --dry_run",
    "checkpoint": "the best one is the model that it returns",
}
"""Options of training that the function sets itself, and what to do instead."""


def fit(
    rows: pd.DataFrame | pa.Table | Mapping[str, Any] | Sequence[Any] | str | Path,
    label: str | None = None,
    *,
    validation: float = 0.1,
    progress: bool = True,
    **options: Any,
) -> Predictor:
    """Train a model on a table with one binary label.

    This does what ``dlrm prepare`` and ``dlrm train`` do, in a temporary directory. For tables that
    do not fit in memory, runs that take hours, and several GPUs, use these commands.

    Example::

        model = dlrm.fit(frame, label="clicked", emb="auto", budget="20MB")
        model.predict(new), model.evaluate(test), model.save("runs/clicks")

    Args:
        rows: a DataFrame, an Arrow table, a mapping of columns, a list of mappings, files of CSV,
            JSON lines or Parquet, or a prepared directory.
        label: the column to predict: 0 and 1, or false and true; or of any two values, of which
            ``positive`` names the one that counts as 1. Default: the column ``label``.
        validation: share of the rows on which the model is validated, the last ones; with
            ``split={"by": "random"}`` any. The state with the best AUC there is the result.
        progress: print what each column is and what is trained, and show progress bars.
        options: what the YAML file of ``dlrm prepare --config`` may hold, for example
            ``columns={"user": "category"}``; and all options of ``dlrm train --help``, where
            a group is a mapping, as in ``optim={"lr": 0.01}``. With ``output`` and ``name``, the
            run is kept in that directory.

    Returns:
        The trained model.

    Raises:
        ValueError: the rows or an option do not fit; the message says what to do.
        FileNotFoundError: there is no such file.
    """
    for name in OWN.keys() & options.keys():
        raise ValueError(f"{name} is no option of fit: {OWN[name]}")
    for name in options.keys() - OF_TABLE:  # those of training are checked below
        valid = [*OF_TABLE, "label", "validation", "progress", *option_schema(available())]
        if (near := get_close_matches(name, valid, n=1)) and near[0] in valid[: len(OF_TABLE) + 3]:
            raise ValueError(f"unknown option {name}, did you mean {near[0]}?")
    of_table = {name: value for name, value in options.items() if _is_of_table(name, value)}
    of_table |= {} if label is None else {"label": label}

    work = TemporaryDirectory(prefix="dlrm-", ignore_cleanup_errors=True)
    prepared = isinstance(rows, str | Path) and Path(rows, META_FILE).is_file()
    if prepared and of_table:
        raise ValueError(f"{rows} is prepared already: leave out {', '.join(of_table)}")
    data = Path(str(rows)) if prepared else Path(work.name, "data")
    keywords = {"output": work.name, "name": None if "output" in options else "model"}
    keywords |= {name: value for name, value in options.items() if not _is_of_table(name, value)}
    config, resolved = check([], available(), keywords | {"data": str(data)})  # before any work

    with nullcontext() if progress else redirect_stdout(StringIO()):
        if not prepared:
            _prepare(rows, of_table, validation, data, progress=progress)
        run = _train(config, resolved, work.name, progress=progress)
    model = Predictor.load(run.directory, device=run.step.device)
    return replace(model, keep=work)


def _is_of_table(name: str, value: Any) -> bool:
    """Whether an option is one of the preparation. ``hash`` is the name of a kind as well, of which
    the options are a group."""
    return name in OF_TABLE and not (name in available() and isinstance(value, Mapping))


def _train(config: RunConfig, resolved: str, work: str, *, progress: bool) -> Run:
    """Train like ``dlrm train``, and print its summary without the lines that name ``work``."""
    world = World.from_environment()
    if world.size > 1:
        raise ValueError("fit runs in one process: use dlrm train with torchrun")
    determinism = torch.get_deterministic_debug_mode()
    precision = torch.get_float32_matmul_precision()
    try:
        with out_of_memory_advice(config.data, config.model.embedding_dim):
            run = Run(config, resolved, world, silent=not progress)
            with redirect_stdout(StringIO()) as summary:
                run.train()
    finally:
        world.leave()
        torch.set_deterministic_debug_mode(determinism)  # what the caller runs next is as before
        torch.set_float32_matmul_precision(precision)

    print(*(line for line in summary.getvalue().splitlines() if work not in line), sep="\n")
    return run


def _prepare(
    rows: Any, options: dict[str, Any], validation: float, data: Path, *, progress: bool
) -> None:
    """Prepare rows in memory, by way of a file, or files."""
    share = Fraction(str(validation))
    if not 0 <= share < 1:
        raise ValueError(f"validation is {validation}, it must be at least 0 and below 1")
    shares = {"train": str(1 - share), "val": str(share), "test": "0"}
    options["split"] = shares | dict(options.get("split") or {})

    # Files as they are; rows in memory by way of a file.
    file = data.with_name("rows.parquet")
    if isinstance(rows, str | Path):
        inputs: list[Any] = [rows]
    elif isinstance(rows, Sequence) and rows and all(isinstance(r, str | Path) for r in rows):
        inputs = list(rows)
    else:
        levels = getattr(getattr(rows, "index", None), "names", ())  # of a DataFrame
        if names := ", ".join(repr(name) for name in levels if name is not None):
            print_error(f"note: the index {names} is left out; reset_index() makes it a column")
        pq.write_table(pa.Table.from_batches([as_batch(rows)]), file)
        inputs = [file]

    try:
        files, plan = open_and_plan(inputs, options)
        print(format_plan(plan))
        prepare_table(files, plan, data, progress=progress)
    except ValueError as error:
        raise ValueError(str(error).replace(str(file), "the data")) from None
    file.unlink(missing_ok=True)
