"""Every unusual, broken or hostile image is decoded as a viewer shows it, or refused with its name and a reason."""

import json
import logging
import re
import subprocess
import sys
import warnings
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from typer.testing import CliRunner

from data.odd_images import BAD, GOOD, GREY, TRANSPARENT, encoded, scene
from vit_memory.cli import app
from vit_memory.data import decoding
from vit_memory.data.decoding import decode
from vit_memory.data.images import ImageFiles
from vit_memory.data.loading import Loader, load_one
from vit_memory.data.sources import open_data
from vit_memory.data.splits import Split
from vit_memory.data.transforms import EvalTransform, TrainTransform
from vit_memory.errors import BadImage
from vit_memory.families.bundled import PREPROCESSING

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning:PIL.*")
ODD = {**GOOD, **GREY, **TRANSPARENT}


def corners(pixels):
    """Colours in the middle of the four quarters, left to right, top to bottom."""
    _, height, width = pixels.shape
    return [
        tuple(pixels[:, y, x].tolist()) for y in (height // 4, 3 * height // 4) for x in (width // 4, 3 * width // 4)
    ]


@pytest.fixture(params=["simplejpeg", "Pillow"])
def decoder(request, monkeypatch):
    if request.param == "simplejpeg":
        pytest.importorskip("simplejpeg")
    else:
        monkeypatch.setattr(decoding, "_simplejpeg", lambda: None)
    return request.param


@pytest.mark.parametrize("name", ODD)
def test_an_odd_image_is_decoded_to_what_a_viewer_shows(name, decoder):
    pixels = decode(ODD[name](), name)
    shown = scene()
    if name in GREY:
        shown = shown.convert("L").convert("RGB")
    if name in TRANSPARENT:
        shown.paste((255, 255, 255), (32, 0, 64, 48))
    assert pixels.dtype == torch.uint8
    assert pixels.shape == (3, 48, 64)
    expected = corners(torch.from_numpy(np.array(shown)).permute(2, 0, 1))
    for actual, colour in zip(corners(pixels), expected, strict=True):
        assert np.abs(np.subtract(actual, colour)).max() <= 4, (name, corners(pixels), expected)


@pytest.mark.parametrize("name", ODD)
def test_an_image_of_several_strips_has_the_pixels_of_the_whole(name, monkeypatch):
    whole = decode(ODD[name](), name)
    monkeypatch.setattr(decoding, "_STRIP_PIXELS", 5 * 64)  # 48 rows are nine strips of five, and one of three
    assert torch.equal(decode(ODD[name](), name), whole)


DECODE_LARGE = """
import resource, sys
from vit_memory.data.decoding import decode
content = open(sys.argv[1], "rb").read()
decode(open(sys.argv[2], "rb").read(), "small")  # what is loaded at the first image
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
decode(content, "large")
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="the unit of ru_maxrss differs")
@pytest.mark.parametrize("mode", ["RGBA", "RGB"])
def test_decoding_takes_little_more_memory_than_the_image_in_pillow_and_the_result(mode, tmp_path):
    for name, side in {"large": 5000, "small": 10}.items():
        (tmp_path / name).write_bytes(encoded(Image.new(mode, (side, side), "red"), "PNG", compress_level=1))
    words = [sys.executable, "-c", DECODE_LARGE, str(tmp_path / "large"), str(tmp_path / "small")]
    run = subprocess.run(words, capture_output=True, text=True, check=True)
    assert 1024 * int(run.stdout) < 9 * 5000**2, "four bytes of a pixel in Pillow, three in the result, and strips"


@pytest.mark.parametrize("name", BAD)
def test_a_bad_image_is_refused_with_its_name_and_the_reason(name, decoder, tmp_path):
    make, reason = BAD[name]
    (tmp_path / name).write_bytes(make())
    split = Split.of(ImageFiles((str(tmp_path / name),)), [0])
    with pytest.raises(BadImage) as refused:
        load_one(split, 0, EvalTransform(PREPROCESSING))
    assert refused.value.name == str(tmp_path / name)
    assert re.search(reason, refused.value.reason), refused.value.reason


@pytest.fixture
def folder(tmp_path):
    """Two classes, with every odd and every bad image among the good ones, a broken link and a folder named .jpg."""
    rng = np.random.default_rng(0)
    for label in ("left", "right"):
        (tmp_path / label).mkdir()
        for i in range(8):
            noise = Image.fromarray(rng.integers(0, 256, (40, 40, 3), np.uint8))
            (tmp_path / label / f"fine-{i}.png").write_bytes(encoded(noise, "PNG"))
    for name, make in ODD.items():
        (tmp_path / "left" / name).write_bytes(make())
    for name, (make, _) in BAD.items():
        (tmp_path / "right" / name).write_bytes(make())
    (tmp_path / "right" / "broken-link.jpg").symlink_to(tmp_path / "nowhere.jpg")
    (tmp_path / "right" / "folder.jpg").mkdir()
    (tmp_path / "right" / "notes.txt").write_text("not an image by its name")
    return tmp_path


def test_a_folder_of_more_than_twenty_unusual_images_is_read_with_every_bad_one_reported(folder, caplog):
    dataset = open_data(folder)
    bad = {**{name: reason for name, (_, reason) in BAD.items()}, "broken-link.jpg": "cannot be read"}
    assert len(ODD) + len(bad) > 20
    reported, loaded = {}, 0
    with caplog.at_level(logging.WARNING):
        for split in dataset.splits.values():
            loader = Loader(split, TrainTransform(PREPROCESSING), batch_size=4, workers=2, on_bad_image="skip")
            loaded += sum(len(batch.targets) for batch in loader.batches())
            # Some images are too narrow for the evaluation's resize only, so check both transforms.
            evaluation = Loader(split, EvalTransform(PREPROCESSING), batch_size=4, on_bad_image="skip", bad=loader.bad)
            for batch in evaluation.batches():
                assert batch.images.isfinite().all()
            reported |= loader.bad.reasons
    assert {name.rsplit("/", 1)[1] for name in reported} == set(bad)
    for name, reason in reported.items():
        assert re.search(bad[name.rsplit("/", 1)[1]], reason)
    assert loaded == 16 + len(ODD) + 1  # too-narrow.png makes a good crop
    assert "bomb.png" in caplog.text


def test_training_stops_at_the_first_bad_image_unless_bad_images_are_skipped(folder):
    split = open_data(folder).train
    for workers in (0, 2):
        with pytest.raises(BadImage, match=r"right/.*--on-bad-image skip"):
            list(Loader(split, EvalTransform(PREPROCESSING), batch_size=4, workers=workers).batches())


def test_decoding_in_threads_leaves_the_warning_filters_unchanged_and_emits_no_warning(decoder):
    odd = {name: make() for name, make in ODD.items()}
    bad = {name: make() for name, (make, _) in BAD.items() if name != "text-bomb.png"}  # slow

    def decode_all(_):
        for name, content in odd.items():
            decode(content, name)
        for name, content in bad.items():
            with suppress(BadImage):
                decode(content, name)

    warnings.simplefilter("error")  # in the threads too
    filters, before, interval = warnings.filters, list(warnings.filters), sys.getswitchinterval()
    sys.setswitchinterval(1e-6)  # so that threads switch as often as possible
    try:
        with ThreadPoolExecutor(8) as pool:
            decoding = pool.map(decode_all, range(40))
            for _ in range(200):  # warnings of other code still work meanwhile
                with pytest.raises(UserWarning, match="other code"):
                    warnings.warn("other code", stacklevel=1)
            list(decoding)
    finally:
        sys.setswitchinterval(interval)
    assert warnings.filters is filters
    assert warnings.filters == before


def test_the_data_command_names_the_bad_images(folder):
    result = CliRunner().invoke(app, ["data", str(folder)])
    assert result.exit_code == 0, result.output
    assert "14 bad images" in result.output  # all but too-narrow.png, which decodes; and the broken link
    assert "1 files ignored" in result.output
    listed = json.loads(CliRunner().invoke(app, ["data", str(folder), "--json"]).output)["bad"]
    reasons = {Path(bad["image"]).name: bad["reason"] for bad in listed}
    assert "decompression bomb" in reasons["bomb.png"]
    assert "cannot be read" in reasons["broken-link.jpg"]
    assert len(reasons) == 14
