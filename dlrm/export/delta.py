"""The changes between two exports, which ``dlrm apply`` applies; see docs/export.md.

A tensor with rows of the same width has only the rows that differ, bit for bit, in a delta; rows of
a table that has grown keep their number in the table, although the tables after it have moved. All
other tensors that differ are stored whole, as are those that are smaller that way. If no shape has
changed, the programs are the same; otherwise the delta has them, like all other files that differ.
"""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from dlrm.export.directory import (
    MANIFEST,
    PROGRAM,
    WEIGHTS,
    ExportOptions,
    as_text,
    digest_of,
    open_run,
    read_manifest,
)
from dlrm.export.inference import InferenceModel
from dlrm.export.lookups import DynamicLookup
from dlrm.export.programs import save_weights
from dlrm.kernels.dynamic.slot_index import EMPTY, LANES
from dlrm.utils.atomic import atomic_directory, atomic_write

FORMAT, VERSION = "dlrm export delta", 1
DELTA = "delta.json"
ROWS = "rows.safetensors"
FILES = "files"
"""Names in the directory: its description, rows and tensors, and files that are taken whole."""
CAME, EVICTED = "came", "evicted"
STARTS = {"rows": "starts", "exact": "first_row"}
"""Modules of a group with the rows of all its tables: the tensor with the first row of each."""
INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
CHUNK = 1 << 20  # rows that are compared at a time


def export_delta(run: Path, output: Path, base: Path, options: ExportOptions) -> dict[str, Any]:
    """Export what changed since an export, and print what that is. The directory appears when it is
    complete.

    Args:
        run: run directory, or a checkpoint in it.
        output: directory to make.
        base: the earlier export, whose number format is taken, and whose programs are compiled
            again if shapes have changed.
        options: ``last`` and ``data`` apply.

    Returns:
        The contents of ``delta.json``.

    Raises:
        FileNotFoundError: there is no checkpoint or data.
        ValueError: ``base`` is not a complete export, or has other kinds of tables or ONNX; or as
            :func:`~dlrm.export.directory.export_run`.
    """
    with atomic_directory(output) as directory:
        before = _read_base(base, options)
        as_before = {"tables": before["tables"], "devices": tuple(before["compiled"])}
        exporter = open_run(run, replace(options, **as_before))
        old = load_file(base / WEIGHTS)
        new = exporter.weights
        if old.keys() != new.keys():
            name = min(old.keys() ^ new.keys())
            raise ValueError(
                f"--delta-from {base}: it has other kinds of tables or layers ({name} is in one of "
                "the exports only): export in full"
            )

        # The programs depend on nothing but the shapes.
        same_shapes = all(
            (value.shape, value.dtype) == (old[name].shape, old[name].dtype)
            for name, value in new.items()
        )
        full = directory / "complete"
        full.mkdir()
        after = exporter.write(full, lambda _: None, programs=not same_shapes)
        if same_shapes:
            after["compiled"] = before["compiled"]
            programs = (PROGRAM, *before["compiled"].values())
            files = after["files"] | {name: before["files"][name] for name in programs}
            after["files"] = dict(sorted(files.items()))

        tensors, described = changes_between(old, new)
        tensors |= (ids := changed_ids(exporter.model, old, new, after["categorical"]))
        save_weights(tensors, directory / ROWS)
        rows = sum(len(v) for n, v in tensors.items() if n.startswith("row_numbers:"))
        print(f"{ROWS}: {rows:,} rows, {(directory / ROWS).stat().st_size:,} bytes")

        if counts := {name: len(changed) for name, changed in ids.items()}:
            came, evicted = (_total(counts, kind) for kind in (CAME, EVICTED))
            print(f"ids: {came:,} came, {evicted:,} were evicted")

        taken = _take_changed(full, directory / FILES, before["files"], after["files"])
        print(f"{FILES}/: {len(taken)} files that changed")

        delta = {
            "format": FORMAT,
            "version": VERSION,
            "base": digest_of(base / MANIFEST),
            "from": {name: before[name] for name in ("run", "step")},
            "changed_rows": rows,
            "ids": counts,
            "bytes": sum(path.stat().st_size for path in directory.rglob("*") if path.is_file()),
            "tensors": described,
            "taken": taken,
            "rows": digest_of(directory / ROWS),
            "result": after,
            "result_sha256": hashlib.sha256(as_text(after).encode()).hexdigest(),
        }
        with atomic_write(directory / DELTA) as temporary:
            temporary.write_text(as_text(delta))
    return delta


