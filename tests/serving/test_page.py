"""The page of a server, used as visitors use it: in Chromium, against a real server on this machine.

Needs `pip install 'vit-memory[serve,browser]'` and a chromium (`apt-get install chromium`); skipped without them.
"""

import io
import re
from dataclasses import replace
from importlib.resources import files
from pathlib import Path

import httpx
import numpy as np
import pytest
from fastapi import FastAPI
from PIL import Image
from starlette.testclient import TestClient
from visits import Visit, serving

from browser import WIDTHS
from builders import trained, trained_branch
from vit_memory import MemoryViT, load_backbone, save_task
from vit_memory.data.decoding import decode
from vit_memory.data.transforms import EvalTransform
from vit_memory.predictions import predictions
from vit_memory.serving import page_routes

ANSWER = re.compile(r"v1/predict\?top_k=\d+$")  # of all tasks; requests to compare and to explain name more


@pytest.fixture(scope="module")
def backbone():
    return load_backbone("bundled")


@pytest.fixture(scope="module")
def tasks(backbone):
    """Every kind of task and trunk: one label, several, numbers; parents; a head alone; a branch."""
    branch = trained_branch(backbone, "strokes", blocks=2, rank=4)
    parts = trained(backbone, "parts", kind="multi-label", labels=("red", "round", "soft"))
    return [
        trained(backbone, "pets", cells=5, labels=("cat", "dog", "hamster")),
        replace(parts, thresholds=(0.3, 0.5, 0.9)),
        trained(backbone, "height", kind="regression", labels=("height", "weight"), parents=["pets"]),
        trained(backbone, "plain", regime="head"),
        trained(backbone, "pens", branch=branch),
    ], [branch]


@pytest.fixture(scope="module")
def url(tmp_path_factory, tasks):
    with serving(tmp_path_factory.mktemp("page") / "zoo", *tasks) as address:
        yield address


@pytest.fixture
def visit(browser):
    visits = []

    def begin(*arguments, **options):
        visits.append(Visit(browser, *arguments, **options))
        return visits[-1]

    yield begin
    for one in visits:
        one.context.close()


@pytest.fixture(scope="module")
def photo():
    """A wide image, of which the backbone sees the middle."""
    content = io.BytesIO()
    pixels = np.random.default_rng(0).integers(0, 256, (48, 96, 3), dtype=np.uint8)
    Image.fromarray(pixels).resize((192, 96)).save(content, "PNG")
    return content.getvalue()


@pytest.mark.slow
@pytest.mark.parametrize("width", WIDTHS)
def test_the_page_shows_what_the_model_answers(visit, url, backbone, tasks, photo, width):
    here = visit(url, width=width)
    here.wait_for_answer()  # a sample, without being asked
    with here.page.expect_response(ANSWER):
        here.page.locator("#image-file").set_input_files({"name": "a.png", "mimeType": "image/png", "buffer": photo})
    here.page.get_by_alt_text("The image that was given: a.png").wait_for()
    here.wait_for_answer()

    transform = EvalTransform(backbone.preprocessing)
    outputs = MemoryViT(backbone, *tasks)(transform.normalised(transform(decode(photo, "a.png"))[None]))
    expected = {task.name: next(predictions(task, outputs[task.name])) for task in tasks[0]}
    assert here.card("pets").locator(".winner .label").inner_text() == expected["pets"].label
    shown = here.card("pets").locator(".winner .share").inner_text()
    assert float(shown.removesuffix("%")) == pytest.approx(100 * expected["pets"].confidence, abs=0.51)
    present = here.card("parts").locator(".winner .label").all_inner_texts()
    assert {text.split("✓")[1].strip() for text in present} == set(expected["parts"].present)
    values = here.card("height").locator("dd").all_inner_texts()
    assert [float(value.replace("−", "-")) for value in values] == pytest.approx(
        list(expected["height"].values.values()), rel=1e-3
    )
    assert here.card("pens").locator(".winner .label").inner_text() == expected["pens"].label  # it stands on a branch
    assert here.page.locator("#legend-branch").is_visible()
    here.page.locator(".card.original").get_by_text("identical to the bit").wait_for()
    assert re.search(r"\d", here.page.locator("#live-time").inner_text())
    here.page.locator("#cost-bars li").first.wait_for()  # measured in an idle moment
    assert "5 tasks answered in one pass" in here.page.locator("#summary").inner_text()
    here.page.get_by_role("link", name="Metrics").wait_for()
    here.check()


