"""A certificate: sound tasks pass, every fault is found and named, and no byte of its content changes unnoticed."""

import contextlib
import io
import json
import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from builders import tiny_backbone, trained
from certified import IMAGES, request_of, write_world
from data.test_sources import as_png, pictures
from vit_memory import MemoryViT, fused, load_backbone, load_task, save_task
from vit_memory.errors import BackboneMismatch, DamagedFile, DataError, FileError, NewerFormat, TaskError
from vit_memory.evaluation.certificates.certificate import Certificate, content_sha256
from vit_memory.evaluation.certificates.certifying import certify
from vit_memory.evaluation.certificates.checking import check_again
from vit_memory.evaluation.certificates.files import read_certificate, write_certificate
from vit_memory.evaluation.noninterference import check_noninterference
from vit_memory.evaluation.verification import random_graph
from vit_memory.report.certificate_page import hash_in_python, write_certificate_page

CHECKS = [
    "original output",
    "alone and in company",
    "dense reference",
    "cross gradients",
    "NaN in a task",
    "NaN in a branch",
]


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return write_world(tmp_path_factory.mktemp("root"))


@pytest.fixture(scope="module")
def sound(root):
    return certify(request_of(root))


@pytest.fixture
def file(sound, tmp_path):
    write_certificate(tmp_path / "certificate.json", sound)
    return tmp_path / "certificate.json"


def failed(certificate: Certificate) -> list[str]:
    return [check.name for check in certificate.checks if not check.passed]


def test_a_sound_bundle_passes_every_check(sound, root):
    assert [check.name for check in sound.checks] == CHECKS
    assert failed(sound) == []
    assert [task.name for task in sound.tasks] == ["kinds", "weight", "child", "plain", "sided"]
    assert [task.parents for task in sound.tasks if task.parents] == [("kinds",), ("plain",)]
    assert [task.branch for task in sound.tasks] == [None, None, None, "side", "side"]
    assert sound.tasks[0].digest == load_task(root / "kinds.safetensors").digest
    assert sound.backbone.fingerprint == load_backbone(root / "backbone").fingerprint
    assert len(sound.images.used) == IMAGES
    original, alone, reference, gradients, broken, broken_branch = sound.checks
    assert (original.results[0].compared, original.images) == (2, IMAGES)  # batches of 3 and 2
    assert all(0 <= result.value <= result.limit for result in (*alone.results, *reference.results))
    assert any(result.value > 0 for result in reference.results)
    assert {result.subject: result.limit for result in alone.results}["weight"] > 1e-2  # in grams, not unit scale
    assert {result.value for result in gradients.results} == {0.0}
    assert {result.subject: result.compared for result in broken.results} == {
        "kinds": 4, "weight": 5, "child": 5, "plain": 4, "sided": 5,
    }  # fmt: skip
    assert [(result.subject, result.compared) for result in broken_branch.results] == [("side", 4)]


@pytest.mark.parametrize("seed", range(3))
def test_random_graphs_of_tasks_and_branches_pass(seed):
    backbone = tiny_backbone()
    tasks, branches = random_graph(backbone, 5, seed)
    steps = []
    checks = check_noninterference(
        MemoryViT(backbone, tasks, branches), torch.randn(3, 3, 32, 32), 2, lambda *step: steps.append(step)
    )
    assert [check.name for check in checks if not check.passed] == []
    assert [done for done, _, _ in steps] == list(range(1, steps[-1][1] + 1))  # ends at the number it announced


def test_a_disturbed_original_output_fails_and_is_named(root, monkeypatch):
    attend = fused.attend_originals

    def disturbed(*arguments):
        read, keys, values = attend(*arguments)
        return read * (1 + 1e-6), keys, values

    monkeypatch.setattr(fused, "attend_originals", disturbed)
    certificate = certify(request_of(root))
    assert "original output" in failed(certificate)
    assert certificate.checks[0].results[0].failures[0].startswith("batch 1: ")
    assert not certificate.passed


@pytest.mark.parametrize(
    ("strength", "expected"),
    [
        (0.1, ["alone and in company", "dense reference", "cross gradients", "NaN in a task", "NaN in a branch"]),
        (1e-12, ["cross gradients", "NaN in a task", "NaN in a branch"]),  # too weak to be seen in any answer
    ],
)
def test_a_leak_between_tasks_fails_however_weak_it_is(root, monkeypatch, strength, expected):
    attend = fused.attend_readers

    def leaking(*arguments):
        read = attend(*arguments)
        return read + strength * read.mean(1, keepdim=True)

    monkeypatch.setattr(fused, "attend_readers", leaking)
    certificate = certify(request_of(root))
    assert failed(certificate) == expected
    named = "\n".join(certificate.failures)
    assert "NaN in a task: kinds: weight changed" in named
    assert "cross gradients: weight: task kinds: class_token has a gradient" in named


