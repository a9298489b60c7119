"""A thousand requests that somebody made to harm a server, seeded, each with the statuses that it may get."""

import base64
import gzip
import itertools
import json
import random
import struct
import zlib
from typing import NamedTuple

from hostile_files import JUNK, hostile_files
from hostile_images import bombs, broken_images, broken_jpegs, encoded, mutated, polyglots

BOUNDARY = "b"
FORM, JSON = f"multipart/form-data; boundary={BOUNDARY}", "application/json"
LENGTH = "Inference-Header-Content-Length"
IMAGE_STATUSES = {200, 422}
BODY_STATUSES = {200, 400, 404, 413, 415, 422}
NEW_TASK = "/v1/tasks/new"


class Hostile(NamedTuple):
    """A request, what it tries, and the statuses that it may get."""

    kind: str
    what: str
    method: str
    path: str
    headers: dict
    body: bytes
    statuses: set


def hostile_requests(task_file, seed=0):
    """All of them. `task_file` is a good file of a task called `new`; the server has a task `pets`."""
    draw = random.Random(seed)
    makers = (  # each with its number of requests
        (broken_jpeg_requests, 200), (broken_image_requests, 60), (bomb_requests, 45), (polyglot_requests, 42),
        (type_requests, 60), (json_requests, 120), (path_requests, 63), (form_requests, 110), (infer_requests, 120),
    )  # fmt: skip
    for make, count in makers:
        yield from itertools.islice(make(draw, count), count)
    for what, content, statuses in itertools.islice(hostile_files(draw, task_file), 180):
        yield Hostile("task file", what, "PUT", NEW_TASK, {}, content, statuses)


def predict(kind, what, content_type, body, statuses, **headers):
    types = {} if content_type is None else {"Content-Type": content_type}
    return Hostile(kind, what, "POST", "/v1/predict", {**types, **headers}, body, statuses)


def infer(kind, what, body, statuses=BODY_STATUSES, **headers):
    return Hostile(kind, what, "POST", "/v2/models/pets/infer", headers, body, statuses)


def form(content, field="image", file_name="a.jpg"):
    head = f'--{BOUNDARY}\r\nContent-Disposition: form-data; name="{field}"; filename="{file_name}"\r\n\r\n'
    return head.encode() + content + f"\r\n--{BOUNDARY}--\r\n".encode()


def ways_to_send(kind, what, image):
    """One image in every way that a client may send it."""
    text = base64.b64encode(image).decode()
    tensor = {"name": "image", "datatype": "BYTES", "shape": [1]}
    element = struct.pack("<I", len(image)) + image
    header = json.dumps({"inputs": [{**tensor, "parameters": {"binary_data_size": len(element)}}]}).encode()
    return [
        predict(kind, what, "image/jpeg", image, IMAGE_STATUSES),
        predict(kind, what, FORM, form(image), IMAGE_STATUSES),
        predict(kind, what, JSON, json.dumps({"images": [text]}).encode(), IMAGE_STATUSES),
        infer(kind, what, json.dumps({"inputs": [{**tensor, "data": [text]}]}).encode(), IMAGE_STATUSES),
        infer(kind, what, header + element, IMAGE_STATUSES, **{LENGTH: str(len(header))}),
    ]


def broken_jpeg_requests(draw, count):
    for number, image in enumerate(broken_jpegs(draw, count)):
        yield ways_to_send("broken JPEG", f"number {number}", image)[number % 5]


def broken_image_requests(draw, count):
    for number, image in enumerate(broken_images(draw, count)):
        yield ways_to_send("broken image", f"number {number}", image)[number % 5]


def bomb_requests(draw, count):
    large = bytes(100_000_000)
    yield infer("bomb", "100 MB in gzip", gzip.compress(large, 9), {413}, **{"Content-Encoding": "gzip"})
    yield infer("bomb", "100 MB in deflate", zlib.compress(large, 9), {413}, **{"Content-Encoding": "deflate"})
    nested = gzip.compress(gzip.compress(large, 9), 9)
    yield infer("bomb", "gzip in gzip", nested, {400}, **{"Content-Encoding": "gzip"})
    yield infer("bomb", "an encoding that nobody knows", nested, {415}, **{"Content-Encoding": "br"})
    yield predict("bomb", "gzip of an image", "image/jpeg", nested, {415}, **{"Content-Encoding": "gzip"})
    sent = [ways_to_send("bomb", what, image) for what, image in bombs().items()]
    for way in range(5):
        yield from (ways[way] for ways in sent)


def polyglot_requests(draw, count):
    sent = [ways_to_send("polyglot", what, image) for what, image in polyglots().items()]
    for way in (0, 1, 2):
        yield from (ways[way] for ways in sent)


def type_requests(draw, count):
    bodies = {
        "JPEG": encoded("JPEG"),
        "JSON": json.dumps({"images": [base64.b64encode(encoded("JPEG")).decode()]}).encode(),
        "form": form(encoded("JPEG")),
    }
    types = (
        None, "", ";;;", "text/html", "image/", "image/svg+xml", "image/jpeg\tx", "IMAGE/PNG; charset=utf-16",
        "video/mp4", "application/json; charset=utf-7", "application/json, image/png", "application/problem+json",
        "application/octet-stream", "application/x-www-form-urlencoded", "multipart/mixed; boundary=b", "a" * 5000,
        "multipart/form-data", "multipart/form-data; boundary=" + "x" * 300, 'multipart/form-data; boundary="',
        "multipart/form-data; boundary=\xff",
    )  # fmt: skip
    for content_type, (what, body) in itertools.product(types, bodies.items()):
        yield predict("type", f"{what} as {content_type!r:.60}", content_type, body, BODY_STATUSES)


