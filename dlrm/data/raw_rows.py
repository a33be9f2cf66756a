"""Raw rows prepared like the data that a model was trained on: whichever program prepared that."""

from __future__ import annotations

import os
from pathlib import Path

from dlrm.data.preprocess.transform import CriteoTransform
from dlrm.data.schema import META_FILE, Meta
from dlrm.data.table.transform import TRANSFORM_FILE, TableTransform


def load_transform(directory: str | os.PathLike[str]) -> TableTransform | CriteoTransform:
    """The transform of a prepared directory, or of a copy of its :func:`transform_files`.

    Example::

        transform = load_transform("data/mine")
        for rows, kept in transform.read(["new.csv"], keep=["row_id"]):
            ...  # rows: label if the file has one, dense and categorical columns as in meta.json

    Raises:
        FileNotFoundError: the directory has none.
        ValueError: it was not made from raw rows, or a file is damaged.
    """
    if (Path(directory) / TRANSFORM_FILE).is_file():
        return TableTransform.load(directory)
    return CriteoTransform.load(directory)


def transform_files(directory: str | os.PathLike[str]) -> list[Path]:
    """The files of a prepared directory, relative to it, that :func:`load_transform` needs.

    Raises:
        FileNotFoundError: the directory has no ``meta.json``.
        ValueError: the data was not made from raw rows.
    """
    meta, files = Meta.read(directory), [Path(META_FILE)]
    if (Path(directory) / TRANSFORM_FILE).is_file():
        files.append(Path(TRANSFORM_FILE))
    elif "dense_transform" not in meta.options:
        raise ValueError(
            f"{Path(directory) / META_FILE} was not made from raw rows by prepare_table.py or "
            "prepare_criteo.py: only prepared rows can be scored"
        )
    return files + [Path(Meta.vocabulary_file(name)) for name in meta.tables]
