"""Apply a delta of an export: ``python examples/apply_delta.py EXPORT DELTA OUTPUT``.

EXPORT is the export that the delta was made from (``dlrm export --delta-from``). OUTPUT is a
new directory, the same as a full export of the newer model. Another export and damaged files are
refused. The program needs PyTorch and safetensors only.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import shutil
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

MANIFEST, WEIGHTS = "manifest.json", "weights.safetensors"
DELTA, ROWS, FILES = "delta.json", "rows.safetensors", "files"
JSON_BYTES = 64 << 20  # of a manifest or the description of a delta


def apply_delta(base: Path, delta: Path, output: Path) -> None:
    """Make the newer export. The directory appears when it is complete.

    Args:
        base: the export that the delta was made from; it is not changed.
        delta: the delta.
        output: directory to make.

    Raises:
        ValueError: ``base`` is another export, a file is damaged, or ``output`` exists.
        OSError: a file can't be read or written.
    """
    if output.exists():
        raise ValueError(f"{output} exists: name another directory, or remove it")
    if not (delta / DELTA).is_file():
        made = f"dlrm export RUN {delta} --delta-from {base}"
        raise ValueError(f"{delta} is no delta: make one with {made}")
    described = read_delta(delta)
    if digest_of(base / MANIFEST) != described["base"]:
        why = _not_its_base(base, described)
        raise ValueError(
            f"{delta} was made from another export than {base}{why}: name that one, or export in "
            "full"
        )
    before, after = read_object(base / MANIFEST)["files"], described["result"]["files"]
    for name in after:
        if ".." in Path(name).parts or Path(name).is_absolute():
            raise ValueError(f"{delta / DELTA} names {name!r}, which is in another directory")

    temporary = output.with_name(output.name + ".tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    try:
        for name in after:
            if name != WEIGHTS:
                taken = name in described["taken"]
                (temporary / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile((delta / FILES if taken else base) / name, temporary / name)

        _require(base / WEIGHTS, before[WEIGHTS])
        _require(delta / ROWS, described["rows"])
        weights = new_weights(
            load_file(base / WEIGHTS), load_file(delta / ROWS), described["tensors"]
        )
        save_file(weights, temporary / WEIGHTS, {"format": "pt"})
        shutil.copymode(base / MANIFEST, temporary / WEIGHTS)  # safetensors makes it private

        # The result must be the export that the delta describes.
        for name, digest in after.items():
            _require(temporary / name, digest)
        text = json.dumps(described["result"], indent=2) + "\n"
        (temporary / MANIFEST).write_text(text)
        if hashlib.sha256(text.encode()).hexdigest() != described["result_sha256"]:
            raise ValueError(f"{delta / DELTA} is damaged: copy it again")
        temporary.replace(output)
    except BaseException:
        with suppress(OSError):  # the first error is the one to report
            shutil.rmtree(temporary)
        raise


def new_weights(
    old: dict[str, Tensor], given: dict[str, Tensor], described: dict[str, Any]
) -> dict[str, Tensor]:
    """The weights of the newer export.

    Args:
        old: the weights of the earlier one.
        given: ``row_numbers:NAME [n]`` and ``row_values:NAME [n, ...]``, or ``whole:NAME``.
        described: for each tensor that changed, its ``shape`` and the rows to ``copy`` from the old
            one, as ``[from, to, rows]``; None for a tensor that is stored whole.
    """
    weights = dict(old)
    for name, entry in described.items():
        if entry["copy"] is None:
            weights[name] = given[f"whole:{name}"]
            continue
        new = torch.empty(entry["shape"], dtype=old[name].dtype)
        for begin, to, rows in entry["copy"]:
            new[to : to + rows] = old[name][begin : begin + rows]
        new[given[f"row_numbers:{name}"]] = given[f"row_values:{name}"]
        weights[name] = new
    return weights


def read_delta(delta: Path) -> dict[str, Any]:
    """What ``delta.json`` says.

    Raises:
        ValueError: it is damaged, or of another format or version.
        OSError: it can't be read.
    """
    described = read_object(delta / DELTA)
    if (described.get("format"), described.get("version")) != ("dlrm export delta", 1):
        raise ValueError(f"{delta / DELTA} is not a delta that this program can read")
    return described


def _not_its_base(base: Path, described: dict[str, Any]) -> str:
    """Why an export is not the one that a delta was made from, if that is known."""
    if digest_of(base / MANIFEST)["sha256"] == described["result_sha256"]:
        return ", which has it already"
    here, start = read_object(base / MANIFEST), described.get("from", {})
    if here["run"] != start.get("run"):
        return ""
    steps = f", from step {start['step']} of the run, and that is at step {here['step']}"
    return steps + (", so deltas between them are missing" * (start["step"] > here["step"]))


def digest_of(path: Path) -> dict[str, Any]:
    """Bytes and SHA-256 of a file."""
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    return {"bytes": path.stat().st_size, "sha256": digest}


def _require(path: Path, digest: dict[str, Any]) -> None:
    """Raise if a file is not the one that was written."""
    if digest_of(path) != digest:
        raise ValueError(f"{path} is damaged, or not the file that was exported: copy it again")


def read_object(path: Path) -> dict[str, Any]:
    """The content of a JSON file, which has some kilobytes for each table."""
    if (size := path.stat().st_size) > JSON_BYTES:
        raise ValueError(f"{path} has {size:,} bytes, more than {JSON_BYTES:,}: copy it again")
    try:
        content = json.loads(path.read_text())
        if not isinstance(content, dict):
            raise ValueError("it holds no object")
    except RecursionError:
        raise ValueError(f"{path} is damaged: it is nested too deep; copy it again") from None
    except ValueError as error:
        raise ValueError(f"{path} is damaged: {error}; copy it again") from None
    return content


def main() -> int:
    """Run the program; returns the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    base = "export that the delta was made from"
    parser.add_argument("export", metavar="EXPORT", type=Path, help=base)
    parser.add_argument("delta", metavar="DELTA", type=Path, help="the delta")
    parser.add_argument("output", metavar="OUTPUT", type=Path, help="directory to make")
    options = parser.parse_args()
    try:
        apply_delta(options.export, options.delta, options.output)
    except (OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except (LookupError, TypeError, AttributeError, RuntimeError, SafetensorError) as error:
        why = " ".join(f"{type(error).__name__}: {error}".split())
        print(f"error: {options.delta} is damaged ({why:.200}): copy it again", file=sys.stderr)
        return 2
    print(f"{options.output} is the newer export")
    return 0


if __name__ == "__main__":
    sys.exit(main())
