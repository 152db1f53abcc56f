"""Data sets on disk: flat files of equally long rows, one per tensor of a sample, described by ``dataset.json``.

::

    {"samples": 704, "parts": [{"name": "latents", "file": "latents.bin", "dtype": "float16",
                                "shape": [4, 16, 32, 32], "rows": 704}]}

Sample i is row i modulo ``rows`` of every part, so large tensors that need no variety (captions) may have fewer rows
than there are samples.  A part of dtype ``video`` is a folder of video files: one row per file, in the order of their
names.  They are decoded by PyAV (the extra ``video``) when a sample is read.  perfsuite generates such folders, and
reads those of users in the same form.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from perfsuite.base.errors import InvalidParameter
from perfsuite.models.base import Sampled, SampleTensor

if TYPE_CHECKING:
    import numpy.typing as npt


_CODECS = ("libx264", "mpeg4")  # Codecs to write with, in order of preference
_RATE = 24  # Frames per second


def has_codec() -> bool:
    """Return whether video files can be decoded here."""
    return importlib.util.find_spec("av") is not None


def _av() -> Any:
    import av  # type: ignore[import-not-found,unused-ignore] # an extra

    return av


def require_video_files(folder: Path, rows: int) -> None:
    """Raise InvalidParameter unless ``folder`` has ``rows`` video files and they can be decoded here."""
    files = len(_video_files(folder)) if folder.is_dir() else -1
    if files < rows:
        state = f"has {files} video files" if files >= 0 else "is not a folder"
        raise InvalidParameter(f"{folder} {state}, and the data set counts {rows}; copy them again")
    if not has_codec():
        raise InvalidParameter(
            f"{folder} has video files, and PyAV, which decodes them, is not installed; "
            "install it with pip install 'perfsuite[video]', or give raw frames of dtype uint8"
        )


def _video_files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.iterdir() if path.is_file() and not path.name.startswith("."))


class Clips(Sequence["npt.NDArray[np.uint8]"]):
    """The video files of a folder as rows of one shape."""

    def __init__(self, folder: Path, shape: tuple[int, ...]) -> None:
        """Read rows of ``shape``: (3, frames, height, width)."""
        self._files = _video_files(folder)
        self._shape = shape

    def __len__(self) -> int:
        return len(self._files)

    def __getitem__(self, index: Any) -> Any:
        """Return the first frames of one file, scaled to the shape's height and width; 0 to 255."""
        av, file = _av(), self._files[index]
        _, frames, height, width = self._shape
        try:
            with av.open(str(file)) as container:
                if not container.streams.video:
                    raise InvalidParameter(f"{file} has no video in it; give a video file, or leave it out")
                container.streams.video[0].thread_type = "NONE"  # one thread per loader
                decoded = []
                for frame in container.decode(video=0):
                    decoded.append(frame.reformat(width=width, height=height, format="rgb24").to_ndarray())
                    if len(decoded) == frames:
                        break
        except (av.FFmpegError, OSError) as error:
            raise InvalidParameter(f"{file} cannot be decoded: {error}; give a video file, or leave it out") from None
        if len(decoded) < frames:
            raise InvalidParameter(
                f"{file} has {len(decoded)} frames, and a sample needs {frames}; give longer videos, or leave it out"
            )
        return np.stack(decoded).transpose(3, 0, 1, 2)


def write_video(file: Path, shape: tuple[int, ...], *, seed: int) -> None:
    """Write a video of (3, frames, height, width): moving waves with some noise, so that coding has work to do."""
    av = _av()
    _, frames, height, width = shape
    random = np.random.default_rng(seed)
    across, down = np.meshgrid(np.arange(width), np.arange(height))
    waves = random.uniform(0.01, 0.2, (3, 3))
    with av.open(str(file), "w", format="mp4") as container:
        codec = next(name for name in _CODECS if name in av.codecs_available)
        stream = container.add_stream(codec, rate=_RATE)
        stream.width, stream.height, stream.pix_fmt = width, height, "yuv420p"
        stream.thread_count = 1
        for time in range(frames):
            phases = across[..., None] * waves[0] + down[..., None] * waves[1] + 10 * time * waves[2]
            picture = 127.5 + 100 * np.sin(phases) + random.normal(0, 8, (height, width, 3))
            frame = av.VideoFrame.from_ndarray(picture.clip(0, 255).astype(np.uint8), format="rgb24")
            container.mux(stream.encode(frame))
        container.mux(stream.encode())


INDEX = "dataset.json"
_DTYPES = ("uint8", "uint16", "int32", "int64", "float16", "float32")
VIDEO = "video"
_FEW_ROWS = 16  # Rows of generated captions, which take a megabyte each at the published size
_FEW_VIDEOS = 64  # Generated video files, which take a third of a second each at the published size


@dataclass(frozen=True, kw_only=True)
class TensorFile:
    """The file of one tensor of all samples."""

    name: str
    file: str  # Name of its file, or of the folder of its video files
    dtype: str  # A numpy dtype, or ``video``
    shape: tuple[int, ...]  # Shape of one row
    rows: int

    @property
    def row_bytes(self) -> int:
        """Bytes of one row."""
        return int(np.prod(self.shape, dtype=np.int64)) * np.dtype(self.dtype).itemsize


@dataclass(frozen=True, kw_only=True)
class Dataset:
    """A folder that was read and is complete."""

    directory: Path
    samples: int
    tables: tuple[TensorFile, ...]

    def open(self) -> Mapping[str, Any]:
        """Return the rows by part, memory-mapped or as video files; a row is read on access."""
        return {table.name: self._rows(table) for table in self.tables}

    def _rows(self, table: TensorFile) -> Any:
        path = self.directory / table.file
        if table.dtype == VIDEO:
            return Clips(path, table.shape)
        return np.memmap(path, dtype=table.dtype, mode="r").reshape(-1, *table.shape)