@pytest.mark.slow
@pytest.mark.parametrize("width", WIDTHS)
def test_a_visitor_sees_where_a_task_looked_with_the_keyboard(visit, url, backbone, photo, width):
    here = visit(url, width=width)
    here.wait_for_answer()
    here.page.locator("#image-file").set_input_files({"name": "a.png", "mimeType": "image/png", "buffer": photo})
    here.wait_for_answer()
    here.card("height").get_by_role("button").press("Enter")
    here.page.get_by_role("heading", name="Where height looked").wait_for()
    here.page.locator("#attention:not([aria-busy])").wait_for()
    slider = here.page.get_by_role("slider", name="Block")
    slider.press("Home")
    assert here.page.locator("#block-number").inner_text() == f"1 of {backbone.depth}"
    slider.press("ArrowRight")
    assert slider.get_attribute("aria-valuetext").startswith(f"Block 2 of {backbone.depth}: the image’s patches")
    rows = here.page.locator("#shares tr").all_inner_texts()
    assert [row.split("\t")[0] for row in rows][2:] == ["itself", "its memory cells", "pets, which it extends"]
    shares = [float(re.search(r"([\d.]+)\s*%", row)[1]) for row in rows]
    assert sum(shares) == pytest.approx(100, abs=2.5)  # rounded one by one
    picture, overlay = here.page.locator("#picture").bounding_box(), here.page.locator("#overlay").bounding_box()
    assert overlay["width"] == pytest.approx(picture["width"] / 2, abs=1)  # the backbone sees the middle square
    assert overlay["x"] == pytest.approx(picture["x"] + picture["width"] / 4, abs=1)
    assert here.card("plain").get_by_role("button").count() == 0  # a head has no class token
    here.check()


@pytest.mark.slow
@pytest.mark.parametrize("width", WIDTHS)
def test_a_task_is_added_and_removed_without_a_reload(visit, url, backbone, tmp_path, width):
    save_task(trained(backbone, "birds", labels=("robin", "wren"), parents=["pets"]), tmp_path / "b.safetensors")
    here = visit(url, width=width)
    here.wait_for_answer()
    here.page.evaluate("window.sameDocument = true")
    here.page.locator("#task-files").set_input_files(tmp_path / "b.safetensors")
    here.page.locator("#chosen-files").get_by_text("one label of 2 · extends pets").wait_for()
    here.page.get_by_role("button", name="Add to the server").click()
    here.wait_for_answer("birds")
    assert here.card("birds").locator(".new").count() == 1
    assert here.page.locator('#graph [data-task="birds"]').count() == 1

    remove = here.page.locator('#task-list [data-name="pets"]').get_by_role("button", name="Remove")
    remove.click()
    here.page.get_by_role("button", name="Remove it").click()
    here.page.get_by_text("extends 'pets'").wait_for()  # in the server's words; nothing was removed
    here.errors[:] = [text for text in here.errors if "409" not in text]  # the browser's own line about that answer
    here.page.get_by_role("button", name="Remove birds").click()
    here.page.get_by_role("button", name="Keep it").click()
    assert here.card("birds").count() == 1
    here.page.get_by_role("button", name="Remove birds").click()
    here.page.get_by_role("button", name="Remove it").click()
    here.card("birds").wait_for(state="detached")
    assert here.card("pets").count() == 1
    assert here.page.evaluate("window.sameDocument")
    here.check()


@pytest.mark.slow
@pytest.mark.parametrize("stream", ["open", "broken"])
def test_a_task_that_somebody_else_adds_appears(visit, url, backbone, tmp_path, stream):
    save_task(trained(backbone, "fish"), tmp_path / "fish.safetensors")
    here = visit(url)
    if stream == "broken":
        here.page.route("**/v1/events", lambda route: route.abort())
        here.page.reload()
    here.wait_for_answer()
    httpx.put(f"{url}v1/tasks/fish", content=(tmp_path / "fish.safetensors").read_bytes()).raise_for_status()
    try:
        here.wait_for_answer("fish")
    finally:
        httpx.delete(f"{url}v1/tasks/fish").raise_for_status()
    here.card("fish").wait_for(state="detached")


@pytest.mark.slow
def test_an_image_can_be_dropped_pasted_or_taken_with_the_camera(visit, url, photo):
    here = visit(url)
    here.wait_for_answer()
    given = """([kind, bytes]) => {
      const transfer = new DataTransfer();
      transfer.items.add(new File([new Uint8Array(bytes)], `${kind}.png`, {type: "image/png"}));
      const event = kind === "drop" ? new DragEvent(kind, {dataTransfer: transfer, bubbles: true, cancelable: true})
        : new ClipboardEvent(kind, {clipboardData: transfer, bubbles: true, cancelable: true});
      document.body.dispatchEvent(event);
    }"""
    expected = httpx.post(f"{url}v1/predict", files={"image": photo}).json()["images"][0]["tasks"]["height"]["values"]
    for kind in ("drop", "paste"):
        with here.page.expect_response(ANSWER) as response:
            here.page.evaluate(given, [kind, list(photo)])
        values = response.value.json()["images"][0]["tasks"]["height"]["values"]
        assert values == pytest.approx(expected, rel=1e-4)
        here.page.get_by_alt_text(f"The image that was given: {kind}.png").wait_for()
    here.page.get_by_role("button", name="Camera").click()
    with here.page.expect_response(ANSWER) as response:
        here.page.get_by_role("button", name="Take it").click()
    assert response.value.ok
    here.page.get_by_alt_text("The image that was given: camera.jpg").wait_for()
    assert here.page.locator("#camera-video").evaluate("video => video.srcObject") is None  # the camera is off again
    here.check()