def test_a_leak_from_tasks_to_the_original_output_fails_and_is_named(root, monkeypatch):
    finish = fused.finish_block

    def leaking(block, rows, attended, run):
        rows = finish(block, rows, attended, run)
        return rows + 0 * rows[-1:]  # nothing is changed, unless the last row is broken

    monkeypatch.setattr(fused, "finish_block", leaking)
    certificate = certify(request_of(root))
    assert failed(certificate) == ["NaN in a task", "NaN in a branch"]
    assert any("original output changed" in failure for failure in certificate.failures)


def test_the_same_run_twice_has_the_same_content_but_for_date_and_timings(sound, root):
    again = certify(request_of(root))
    first, second = sound.content(), again.content()
    for content in (first, second):
        del content["created"], content["seconds"]
    assert first == second


def test_a_certificate_is_read_as_it_was_written(sound, file):
    assert read_certificate(file) == sound
    assert json.loads(file.read_text())["sha256"] == sound.sha256


def test_the_three_lines_of_python_find_a_change(file, monkeypatch):
    monkeypatch.chdir(file.parent)
    lines = hash_in_python(file.name)
    docs = (Path(__file__).parents[1] / "docs/certificate.md").read_text(encoding="utf-8")
    assert lines in docs
    assert len(lines.splitlines()) == 3

    def run():
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            exec(lines, {"open": lambda *a, **k: io.StringIO(file.read_text())})
        return printed.getvalue()

    assert run() == "True\n"
    file.write_text(file.read_text().replace('"passed": true', '"passed": false', 1))
    assert run() == "False\n"


def test_a_changed_byte_of_the_content_is_found(file):
    sound, content = file.read_bytes(), json.loads(file.read_text())
    choices, found = random.Random(0), 0
    for _ in range(200):
        changed = bytearray(sound)
        changed[choices.randrange(len(changed))] ^= 1 << choices.randrange(7)
        file.write_bytes(changed)
        try:
            if json.loads(changed) == content:  # a space became a line break
                continue
        except ValueError:
            pass
        with pytest.raises(FileError):
            read_certificate(file)
        found += 1
    assert found > 100


def test_a_certificate_that_was_hashed_again_by_hand_is_refused_where_it_contradicts_itself(file):
    content = json.loads(file.read_text())
    content["checks"][0]["passed"] = False
    file.write_text(json.dumps({**content, "sha256": content_sha256(content)}))
    with pytest.raises(DamagedFile, match="its verdicts contradict its results"):
        read_certificate(file)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"format": "vit-memory-certificate/2"}, NewerFormat, "reads up to vit-memory-certificate/1"),
        ({"format": "vit-memory-task/1"}, DamagedFile, "expected vit-memory-certificate/1"),
        ({"images": 3}, DamagedFile, "missing or mistyped field"),
        ({"request": {"sources": [1]}}, DamagedFile, "missing or mistyped field"),
    ],
)
def test_other_formats_and_mistyped_fields_are_named(file, change, error, message):
    content = {**json.loads(file.read_text()), **change}
    file.write_text(json.dumps({**content, "sha256": content_sha256(content)}))
    with pytest.raises(error, match=message):
        read_certificate(file)


def test_what_is_no_certificate_is_named(tmp_path):
    with pytest.raises(FileError, match="no such certificate"):
        read_certificate(tmp_path / "none.json")
    (tmp_path / "list.json").write_text("[]")
    with pytest.raises(DamagedFile, match="no format in it"):
        read_certificate(tmp_path / "list.json")
    (tmp_path / "cut.json").write_text('{"format"')
    with pytest.raises(DamagedFile, match="not a certificate"):
        read_certificate(tmp_path / "cut.json")


def test_checked_again_everything_is_as_it_was(sound):
    repetition = check_again(sound, sound.request)
    assert repetition.differences == ()
    assert repetition.notes == ()
    assert repetition.certificate.images == sound.images


def test_another_machine_or_version_is_a_note_and_no_failure(sound):
    elsewhere = replace(sound, environment=replace(sound.environment, torch="2.0.0", cores=96))
    repetition = check_again(elsewhere, sound.request)
    assert repetition.passed
    assert repetition.notes[0].startswith("torch: was 2.0.0, is ")
    assert repetition.notes[1].startswith("cores: was 96, is ")