def generate(model: Sampled, directory: Path, samples: int, *, as_video: bool = False) -> Dataset:
    """Return the folder with ``samples`` random samples for ``model``; writes it unless it exists already.
    ``as_video``: write pixels as video files, which are decoded on reading, else as raw frames.  The folder gets its
    name once it is complete, so several processes may write the same one.
    """
    if _holds(directory, model, samples):
        return read(directory, model)
    directory.parent.mkdir(parents=True, exist_ok=True)
    draft = Path(tempfile.mkdtemp(prefix=f".{directory.name}.", dir=directory.parent))
    try:
        tables = [
            _write_video(part, draft, samples) if part.pixels and as_video else _write(part, draft, samples, seed)
            for seed, part in enumerate(_stored(model))
        ]
        parts = [{**vars(table), "shape": list(table.shape)} for table in tables]
        (draft / INDEX).write_text(json.dumps({"samples": samples, "parts": parts}, indent=1))
        try:
            os.replace(draft, directory)
        except OSError:  # another process was faster, or a different folder has this name
            if not _holds(directory, model, samples):
                shutil.rmtree(directory)
                os.replace(draft, directory)
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    return read(directory, model)


def _holds(directory: Path, model: Sampled, samples: int) -> bool:
    try:
        return read(directory, model).samples == samples
    except InvalidParameter:
        return False


def _stored(model: Sampled) -> list[SampleTensor]:
    return [part for part in model.parts if part.stored]


def _write_video(part: SampleTensor, directory: Path, samples: int) -> TensorFile:
    (directory / part.name).mkdir()
    rows = min(samples, _FEW_VIDEOS)
    for row in range(rows):
        write_video(directory / part.name / f"{row:06d}.mp4", part.shape, seed=row)
    return TensorFile(name=part.name, file=part.name, dtype=VIDEO, shape=part.shape, rows=rows)


def _write(part: SampleTensor, directory: Path, samples: int, seed: int) -> TensorFile:
    rows = min(samples, _FEW_ROWS) if part.name == "caption" else samples
    below = 256 if part.pixels else part.below
    dtype = "uint8" if part.pixels else ("uint16" if below <= 1 << 16 else "int32") if below else "float16"
    table = TensorFile(name=part.name, file=f"{part.name}.bin", dtype=dtype, shape=part.shape, rows=rows)
    random = np.random.default_rng(seed)
    with open(directory / table.file, "wb") as file:
        for _ in range(rows):
            row = random.integers(0, below, part.shape) if below else random.standard_normal(part.shape)
            file.write(row.astype(dtype).tobytes())
    return table


def part_names(directory: Path) -> frozenset[str]:
    """Return the names of the parts of a data set; empty if the folder is not a data set."""
    try:
        described = json.loads((directory / INDEX).read_text())
        return frozenset(str(part["name"]) for part in described["parts"])
    except (OSError, ValueError, TypeError, KeyError):
        return frozenset()


def read(directory: Path, model: Sampled) -> Dataset:
    """Return the data set in ``directory``; InvalidParameter if it is missing, damaged, or does not fit ``model``."""
    if not directory.is_dir():
        raise InvalidParameter(f"data={str(directory)!r} is not a folder; give one that has {INDEX}, or 'synthetic'")
    index = directory / INDEX
    try:
        described = json.loads(index.read_text())
        tables = tuple(TensorFile(**{**part, "shape": tuple(part["shape"])}) for part in described["parts"])
        samples = int(described["samples"])
    except OSError as error:
        raise InvalidParameter(f"{index} cannot be read: {error.strerror}; a data set needs it") from None
    except (ValueError, TypeError, KeyError) as error:
        raise InvalidParameter(
            f'{index} is damaged ({error!r:.80}); it is {{"samples": n, "parts": [...]}}, each part with '
            "name, file, dtype, shape and rows"
        ) from None
    if samples < 1:
        raise InvalidParameter(f"{index}: samples={samples} is below 1; add samples")
    for part in _stored(model):
        _check(part, tables, directory, model)
    names = {part.name for part in _stored(model)}
    return Dataset(directory=directory, samples=samples, tables=tuple(table for table in tables if table.name in names))


def _check(part: SampleTensor, tables: tuple[TensorFile, ...], directory: Path, model: Sampled) -> None:
    table = next((table for table in tables if table.name == part.name), None)
    if table is None:
        there = ", ".join(table.name for table in tables) or "none"
        raise InvalidParameter(
            f"data set {directory} has no part {part.name!r}, which model {model.name} needs; it has {there}"
        )
    dtypes = (*_DTYPES, VIDEO) if part.pixels else _DTYPES
    if table.dtype not in dtypes or table.rows < 1:
        raise InvalidParameter(
            f"{directory / INDEX}: part {part.name} has dtype {table.dtype!r} and {table.rows} rows; "
            f"choose one of {', '.join(dtypes)} and at least 1 row"
        )
    if table.shape != part.shape:
        raise InvalidParameter(
            f"data set {directory}: rows of {part.name} have shape {list(table.shape)}, "
            f"model {model.name} needs {list(part.shape)}; prepare the data for this size"
        )
    file = directory / table.file
    if table.dtype == VIDEO:
        require_video_files(file, table.rows)
        return
    size = file.stat().st_size if file.exists() else -1
    needed = table.row_bytes * table.rows
    if size < needed:
        state = f"has {size} bytes" if size >= 0 else "is missing"
        raise InvalidParameter(
            f"{file} {state}, but {table.rows} rows of {table.row_bytes} bytes are {needed}; copy it again"
        )
