"""The directory of an export, which does not need this package; see docs/export.md."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import dlrm
from dlrm.data.prepare.fingerprint import other_data
from dlrm.data.prepare.raw_rows import PREPARATION, keep_transform
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
    """The parts of an export, and how its tables are stored."""

    tables: str | None = None
    """Number format of the rows of tables: fp32, bf16, int8 or int4. None: fp32, or the formats
    that ``emb`` chose."""
    emb: str | None = None
    """Compress the trained tables by this kind, or by auto."""
    budget: str | None = None
    """Memory for all tables, with ``emb``."""
    devices: Sequence[str] = ("cpu",)
    """Compile ahead of time for ``cpu`` and ``cuda``."""
    onnx: bool = False
    last: bool = False
    """Take the latest checkpoint of a run, not the best one."""
    data: Path | None = None
    """The prepared data, for a run that has no copy of its preparation."""


def export_run(run: Path, output: Path, options: ExportOptions) -> dict[str, Any]:
    """Export a trained model, and print a line for each file. The directory appears when it is
    complete.

    Args:
        run: run directory, or a checkpoint in it.
        output: directory to make.
        options: the parts of the export.

    Returns:
        The manifest.

    Raises:
        FileNotFoundError: there is no checkpoint or data.
        ValueError: ``output`` exists, the run is damaged, a weight is NaN, or an option does not
            fit the run.
    """
    if output.exists():
        raise ValueError(f"{output} exists: name another directory, or remove it")
    exporter = open_run(run, options)
    with atomic_directory(output) as temporary:
        manifest = exporter.write(temporary, print)
        # The last of the files, as it lists the others.
        with atomic_write(temporary / MANIFEST) as path:
            path.write_text(as_text(manifest))
    return manifest


def open_run(run: Path, options: ExportOptions) -> Exporter:
    """Load a trained model to export it.

    Raises:
        FileNotFoundError, ValueError: see :func:`export_run`.
    """
    # The model, and the run's own copy of what describes its data.
    kept = run_directory(run) / KEPT
    with Checkpoint.open(run, best=not options.last) as checkpoint:
        model, state, identity = checkpoint.build_model(), checkpoint.state, checkpoint.run
    directory, meta = _data_of(kept, options.data, state, model)

    if options.emb is not None:
        if options.budget is None:
            kind = f"--emb {options.emb}"
            raise ValueError(f"{kind} needs --budget, such as --budget 20MB or --budget 100x")
        dtype = state.model.get("tables_dtype", "fp32")
        data = directory, meta
        model = compress(model, state.model, data, options.emb, options.budget, dtype)
    elif options.budget is not None:
        raise ValueError("--budget needs --emb, the kind to compress by: add --emb auto")

    # Its description names the kinds of the tables, which are plain look-ups afterwards.
    description = _description(model, state, meta, identity, options)
    multi_hot = [column.multi_hot for column in meta.categorical]
    precision = options.tables or (None if options.emb else "fp32")
    inference = InferenceModel(model, multi_hot, precision=precision)
    return Exporter(
        model=inference,
        num_dense=len(meta.dense),
        description=description,
        preparation=kept if directory == kept else None,
        options=options,
    )


def _data_of(kept: Path, data: Path | None, state: RunState, model: DLRM) -> tuple[Path, Meta]:
    """The directory with the ``meta.json`` of a model's data, and its content.

    Args:
        kept: the run's copy of its preparation, which is used if it exists.
        data: the prepared data that the user named.
        state: its configuration names the data otherwise.
        model: the trained model, whose columns are compared.

    Raises:
        FileNotFoundError, ValueError: there is none, or it has other columns.
    """
    directory = kept if kept.is_dir() else data
    if directory is None:
        configured = state.config.get("data")
        directory = Path(configured) if isinstance(configured, str) else None
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


def _description(
    model: DLRM, state: RunState, meta: Meta, run: str, options: ExportOptions
) -> dict[str, Any]:
    """The entries of a manifest that say what the model is."""
    groups, features = model.sparse_arch.embeddings(), model.sparse_arch.feature_order.groups
    kinds = {f: group.kind() for (group, _), fs in zip(groups, features, strict=True) for f in fs}
    columns = [
        {
            "name": column.name,
            "rows": column.cardinality,
            "multi_hot": column.multi_hot,
            "oov_id": column.oov_id,
            "kind": kinds[index],
        }
        for index, column in enumerate(meta.categorical)
    ]

    return {
        # The export.
        "format": FORMAT,
        "version": VERSION,
        "made_by": {"dlrm": dlrm.__version__, "torch": torch.__version__},
        "run": run,
        "step": state.steps,
        "trained_in": state.config.get("precision", "fp32"),
        "tables": options.tables or ("auto" if options.emb else "fp32"),
        # Inputs and outputs.
        "inputs": _inputs(meta),
        "output": {"name": "probability", "dtype": "float32", "shape": ["batch"]},
        "label": meta.label,
        "dense": list(meta.dense),
        "categorical": columns,
    }


def _inputs(meta: Meta) -> list[dict[str, Any]]:
    """The inputs of the programs, in order."""
    single = [column.name for column in meta.categorical if not column.multi_hot]
    inputs: list[dict[str, Any]] = [
        {"name": "dense", "dtype": "float32", "shape": [len(meta.dense), "batch"]},
        {"name": "ids", "dtype": "int64", "shape": [len(single), "batch"], "columns": single},
    ]
    for column in meta.categorical:
        if column.multi_hot:
            for part, size in (("values", "nnz"), ("offsets", "batch + 1")):
                name = f"{column.name}.{part}"
                inputs.append({"name": name, "dtype": "int64", "shape": [size]})
    return inputs


@dataclass(frozen=True, kw_only=True)
class Exporter:
    """Writes a trained model as the files of an export."""

    model: InferenceModel
    num_dense: int
    description: dict[str, Any]
    """Entries of the manifest that say what the model is."""
    preparation: Path | None
    """Directory with the transformations of raw rows; None if there is none."""
    options: ExportOptions

    @property
    def weights(self) -> dict[str, Tensor]:
        """All weights by name."""
        return {name: value.contiguous() for name, value in self.model.state_dict().items()}

    def write(
        self, directory: Path, note: Callable[[str], object], *, programs: bool = True
    ) -> dict[str, Any]:
        """Write all files except the manifest.

        Args:
            directory: gets the files.
            note: called with a line for each file.
            programs: write the programs too, not the weights alone.

        Returns:
            The manifest.

        Raises:
            ValueError: a weight is NaN or infinite.
        """
        weights = self.weights
        _require_finite(weights)
        save_weights(weights, directory / WEIGHTS)
        note(f"{WEIGHTS}: {sum(v.nbytes for v in weights.values()):,} bytes")

        tables = [value for name, value in weights.items() if name.startswith("tables.")]
        manifest = self.description | {
            "bytes_of_tables": sum(value.nbytes for value in tables),
            "weights": WEIGHTS,
            "program": PROGRAM,
            "compiled": {},
        }
        if programs:
            self._write_programs(directory, manifest, note)

        manifest["raw_rows"] = self.preparation is not None
        if self.preparation is not None:
            keep_transform(self.preparation, directory / PREPARATION)
            copy_reader(directory)
            note(f"{PREPARATION}/, {PACKAGE}/: to read raw rows")

        paths = sorted(path for path in directory.rglob("*") if path.is_file())
        manifest["files"] = {p.relative_to(directory).as_posix(): digest_of(p) for p in paths}
        return manifest

    def _write_programs(
        self, directory: Path, manifest: dict[str, Any], note: Callable[[str], object]
    ) -> None:
        """Write the program in all forms, and name them in the manifest."""
        program = trace(self.model, self.num_dense)
        save_program(program, directory / PROGRAM)
        note(f"{PROGRAM}: for torch.export.load")
        for device in self.options.devices:
            compile_program(program, directory / compiled_file(device), device)
            manifest["compiled"][device] = compiled_file(device)
            note(f"{compiled_file(device)}: compiled for {device}")
        if self.options.onnx:
            save_onnx(program, directory / ONNX)
            manifest["onnx"] = ONNX
            note(f"{ONNX}: for ONNX Runtime and others")


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
        readable = (manifest["format"], manifest["version"]) == (FORMAT, VERSION)
        used = (WEIGHTS, PROGRAM, *manifest["compiled"].values())
        readable &= all(isinstance(manifest["files"][name]["sha256"], str) for name in used)
        readable &= isinstance(manifest["tables"], str)
    except (LookupError, TypeError, AttributeError):
        readable = False
    if not readable:
        raise ValueError(f"{path} is damaged, or of another format: restore it, or export in full")
    return dict(manifest)


def as_text(manifest: Mapping[str, Any]) -> str:
    """A manifest as it is written."""
    return json.dumps(manifest, indent=2) + "\n"


def digest_of(path: Path) -> dict[str, Any]:
    """Bytes and SHA-256 of a file."""
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    return {"bytes": path.stat().st_size, "sha256": digest}