def test_a_replaced_task_file_is_named(tmp_path):
    root = write_world(tmp_path)
    old = certify(request_of(root, "kinds.safetensors"))
    other = replace(load_task(root / "kinds.safetensors"), head_bias=torch.ones(3))
    save_task(other, root / "kinds.safetensors")
    (difference,) = check_again(old, old.request).differences
    assert difference.startswith(f"task kinds ({root / 'kinds.safetensors'}): digest was ")
    moved = replace(old.request, sources=(str(root / "zoo"),))
    differences = check_again(old, moved).differences
    assert not any(one.startswith("task kinds") for one in differences)
    assert any(one.startswith("task weight") and one.endswith("is not in the certificate") for one in differences)


def test_images_are_found_by_their_content_and_a_changed_one_is_named(tmp_path):
    root = write_world(tmp_path)
    old = certify(request_of(root, "kinds.safetensors"))
    for i, (label, pixels) in enumerate(pictures(6, seed=1)):  # more images: other splits are drawn
        (root / "photos" / label / f"new-{i}.png").write_bytes(as_png(pixels))
    (root / "photos").rename(root / "moved")
    request = replace(old.request, data=str(root / "moved"))
    assert check_again(old, request).passed
    first = Path(old.images.used[0].name)
    changed = root / "moved" / first.relative_to(root / "photos")
    changed.write_bytes(as_png(pictures(1, seed=2)[0][1]))
    (difference,) = check_again(old, request).differences
    assert difference == f"image {first}: not found in {root / 'moved'} with the same content"


def test_images_that_cannot_be_decoded_are_left_out_and_listed(tmp_path):
    root = write_world(tmp_path)
    for path in (root / "photos").glob("*/00*.png"):
        path.write_bytes(b"bad " + path.name.encode())
    images = certify(request_of(root, "kinds.safetensors", images=50)).images
    assert images.bad
    assert all("not an image" in reason for _, reason in images.bad)
    assert not {image.name for image in images.used} & {name for name, _ in images.bad}
    for path in (root / "photos").glob("*/*.png"):
        path.write_bytes(b"bad " + path.name.encode())
    with pytest.raises(DataError, match="not one image can be used"):
        certify(request_of(root, "kinds.safetensors"))


def test_what_cannot_be_certified_is_refused_with_the_reason(root, tmp_path):
    backbone = load_backbone(root / "backbone")
    save_task(trained(backbone, "mixed", regime="memory-unmasked"), tmp_path / "mixed.safetensors")
    for sources in (["mixed.safetensors"], ["mixed.safetensors", root / "zoo"]):
        with pytest.raises(
            TaskError, match="regime 'memory-unmasked': its original tokens read its memory.*Leave it out"
        ):
            certify(replace(request_of(root), sources=tuple(str(tmp_path / source) for source in sources)))
    save_task(trained(tiny_backbone("dinov2"), "other"), tmp_path / "other.safetensors")
    with pytest.raises(BackboneMismatch, match="was trained on"):
        certify(
            replace(request_of(root), sources=(str(tmp_path / "other.safetensors"),), backbone=str(root / "backbone"))
        )
    with pytest.raises(TaskError, match="no such task file or bundle"):
        certify(request_of(root, "nothing"))
    with pytest.raises(DataError, match="no such file or folder"):
        certify(replace(request_of(root), data=str(tmp_path / "nothing")))


def test_the_page_shows_the_verdict_and_refers_to_nothing_outside(sound, tmp_path):
    write_certificate_page(tmp_path / "page.html", sound, "certificate.json")
    page = (tmp_path / "page.html").read_text(encoding="utf-8")
    assert "5 tasks on" in page
    assert "FAILED" not in page
    assert all(check.method.split(".")[0].replace("'", "&#x27;") in page for check in sound.checks)
    assert sound.sha256 in page
    assert "integrity, not identity" in page
    assert "http://" not in page
    assert "https://" not in page
    check = sound.checks[0]
    broken = replace(check, results=(replace(check.results[0], failures=("batch 1: <b>tokens</b>",)),))
    write_certificate_page(tmp_path / "page.html", replace(sound, checks=(broken,)), "certificate.json")
    page = (tmp_path / "page.html").read_text(encoding="utf-8")
    assert ": FAILED</h1>" in page
    assert "batch 1: &lt;b&gt;tokens" in page
