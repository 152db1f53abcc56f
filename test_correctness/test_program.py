"""What a training program does beside its model: what it may be, what is refused, and the video files that it reads."""

import importlib.util
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

from perfsuite.base.errors import InvalidParameter
from perfsuite.base.mesh import MeshShape
from perfsuite.models import dataset, find
from perfsuite.models.dataset import generate, read
from perfsuite.models.loading import Files, Rows, numbers_of
from perfsuite.models.program import ENCODERS
from perfsuite.published.recipes import find as find_recipe
from perfsuite.workloads.training.train_step import TrainStep

SUITE = Path(__file__).parent.parent / "test_perf"
RAW = ENCODERS["tiny-picture"].inputs(find("latte-tiny"))
CODEC = pytest.mark.skipif(importlib.util.find_spec("av") is None, reason="needs PyAV")


@pytest.mark.parametrize(
    ("case", "said"),
    [
        ({"program": {"emma": "fp32"}}, "program: setting 'emma' is unknown; did you mean ema"),
        ({"program": {"ema": "fp64"}}, "program: ema='fp64' is unknown; choose none, fp32, bf16, fp16"),
        ({"program": {"ema_on_host": True}}, "program: ema_on_host needs a moving average; set ema"),
        ({"program": {"clip": 0}}, "program: clip=0 is not valid; choose a number above 0, or None"),
        ({"program": {"clip": float("nan")}}, "program: clip=nan is not valid"),
        ({"program": {"clip": True}}, "program: clip=True is not valid"),
        ({"program": {"loss_scale": 128.0}}, "program: loss_scale=128 has no effect with dtype='fp32'; choose fp16"),
        ({"program": {"logs": 1}}, "program: logs=1 is not valid; choose True or False"),
        ({"program": {"encoders": "clip"}}, "encoders='clip' are unknown; did you mean"),
        ({"program": {"encoders": "sdvae"}}, "encode videos, and model gpt2-tiny does not take videos; leave encoders"),
        (
            {"model": "latte-tiny", "program": {"encoders": "t5xxl-sdvae"}},
            "encoders='t5xxl-sdvae' read captions, and model latte-tiny has none; choose encoders without text",
        ),
        (
            {"model": "opensora-tiny", "program": {"encoders": "t5xxl-sdvae"}},
            "give words of 4096 features, and model opensora-tiny takes caption_width=64; make them equal",
        ),
        (
            {"model": "latte-tiny", "overrides": {"channels": 8}, "program": {"encoders": "tiny-picture"}},
            "give latents of 4 channels, and model latte-tiny has channels=8; make them equal",
        ),
        (
            {"model": "latte-tiny", "data": "video"},
            "data='video' needs encoders, which turn pixels into inputs of model latte-tiny; set",
        ),
    ],
)
def test_a_program_that_cannot_be_is_refused_in_one_line(case, said):
    with pytest.raises(InvalidParameter, match=r"\A[^\n]*\Z") as refused:
        TrainStep(**{"model": "gpt2-tiny", **case})
    assert said in str(refused.value)


@pytest.mark.parametrize(
    ("case", "said"),
    [
        ({"strategy": "hybrid"}, "clip=1 does not work with strategy hybrid, which has"),
        ({"strategy": "fsdp", "options": {"offload": True}}, "clip=1 does not work with offload of"),
    ],
)
def test_gradients_that_no_norm_can_be_taken_of_are_not_clipped(case, said):
    step = TrainStep(model="gpt2-tiny", program={"clip": 1.0}, **case)
    with pytest.raises(InvalidParameter, match=r"\A[^\n]*\Z") as refused:
        step.plan(MeshShape.of(dp=2))
    assert said in str(refused.value)


def test_a_ds_config_that_clips_otherwise_is_refused_and_one_that_clips_alone_holds(tmp_path):
    config = tmp_path / "ds_config.json"
    config.write_text(json.dumps({"gradient_clipping": 0.5, "zero_optimization": {"stage": 2}}))
    case = {"model": "gpt2-tiny", "strategy": "zero2", "options": {"config": str(config)}}
    shape = MeshShape.of(dp=2)
    own = TrainStep(**case)
    assert own.find_strategy().settings(own.plan(shape))["gradient_clipping"] == 0.5
    with pytest.raises(InvalidParameter, match=r"gradient_clipping=0.5 is not the case's 1; change one of them"):
        TrainStep(**case, program={"clip": 1.0}).plan(shape)


def test_settings_reach_deepspeed_by_its_own_names():
    step = TrainStep(model="gpt2-tiny", strategy="zero2", dtype="fp16", program={"clip": 1.0, "loss_scale": 128.0})
    settings = step.find_strategy().settings(step.plan(MeshShape.of(dp=2)))
    assert settings["gradient_clipping"] == 1.0
    assert settings["fp16"] == {"enabled": True, "loss_scale": 128.0}


# -- video files -------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def videos(tmp_path_factory):
    """A data set of video files, generated once."""
    return generate(RAW, tmp_path_factory.mktemp("data") / "set", samples=3, as_video=True).directory


@pytest.fixture
def own(videos, tmp_path):
    """A copy that a test may damage."""
    return shutil.copytree(videos, tmp_path / "set")


@CODEC
def test_video_files_are_decoded_to_what_was_coded(videos):
    """Compared with the picture that was written: coding loses something, a wrong order of axes loses all."""
    again = read(videos, RAW)
    assert [path.suffix for path in sorted((videos / "video").iterdir())] == [".mp4"] * 3
    sample = Rows(RAW, again)[1]["video"]
    assert tuple(sample.shape) == RAW.parts[0].shape
    assert -1 <= float(sample.min()) < -0.5
    assert 0.5 < float(sample.max()) <= 1
    av = __import__("av")
    with av.open(str(videos / "video" / "000001.mp4")) as container:
        frames = [frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)]
    expected = torch.from_numpy(np.stack(frames)).permute(3, 0, 1, 2) / 127.5 - 1
    assert torch.equal(sample, expected)


