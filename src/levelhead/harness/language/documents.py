"""Where texts come from: the ``datasets`` library, one's own files; nothing is downloaded here
but what ``datasets`` itself fetches when it is let.
"""

import logging
from collections.abc import Callable
from glob import glob
from pathlib import Path
from typing import Any

from levelhead.harness.recipe_parts import DatasetsText, TextFiles
from levelhead.shapes import require, require_known

_LOG = logging.getLogger(__name__)
MAX_LOST_FRAC = 0.01
BUILDERS = {".txt": "text", ".jsonl": "json", ".parquet": "parquet", ".arrow": "arrow"}
"""File ending to what ``datasets`` calls its reader."""

NO_REMOTE_CODE = 4  # from this major version on ``datasets`` runs no code of data sets


def open_documents(data: DatasetsText | TextFiles, is_training: bool) -> Any:
    """Open the training or the test part of some texts.

    Args:
        data: What the recipe says.
        is_training: Which part.

    Returns:
        A ``datasets.Dataset`` or ``IterableDataset`` with the text column alone.

    Raises:
        FileNotFoundError: It is not there; the message says how to put it there.
        ValueError: No such column, split or format.
    """
    documents = _OPENERS[type(data)](data, is_training)
    columns = documents.column_names
    if columns is None:  # a stream knows its columns only from its first document
        columns = list(next(iter(documents), {data.text_column: ""}))
    require(
        data.text_column in columns,
        "data.text_column must be a column of the texts",
        repr(data.text_column),
        ", ".join(columns),
    )
    return documents.select_columns([data.text_column])


def _from_datasets(data: DatasetsText, is_training: bool) -> Any:
    if data.test_split is not None:
        return _load(data, data.train_split if is_training else data.test_split)
    require(
        data.held_out > 0,
        "without data.test_split data.held_out must say how many documents are the test data",
        f"held_out={data.held_out}",
    )
    whole = _load(data, data.train_split)
    if data.streaming:
        return whole.skip(data.held_out) if is_training else whole.take(data.held_out)
    numbers = range(data.held_out, len(whole)) if is_training else range(data.held_out)
    return whole.select(numbers)


def _load(data: DatasetsText, split: str) -> Any:
    import datasets
    from datasets.exceptions import DatasetsError

    load: Any = datasets.load_dataset
    options: dict[str, Any] = {}
    if data.trust_remote_code:
        major = int(datasets.__version__.split(".")[0])
        require(
            major < NO_REMOTE_CODE,
            f"data.trust_remote_code needs datasets below {NO_REMOTE_CODE}, which ran such code",
            f"datasets {datasets.__version__}",
            "the data set converted to parquet, without trust_remote_code",
        )
        options["trust_remote_code"] = True
    try:
        return load(data.path, data.name, split=split, streaming=data.streaming, **options)
    except (OSError, DatasetsError) as error:
        raise _missing(data, error) from error
    except ValueError as error:
        if "cache" not in str(error):
            raise
        raise _missing(data, error) from error


def _missing(data: DatasetsText, error: Exception) -> FileNotFoundError:
    arguments = ", ".join(repr(a) for a in (data.path, data.name) if a is not None)
    reason = " ".join(str(error).split())[:200]
    return FileNotFoundError(
        f"cannot open the data set {data.path} ({reason}); with a network run "
        f'python -c "from datasets import load_dataset; load_dataset({arguments})" once, or '
        "give data.path=FOLDER with parquet files, or data.kind=text_files "
        "data.train=PATTERN data.test=PATTERN"
    )


def _from_files(data: TextFiles, is_training: bool) -> Any:
    import datasets
    from datasets.exceptions import DatasetsError

    pattern = data.train if is_training else data.test
    paths = sorted(glob(pattern))
    if not paths:
        part = "train" if is_training else "test"
        raise FileNotFoundError(
            f"no file matches data.{part}={pattern}: put .txt, .jsonl, .parquet or .arrow files "
            "there"
        )
    endings = {Path(path).suffix for path in paths}
    require(len(endings) == 1, f"the files {pattern} must end alike", ", ".join(sorted(endings)))
    ending = endings.pop()
    require_known("ending of text files", ending, BUILDERS)
    whole = _without_broken(paths, _CHECKS.get(ending))
    load: Any = datasets.load_dataset
    options = {"sample_by": "document"} if ending == ".txt" else {}
    try:
        return load(
            BUILDERS[ending], data_files={"train": whole}, split="train",
            streaming=data.streaming, **options,
        )  # fmt: skip
    except DatasetsError as error:
        cause = " ".join(str(error.__cause__ or error).split())[:200]
        raise ValueError(f"the files {pattern} cannot be read: {cause}") from error


def _without_broken(paths: list[str], check: Callable[[str], object] | None) -> list[str]:
    """Leave broken files out, say so, and refuse where they hold more than 1 % of all bytes."""
    broken: dict[str, str] = {}
    for path in paths if check else ():
        try:
            check(path)  # pyright: ignore[reportOptionalCall]
        except (OSError, ValueError) as error:  # pyarrow's errors are ValueErrors
            broken[path] = " ".join(str(error).split())[:120]
            _LOG.warning("skipped a broken file: %s (%s)", path, broken[path])
    sizes = {path: Path(path).stat().st_size for path in paths}
    lost_frac = sum(sizes[path] for path in broken) / max(1, sum(sizes.values()))
    first = next(iter(broken.items()), ("", ""))
    require(
        lost_frac <= MAX_LOST_FRAC and len(broken) < len(paths),
        f"at most {MAX_LOST_FRAC:.0%} of the bytes may lie in broken files",
        f"{lost_frac:.1%} in {len(broken)} of {len(paths)}, the first {first[0]}: {first[1]}",
    )
    return [path for path in paths if path not in broken]


def _check_parquet(path: str) -> None:
    import pyarrow.parquet

    pyarrow.parquet.ParquetFile(path).close()


def _check_arrow(path: str) -> None:
    import pyarrow as pa

    with pa.memory_map(path) as source:
        pa.ipc.open_stream(source)


_CHECKS: dict[str, Callable[[str], object]] = {
    ".parquet": _check_parquet,
    ".arrow": _check_arrow,
}

_OPENERS: dict[type, Callable[[Any, bool], Any]] = {
    DatasetsText: _from_datasets,
    TextFiles: _from_files,
}