def json_requests(draw, count):
    for opening, closing in (("[", "]"), ('{"a":', "}"), ('{"images":[', "]}"), ('[{"images":', "}]")):
        for depth in (500, 100_000):
            yield predict("JSON", f"{depth} times {opening}", JSON, (opening * depth).encode(), {400})
            text = opening * depth + "1" + closing * depth
            yield predict("JSON", f"{depth} times {opening}, closed", JSON, text.encode(), {400})
    good = {"images": [base64.b64encode(encoded("JPEG")).decode()], "tasks": ["pets"], "explain": ["pets"], "top_k": 3}
    keys = ("images", "tasks", "explain", "top_k", "check_original", "timeout_s", "__proto__")
    for _ in range(60):
        key, value = draw.choice(keys), draw.choice(JUNK)
        text = json.dumps({**good, key: value})
        yield predict("JSON", f"{key}: {value!r:.40}", JSON, text.encode(), BODY_STATUSES | {504})
    while True:
        yield predict("JSON", "mutated", JSON, mutated(draw, json.dumps(good).encode()), BODY_STATUSES)


def path_requests(draw, count):
    names = (
        "..", ".", "%2e%2e", "%2E%2E%2F%2E%2E%2Fetc%2Fpasswd", "..%5c..%5cwindows", "....//....//etc/passwd", "%00",
        "a%00.js", "%c0%ae%c0%ae%c0%af", "%ff%fe", "%252e%252e%252f", "../tasks/pets.safetensors", "/etc/passwd",
        "~root", "file:///etc/passwd", "%0d%0aSet-Cookie:%20a=b", "nul", "x" * 5000, "%F0%9F%92%A9", "pets%2F..%2Fpets",
        "pets/../../bundle.json",
    )  # fmt: skip
    places = (
        "/v1/tasks/{}",
        "/v1/tasks/{}/file",
        "/v1/branches/{}",
        "/v2/models/{}",
        "/v2/models/{}/infer",
        "/page/{}",
    )
    orders = [(name, place, method) for name in names for place in places for method in ("GET", "PUT", "DELETE")]
    for name, place, method in draw.sample(orders, count):
        yield Hostile("path", f"{name:.60}", method, place.format(name), {}, b"x" * 20, {400, 404, 405})


def form_requests(draw, count):
    image = encoded("JPEG")
    part = form(image)[: -len(f"--{BOUNDARY}--\r\n")]
    yield predict("form", "three thousand parts", FORM, part.replace(image, b"x") * 3000 + form(image), {413})
    yield predict("form", "a header without an end", FORM, b"--b\r\nContent-Disposition: " + b"x" * 200_000, {400})
    yield predict(
        "form", "ten thousand headers", FORM, b"--b\r\n" + b"A: b\r\n" * 10_000 + form(image)[5:], BODY_STATUSES
    )
    yield predict("form", "no end", FORM, b"--b", {400})
    yield predict("form", "only the end", FORM, b"--b--\r\n", {400})
    for name in ("../../a", "a\x00b", "\r\n", "x" * 9000, 'a"; name="tasks', "\N{PILE OF POO}", "", "C:\\a.jpg"):
        yield predict("form", f"a file called {name!r:.40}", FORM, form(image, file_name=name), BODY_STATUSES)
        yield predict("form", f"a field called {name!r:.40}", FORM, form(image, field=name), BODY_STATUSES)
    while True:
        where = draw.choice(["head", "anywhere"])
        whole = form(image)
        cut = whole.index(image)
        content = mutated(draw, whole[:cut]) + whole[cut:] if where == "head" else mutated(draw, whole)
        yield predict("form", f"mutated {where}", FORM, content, BODY_STATUSES)


def infer_requests(draw, count):
    image = encoded("JPEG")
    text, element = base64.b64encode(image).decode(), struct.pack("<I", len(image)) + image
    shapes = (
        [], [0], [-1], [2], [1, 1], [1, 2], [2**31], [2**63], [10**400], [1.0], ["1"], [True], [None], [[1]], "1", 1,
        None, [1] * 1000, [1, 3, 224, 224], [1, 3, -1, -1], [1, 3, 2**31, 2**31],
    )  # fmt: skip
    kinds = (
        ("image", "BYTES", [text]),
        ("pixels", "FP32", [0.0] * 300),
        ("pixels", "FP32", [1e39]),
        ("image", "FP32", [text]),
    )
    for (name, datatype, data), shape in itertools.islice(itertools.product(kinds, shapes), 60):
        tensor = {"name": name, "datatype": datatype, "shape": shape}
        body = json.dumps({"inputs": [{**tensor, "data": data}]}).encode()
        yield infer("infer", f"{name} {shape!r:.40}", body)
    while True:
        tensor = {"name": "image", "datatype": "BYTES", "shape": [draw.choice([0, 1, 2, 64, 65, 2**40])]}
        size = draw.choice([0, 1, len(element), len(element) + 1, 2**40, -1, 1.5, "1"])
        content = draw.choice([element, element[:-1], element * 2, struct.pack("<I", 2**32 - 1) + image, b""])
        header = json.dumps({"inputs": [{**tensor, "parameters": {"binary_data_size": size}}]}).encode()
        length = draw.choice([len(header), len(header), len(header) - 1, 0, 2**60, "-1", "1e3", "\xb3"])
        headers = {LENGTH: str(length)}
        yield infer("infer", f"{size} bytes at {length}", header + content, **headers)
        yield infer("infer", "mutated", mutated(draw, header) + content, **{LENGTH: str(len(header))})
