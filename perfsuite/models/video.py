"""Video files of a data set: written for generated data sets, decoded when a sample is read.

Decoding uses PyAV (the extra ``video``), which includes FFmpeg.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from perfsuite.base.errors import InvalidParameter

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


def require_files(folder: Path, rows: int) -> None:
    """Raise InvalidParameter unless ``folder`` has ``rows`` video files and they can be decoded here."""
    files = len(_files(folder)) if folder.is_dir() else -1
    if files < rows:
        state = f"has {files} video files" if files >= 0 else "is not a folder"
        raise InvalidParameter(f"{folder} {state}, and the data set counts {rows}; copy them again")
    if not has_codec():
        raise InvalidParameter(
            f"{folder} has video files, and PyAV, which decodes them, is not installed; "
            "install it with pip install 'perfsuite[video]', or give raw frames of dtype uint8"
        )


def _files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.iterdir() if path.is_file() and not path.name.startswith("."))


class Clips(Sequence["npt.NDArray[np.uint8]"]):
    """The video files of a folder as rows of one shape."""

    def __init__(self, folder: Path, shape: tuple[int, ...]) -> None:
        """Read rows of ``shape``: (3, frames, height, width)."""
        self._files = _files(folder)
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


def write(file: Path, shape: tuple[int, ...], *, seed: int) -> None:
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