def changed_ids(
    model: InferenceModel,
    old: Mapping[str, Tensor],
    new: Mapping[str, Tensor],
    columns: Sequence[Mapping[str, Any]],
) -> dict[str, Tensor]:
    """The ids that came to dynamic tables and those that were evicted, for readers that keep rows
    by id: ``came:COLUMN`` and ``evicted:COLUMN``, ascending, where COLUMN is the first column of
    the table.

    Args:
        model: the newer one.
        old, new: weights.
        columns: the entries of the manifest.
    """
    found = {}
    for group, lookup in enumerate(model.tables):
        if not isinstance(lookup, DynamicLookup):
            continue
        sides = [_ids_of_tables(f"tables.{group}.group.", weights) for weights in (old, new)]

        # Columns of one vocabulary have one table.
        features = model.features[group]
        first = features[:: len(features) // len(sides[0])]
        for feature, before, after in zip(first, *sides, strict=True):
            name = columns[feature]["name"]
            found[f"{CAME}:{name}"] = _without(after, before)
            found[f"{EVICTED}:{name}"] = _without(before, after)
    return found


def _ids_of_tables(prefix: str, weights: Mapping[str, Tensor]) -> list[Tensor]:
    """The ids of the slots of each table, :data:`EMPTY` for none."""
    ids, columns = weights[f"{prefix}_ids"], weights.get(f"{prefix}_columns")
    if columns is None:
        return [*ids.split((LANES * weights[f"{prefix}_buckets"]).tolist())]
    salts = enumerate(weights[f"{prefix}_salts"])  # of tables that share the slots
    return [ids[(columns == table) & (ids != EMPTY)] ^ salt for table, salt in salts]


def _without(ids: Tensor, removed: Tensor) -> Tensor:
    """The ids that are not among others, ascending."""
    ids = ids[(ids != EMPTY) & ~torch.isin(ids, removed)]
    return ids.sort().values


def _total(counts: Mapping[str, int], kind: str) -> int:
    return sum(count for name, count in counts.items() if name.startswith(f"{kind}:"))


def _take_changed(
    full: Path, target: Path, before: Mapping[str, Any], after: Mapping[str, Any]
) -> list[str]:
    """Move the files that changed, except the weights, out of a directory, which is removed."""
    changed = [n for n, digest in after.items() if n != WEIGHTS and before.get(n) != digest]
    for name in changed:
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        (full / name).replace(target / name)
    shutil.rmtree(full)
    return changed


def _read_base(base: Path, options: ExportOptions) -> dict[str, Any]:
    """The manifest of the earlier export.

    Raises:
        ValueError: no delta can be made from it.
    """
    before = read_manifest(base)
    wrong = None
    if options.tables is not None or options.emb is not None:
        wrong = "a delta has the kinds and number format of its base: leave out --tables and --emb"
    elif before.get("tables") == "auto":
        wrong = "its tables were compressed after training, which changes every row: export in full"
    elif "onnx" in before or options.onnx:
        wrong = "ONNX has its own weights, for which there is no delta: export without --onnx"
    elif digest_of(base / WEIGHTS) != before["files"][WEIGHTS]:
        wrong = f"{WEIGHTS} is not that of {MANIFEST}; restore it, or export in full"
    if wrong:
        raise ValueError(f"--delta-from {base}: {wrong}")
    return before


def changes_between(
    old: Mapping[str, Tensor], new: Mapping[str, Tensor]
) -> tuple[dict[str, Tensor], dict[str, dict[str, Any]]]:
    """Compare tensors of the same names, bit for bit.

    Returns:
        What has changed: ``row_numbers:NAME`` and ``row_values:NAME``, or ``whole:NAME``. And for
        each tensor that has, by name, its ``shape``, and the rows to ``copy`` from the old tensor
        before the changed ones are written, as ``[from, to, rows]``; None for a whole tensor.
    """
    tensors: dict[str, Tensor] = {}
    described: dict[str, dict[str, Any]] = {}
    for name, value in new.items():
        spans = _spans(name, old, new)
        numbers = None if spans is None else _changed(old[name], value, spans)
        if numbers is not None and not len(numbers) and old[name].shape == value.shape:
            continue

        # Rows are stored with their numbers, unless all of them take less.
        described[name] = {"shape": list(value.shape), "copy": spans}
        if numbers is None or _bytes_of(numbers, value) > value.nbytes:
            described[name]["copy"] = None
            tensors[f"whole:{name}"] = value
        else:
            tensors[f"row_numbers:{name}"] = numbers
            tensors[f"row_values:{name}"] = value[numbers]
    return tensors, described


def _spans(
    name: str, old: Mapping[str, Tensor], new: Mapping[str, Tensor]
) -> list[list[int]] | None:
    """Where the rows of a tensor were, ``[from, to, rows]`` for each piece; None if nowhere."""
    # Rows of another width are not comparable.
    before, value = old[name], new[name]
    same = before.dtype == value.dtype and before.shape[1:] == value.shape[1:]
    if not same or not value.dim():
        return None
    if before.shape == value.shape:
        return [[0, 0, len(value)]]

    # A tensor with the rows of several tables, of which some have grown.
    group, _, rest = name.removeprefix("tables.").partition(".")
    starts = STARTS.get(rest.partition(".")[0])
    if starts is None:
        return None
    old_starts, new_starts = (side[f"tables.{group}.{starts}"].tolist() for side in (old, new))
    if len(old_starts) != len(new_starts):
        return None

    # Each table keeps the rows that it has on both sides.
    old_bounds = pairwise([*old_starts, len(before)])
    new_bounds = pairwise([*new_starts, len(value)])
    return [
        [old_start, new_start, min(old_end - old_start, new_end - new_start)]
        for (old_start, old_end), (new_start, new_end) in zip(old_bounds, new_bounds, strict=True)
    ]


def _changed(old: Tensor, new: Tensor, spans: list[list[int]]) -> Tensor:
    """The numbers of the new rows that differ from the old rows of ``spans``."""
    differ = torch.ones(len(new), dtype=torch.bool)
    for begin, to, rows in spans:
        for start in range(0, rows, CHUNK):
            size = min(CHUNK, rows - start)
            left = _bits(old[begin + start :][:size]).reshape(size, -1)
            right = _bits(new[to + start :][:size]).reshape(size, -1)
            differ[to + start :][:size] = (left != right).any(1)
    return differ.nonzero()[:, 0]


def _bytes_of(numbers: Tensor, values: Tensor) -> int:
    """The bytes of some rows and their numbers."""
    return numbers.nbytes + len(numbers) * (values.nbytes // max(len(values), 1))


def _bits(values: Tensor) -> Tensor:
    """Values as integers: NaN equals itself, and -0 does not equal 0."""
    return values.contiguous().view(INTEGERS[values.element_size()])
