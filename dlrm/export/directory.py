"""The directory of an export, which needs nothing of this package: see docs/export.md."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.export import ExportedProgram

import dlrm
from dlrm.data.prepare.fingerprint import other_data
from dlrm.data.prepare.model_inputs import PREPARATION
from dlrm.data.prepare.raw_rows import keep_transform
from dlrm.data.schema import META_FILE, Meta
from dlrm.export.inference import InferenceModel
from dlrm.export.programs import compile_program, save_onnx, save_program, save_weights, trace
from dlrm.export.reader import PACKAGE, copy_reader
from dlrm.model import DLRM
from dlrm.training.checkpoint import Checkpoint
from dlrm.training.checkpoint.manifest import RunState
from dlrm.training.fine_tuning import compress
from dlrm.training.run_directory import PREPARATION as KEPT
from dlrm.training.run_directory import run_directory
from dlrm.utils.atomic import atomic_directory, atomic_write
from dlrm.utils.documents import read_json

FORMAT, VERSION = "dlrm export", 1
MANIFEST = "manifest.json"
WEIGHTS = "weights.safetensors"
PROGRAM = "model.pt2"
ONNX = "model.onnx"
"""Names of the files."""


def compiled_file(device: str) -> str:
    """The name of the program that is compiled for ``cpu`` or ``cuda``."""
    return f"model_{device}.pt2"


@dataclass(frozen=True, kw_only=True)
class ExportOptions:
    """What to export of a run, and as what."""

    tables: str | None = None
    """Number format of the rows of tables: fp32, bf16, int8 or int4. None: fp32, or what ``emb``
    chose."""
    emb: str | None = None
    """Compress the trained tables by this kind, or by auto."""
    budget: str | None = None
    """Memory for all tables, with ``emb``."""
    devices: Sequence[str] = ("cpu",)
    """Compile ahead of time for ``cpu`` and ``cuda``."""
    onnx: bool = False
    last: bool = False
    """Of a run, take the latest checkpoint, not the best."""
    data: Path | None = None
    """The prepared data, for a run that has not kept how raw rows are prepared."""


def export_run(
    run: Path, output: Path, options: ExportOptions, *, note: Callable[[str], object] = print
) -> dict[str, Any]:
    """Export a trained model. The directory is there completely or not at all.

    Args:
        run: run directory, or a checkpoint in it.
        output: directory to make.
        options: what to export.
        note: is told each file that is made.

    Returns:
        The manifest.

    Raises:
        FileNotFoundError: there is no checkpoint or data.
        ValueError: ``output`` exists, the run is damaged, or an option does not fit it.
    """
    if output.exists():
        raise ValueError(f"{output} exists: name another directory, or remove it")
    contents, kept = open_run(run, options)
    with atomic_directory(output) as temporary:
        manifest = contents.write(temporary, kept, note)
        write_manifest(manifest, temporary)
    return manifest


def open_run(run: Path, options: ExportOptions) -> tuple[Contents, Path | None]:
    """What an export of a run has in it.

    Returns:
        The contents, and the directory that keeps how raw rows are prepared, if there is one.

    Raises:
        FileNotFoundError, ValueError: see :func:`export_run`.
    """
    kept = run_directory(run) / KEPT
    with Checkpoint.open(run, best=not options.last) as found:
        model, state, identity = found.build_model(), found.state, found.run
    directory, meta = _described(kept, options.data, state, model)
    if options.emb is not None:
        if options.budget is None:
            kind = f"--emb {options.emb}"
            raise ValueError(f"{kind} needs --budget, such as --budget 20MB or --budget 100x")
        dtype = state.model.get("tables_dtype", "fp32")
        data = directory, meta
        model = compress(model, state.model, data, options.emb, options.budget, dtype)
    elif options.budget is not None:
        raise ValueError("--budget needs --emb, the kind to compress by: add --emb auto")
    contents = Contents(model, state, meta, identity, options)
    return contents, kept if directory == kept else None


def _described(kept: Path, data: Path | None, state: RunState, model: DLRM) -> tuple[Path, Meta]:
    """The directory that describes the columns of a model, and what it says.

    Raises:
        FileNotFoundError, ValueError: there is none, or it is of other columns.
    """
    directory = kept if kept.is_dir() else data
    if directory is None:
        given = state.config.get("data")
        directory = Path(given) if isinstance(given, str) else None
    if directory is None or not (directory / META_FILE).is_file():
        raise ValueError(
            f"{kept} does not exist, and {directory} has no {META_FILE} either: name the prepared "
            "data of the run with --data"
        )
    meta, arch = Meta.read(directory), model.sparse_arch
    same = meta.cardinalities == arch.num_embeddings and len(meta.dense) == model.num_dense
    if not same or state.fingerprint not in (None, meta.fingerprint):
        raise other_data(directory, "the model", "name the prepared data with --data")
    return directory, meta


class Contents:
    """What goes into the directory."""

    def __init__(
        self, model: DLRM, state: RunState, meta: Meta, run: str, options: ExportOptions
    ) -> None:
        self._options, self._meta = options, meta
        kinds = {
            feature: group.kind()
            for group, features in model.sparse_arch.embeddings()
            for feature in features
        }
        lists = [column.multi_hot for column in meta.categorical]
        self._manifest: dict[str, Any] = {
            "format": FORMAT,
            "version": VERSION,
            "made_by": {"dlrm": dlrm.__version__, "torch": torch.__version__},
            "run": run,
            "step": state.steps,
            "trained_in": state.config.get("precision", "fp32"),
            "tables": options.tables or ("auto" if options.emb else "fp32"),
            "inputs": _inputs(meta),
            "output": {"name": "probability", "dtype": "float32", "shape": ["batch"]},
            "label": meta.label,
            "dense": list(meta.dense),
            "categorical": [
                {
                    "name": column.name,
                    "rows": column.cardinality,
                    "multi_hot": column.multi_hot,
                    "oov_id": column.oov_id,
                    "kind": kinds[index],
                }
                for index, column in enumerate(meta.categorical)
            ],
        }
        precision = options.tables or (None if options.emb else "fp32")
        self._model = InferenceModel(model, lists, precision=precision)

    def trace(self) -> ExportedProgram:
        """The model as a program."""
        return trace(self._model, len(self._meta.dense))

    def write(
        self,
        directory: Path,
        kept: Path | None,
        note: Callable[[str], object],
        *,
        program: ExportedProgram | None = None,
        programs: bool = True,
    ) -> dict[str, Any]:
        """Write all files but the manifest, which is returned.

        Args:
            directory: gets the files.
            kept: the directory that keeps how raw rows are prepared.
            note: is told each file that is made.
            program: that of :meth:`trace`, if it is there already.
            programs: write the programs, not the weights alone.
        """
        made = dict[str, Any](self._manifest)
        program = program or self.trace()
        weights = {name: value.contiguous() for name, value in program.state_dict.items()}
        _require_finite(weights)
        save_weights(weights, directory / WEIGHTS)
        sizes = {n: v.nbytes for n, v in weights.items() if n.startswith("tables.")}
        made["bytes_of_tables"] = sum(sizes.values())
        made["weights"] = WEIGHTS
        note(f"{WEIGHTS}: {sum(v.nbytes for v in weights.values()):,} bytes")
        if programs:
            save_program(program, directory / PROGRAM)
            note(f"{PROGRAM}: for torch.export.load")
        made["program"] = PROGRAM
        made["compiled"] = {}
        for device in self._options.devices if programs else ():
            compile_program(program, directory / compiled_file(device), device)
            made["compiled"][device] = compiled_file(device)
            note(f"{compiled_file(device)}: compiled for {device}")
        if self._options.onnx:
            save_onnx(program, directory / ONNX)
            made["onnx"] = ONNX
            note(f"{ONNX}: for ONNX Runtime and others")
        made["raw_rows"] = kept is not None
        if kept is not None:
            keep_transform(kept, directory / PREPARATION)
            copy_reader(directory)
            note(f"{PREPARATION}/, {PACKAGE}/: to read raw rows")
        made["files"] = _digests(directory)
        return made


def _require_finite(weights: Mapping[str, Tensor]) -> None:
    """Check that no weight is NaN or infinite.

    Raises:
        ValueError: one is.
    """
    for name, value in weights.items():
        if not value.is_floating_point() or not value.numel():
            continue
        if not torch.stack(value.aminmax()).isfinite().all():
            raise ValueError(
                f"{name} has a weight that is NaN or infinite, as the training diverged: export an "
                "earlier checkpoint, or train with a lower --optim.lr"
            )


def read_manifest(export: Path) -> dict[str, Any]:
    """The manifest of an export.

    Raises:
        ValueError: it is missing or damaged.
    """
    path = export / MANIFEST
    if not path.is_file():
        raise ValueError(f"{export} has no {MANIFEST}: name an export")
    manifest = read_json(path)
    try:
        known = (manifest["format"], manifest["version"]) == (FORMAT, VERSION)
        used = (WEIGHTS, PROGRAM, *manifest["compiled"].values())
        known &= all(isinstance(manifest["files"][name]["sha256"], str) for name in used)
        known &= isinstance(manifest["tables"], str)
    except (LookupError, TypeError, AttributeError):
        known = False
    if not known:
        raise ValueError(f"{path} is damaged, or of another format: restore it, or export in full")
    return dict(manifest)


def write_manifest(manifest: Mapping[str, Any], directory: Path) -> None:
    """Write the manifest, the last of the files, which lists the others."""
    with atomic_write(directory / MANIFEST) as temporary:
        temporary.write_text(as_text(manifest))


def as_text(manifest: Mapping[str, Any]) -> str:
    """A manifest as it is written."""
    return json.dumps(manifest, indent=2) + "\n"


def _inputs(meta: Meta) -> list[Mapping[str, Any]]:
    """The inputs of the programs, in order."""
    single = [column.name for column in meta.categorical if not column.multi_hot]
    inputs: list[Mapping[str, Any]] = [
        {"name": "dense", "dtype": "float32", "shape": [len(meta.dense), "batch"]},
        {"name": "ids", "dtype": "int64", "shape": [len(single), "batch"], "columns": single},
    ]
    for column in meta.categorical:
        if column.multi_hot:
            values = {"name": f"{column.name}.values", "dtype": "int64", "shape": ["nnz"]}
            offsets = {"name": f"{column.name}.offsets", "dtype": "int64", "shape": ["batch + 1"]}
            inputs += [values, offsets]
    return inputs


def _digests(directory: Path) -> dict[str, Any]:
    """Bytes and SHA-256 of all files, by their path in the directory."""
    paths = sorted(path for path in directory.rglob("*") if path.is_file())
    return {path.relative_to(directory).as_posix(): digest_of(path) for path in paths}


def digest_of(path: Path) -> dict[str, Any]:
    """Bytes and SHA-256 of a file."""
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    return {"bytes": path.stat().st_size, "sha256": digest}