@pytest.mark.slow
def test_an_image_that_is_none_is_told_in_plain_words(visit, url):
    here = visit(url)
    here.wait_for_answer()
    text = {"name": "a.png", "mimeType": "image/png", "buffer": b"no image at all"}
    here.page.locator("#image-file").set_input_files(text)
    here.page.get_by_role("alert").get_by_text("The image could not be read").wait_for()
    here.page.get_by_text("The browser cannot show this type of image").wait_for()
    here.page.get_by_role("button", name="An apple on a table").click()
    here.wait_for_answer()
    assert here.page.locator("#problem").is_hidden()


@pytest.mark.slow
def test_the_page_asks_for_tokens_and_forgets_them(visit, tmp_path, tasks, backbone):
    save_task(trained(backbone, "birds"), tmp_path / "birds.safetensors")
    with serving(tmp_path / "zoo", *tasks, token="to-predict", admin_token="to-change") as url:
        here = visit(url)
        for token in ("wrong", "to-predict"):
            here.page.get_by_label("Token", exact=True).fill(token)
            here.page.get_by_role("button", name="Use it").click()
            if token == "wrong":
                here.page.get_by_text("the token is not valid").wait_for()
        here.wait_for_answer()
        here.page.locator("#task-files").set_input_files(tmp_path / "birds.safetensors")
        add = here.page.get_by_role("button", name="Add to the server")
        add.click()
        here.page.get_by_text("This token may not do that").wait_for()
        here.page.get_by_label("Admin token").fill("to-change")
        add.click()
        here.wait_for_answer("birds")
        assert here.page.evaluate("sessionStorage.length + localStorage.length") == 0
        here.page.locator("#keep-admin").check()
        assert here.page.evaluate("Object.values(sessionStorage)") == ["to-change"]


@pytest.mark.slow
def test_a_visitor_who_gives_no_token_is_not_asked_again_before_they_act(visit, tmp_path, tasks):
    def refuse(route):
        route.fulfill(status=401, json={"detail": "the token is not valid"})

    with serving(tmp_path / "zoo", *tasks, token="to-predict") as url:
        here = visit(url)
        token = here.page.get_by_label("Token", exact=True)
        token.fill("to-predict")
        here.page.get_by_role("button", name="Use it").click()
        here.wait_for_answer()
        here.page.locator("#live-batch", has_text=re.compile(r"\d")).wait_for()  # a status has come
        assert here.page.locator("#metrics-link").is_hidden()  # it would be refused: a link has no token
        here.page.route("**/v1/status", refuse)
        token.wait_for()
        here.page.get_by_role("button", name="Cancel").click()
        for _ in range(2):
            with here.page.expect_response("**/v1/status"):
                pass
        assert token.is_hidden()
        here.page.route("**/v1/predict*", refuse)
        here.page.get_by_role("button", name="An apple on a table").click()
        token.wait_for()


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", WIDTHS)
def test_axe_finds_no_serious_fault(visit, url, width, scheme):
    axe = pytest.importorskip("axe_playwright_python")
    here = visit(url, width=width, scheme=scheme)
    here.wait_for_answer()
    here.card("height").get_by_role("button").click()
    here.page.locator("#attention:not([aria-busy]) #shares tr").first.wait_for()
    here.page.evaluate((Path(axe.__file__).parent / "axe.min.js").read_text(encoding="utf-8"))

    def faults():
        violations = here.page.evaluate("axe.run()")["violations"]
        grave = [one for one in violations if one["impact"] in ("serious", "critical")]
        return [f"{one['id']}: {node['html']}" for one in grave for node in one["nodes"]]

    assert faults() == []
    here.page.get_by_role("button", name="Remove pets").click()
    assert faults() == []  # with a dialog open


def test_its_files_are_sent_with_their_types_and_a_strict_policy():
    app = FastAPI()
    app.include_router(page_routes.router())
    client = TestClient(app)
    names = {entry.name for entry in files("vit_memory.serving").joinpath("web").iterdir()}
    answers = {name: client.get(f"/page/{name}") for name in names}
    assert {name for name, answer in answers.items() if answer.status_code != 200} == set()
    assert answers["main.js"].headers["content-type"] == "text/javascript; charset=utf-8"
    index = client.get("/")
    policy = index.headers["content-security-policy"]
    assert "default-src 'none'; script-src 'self'; style-src 'self';" in policy
    assert "unsafe" not in policy
    assert re.findall(r"<script(?![^>]* src=)|<style| style=| on\w+=", index.text) == []
    assert client.get("/", headers={"If-None-Match": index.headers["etag"]}).status_code == 304
    for name in ("nothing.js", "..%2Fpage_routes.py", "%2e%2e/page_routes.py"):
        assert client.get(f"/page/{name}").status_code == 404


def test_no_file_of_the_page_names_another_host():
    for entry in files("vit_memory.serving").joinpath("web").iterdir():
        addresses = set(re.findall(r"(?:https?:)?//[\w.-]+\.\w+[^\s\"']*", entry.read_text(encoding="utf-8")))
        assert addresses <= {"http://www.w3.org/2000/svg"}, entry.name