@CODEC
def test_what_a_loader_process_refuses_is_one_line(own):
    (own / "video" / "000000.mp4").write_bytes(b"no video")
    share = numbers_of(replica=0, replicas=1, micro_batch_size=1)
    batches = Files(RAW, read(own, RAW), share, torch.device("cpu"), num_workers=1)
    try:
        with pytest.raises(InvalidParameter, match=r"\A[^\n]*000000.mp4 cannot be decoded[^\n]*\Z"):
            next(batches)
    finally:
        batches.close()


def sound(file):
    """A file with sound and no picture, as sets of clips have some."""
    import av

    with av.open(str(file), "w", format="mp4") as container:
        stream = container.add_stream("aac", rate=8000)
        frame = av.AudioFrame.from_ndarray(np.zeros((1, 1024), dtype=np.float32), format="fltp", layout="mono")
        frame.sample_rate = 8000
        container.mux(stream.encode(frame))
        container.mux(stream.encode())


@pytest.mark.extended
@CODEC
@pytest.mark.parametrize(
    "video",
    [
        ("mpeg4", "avi", "yuv420p", (96, 50)),
        ("libvpx-vp9", "webm", "yuv420p", (64, 64)),
        ("mjpeg", "mov", "yuvj444p", (33, 65)),
    ],
    ids=lambda video: video[1],
)
def test_other_containers_codecs_and_sizes_are_read(own, video):
    """Nobody's clips are as large as the model wants them, and half of them are not mp4."""
    import av

    codec, suffix, pixels, side = video
    if codec not in av.codecs_available:
        pytest.skip(f"FFmpeg here has no {codec}")
    (own / "video" / "000001.mp4").unlink()
    with av.open(str(own / "video" / f"000001.{suffix}"), "w") as container:
        stream = container.add_stream(codec, rate=25)
        stream.width, stream.height, stream.pix_fmt = *side, pixels
        for step in range(6):
            picture = np.full((side[1], side[0], 3), 40 * step, dtype=np.uint8)
            container.mux(stream.encode(av.VideoFrame.from_ndarray(picture, format="rgb24")))
        container.mux(stream.encode())
    frames = Rows(RAW, read(own, RAW))[1]["video"].mean((0, 2, 3))
    assert torch.allclose(frames, torch.tensor([40 * step / 127.5 - 1 for step in range(4)]), atol=0.05)


@CODEC
@pytest.mark.parametrize(
    ("how", "said"),
    [
        (lambda folder: (folder / "video" / "000001.mp4").write_bytes(b"no video"), "000001.mp4 cannot be decoded: "),
        (lambda folder: (folder / "video" / "000001.mp4").unlink(), "has 2 video files, and the data set counts 3"),
        (lambda folder: sound(folder / "video" / "000001.mp4"), "000001.mp4 has no video in it; give a video file"),
        (
            lambda folder: dataset.write_video(folder / "video" / "000001.mp4", (3, 2, 64, 64), seed=0),
            "000001.mp4 has 2 frames, and a sample needs 4; give longer videos, or leave it out",
        ),
    ],
)
def test_a_damaged_video_is_named(own, how, said):
    how(own)
    with pytest.raises(InvalidParameter, match=r"\A[^\n]*\Z") as refused:
        Rows(RAW, read(own, RAW))[1]
    assert said in str(refused.value)


def test_without_a_codec_own_videos_are_refused_and_raw_frames_are_read(tmp_path, monkeypatch):
    monkeypatch.setattr(dataset, "has_codec", lambda: False)
    raw = generate(RAW, tmp_path / "raw", samples=3)
    assert raw.tables[0].dtype == "uint8"
    sample = Rows(RAW, raw)[0]["video"]
    assert -1 <= float(sample.min()) < float(sample.max()) <= 1
    folder = tmp_path / "own"
    (folder / "video").mkdir(parents=True)
    (folder / "video" / "a.mp4").write_bytes(b"")
    part = {"name": "video", "file": "video", "dtype": "video", "shape": list(RAW.parts[0].shape), "rows": 1}
    (folder / "dataset.json").write_text(json.dumps({"samples": 1, "parts": [part]}))
    with pytest.raises(InvalidParameter, match="has video files, and PyAV, which decodes them, is not installed; in"):
        read(folder, RAW)


def test_a_users_latents_are_trained_on_without_encoders(tmp_path):
    """Random encoders would make any loss of them meaningless; pixels, and what the suite writes, are encoded."""
    spec = importlib.util.spec_from_file_location("suite_conftest", SUITE / "conftest.py")
    suite = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(suite)
    recipe = find_recipe("001-latte-tiny-ddp-b1-w1-1x2").parameters
    without = {name: value for name, value in recipe["program"].items() if name != "encoders"}
    latents = generate(find("latte-tiny"), tmp_path / "latents", samples=2)
    pixels = generate(RAW, tmp_path / "pixels", samples=2)
    assert suite.as_given(recipe, str(latents.directory)) == without
    TrainStep(**{**recipe, "data": str(latents.directory), "program": without}).work(MeshShape.of(dp=2))
    for data in (str(pixels.directory), "video", str(tmp_path / "nowhere")):
        assert suite.as_given(recipe, data) == recipe["program"]
