"""Applications to ask in process, task files, and schemas, for the tests of the HTTP server."""

import base64
from contextlib import contextmanager

from engine_builders import backbone, jpeg, task
from fastapi.testclient import TestClient

from vit_memory import Bundle, MemoryViT
from vit_memory.files.taskfile import task_bytes
from vit_memory.serving.app import create_app
from vit_memory.serving.settings import Limits, Settings

TOKEN, ADMIN = "a-secret-Token_123", "another-secret-456"
IMAGE = {"content-type": "image/jpeg"}


def zoo():
    """One task of each kind, and one that extends another."""
    return [
        task("pets", labels=["cat", "dog"]),
        task("parts", kind="multi-label"),
        task("height", kind="regression", labels=["metres"]),
        task("child", parents=["pets"]),
        task("plain", regime="head"),
    ]


def bearer(token):
    return {"authorization": f"Bearer {token}"}


@contextmanager
def client_of(source=None, *, tokens=(None, None), sent=None, **settings):
    """A client of an application in this process, with a token to predict and one to change tasks; it sends `sent`."""
    source = MemoryViT(backbone(), zoo()) if source is None else source
    app = create_app(source, Settings(*tokens, **settings), backbone=backbone())
    with TestClient(app, headers=bearer(sent) if sent else None) as client:
        yield client


def bundle_in(folder, tasks=None):
    """A bundle's folder, opened with a backbone of this process."""
    Bundle.create(folder, backbone(), zoo() if tasks is None else tasks)
    return folder


def predict(client, content=None, **options):
    return client.post("/v1/predict", content=jpeg() if content is None else content, headers=IMAGE, **options)


def as_json(*images, **options):
    return {"images": [base64.b64encode(image).decode() for image in images], **options}


def file_of(name, **options):
    """The content of a task file; `shift` makes it another task of that name."""
    shift = options.pop("shift", 0.0)
    new = task(name, **options)
    return task_bytes(new.map(lambda tensor: tensor + shift) if shift else new)


def tiny_limits(**limits):
    return {"limits": Limits(**limits)}


def check_problem(response, status, request_id=None):
    """A problem of RFC 9457 with this status; its record."""
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/problem+json"
    record = response.json()
    assert record["status"] == status
    assert record["detail"]
    assert record["title"]
    assert record["type"] == "about:blank"
    assert record["instance"] == response.headers["x-request-id"]
    assert "Traceback" not in response.text
    if status == 503:
        assert int(response.headers["retry-after"]) > 0
    return record


def fits(value, schema, schemas, where="$"):
    """Raise AssertionError unless a JSON value has the shape of a schema, as far as ours go; unknown keys fail too."""
    if "$ref" in schema:
        return fits(value, schemas[schema["$ref"].rsplit("/", 1)[1]], schemas, where)
    if "anyOf" in schema:
        if value is None:
            assert {"type": "null"} in schema["anyOf"], where
            return None
        return fits(value, next(one for one in schema["anyOf"] if one != {"type": "null"}), schemas, where)
    if "enum" in schema:
        assert value in schema["enum"], where
        return None
    types = {"object": dict, "array": list, "string": str, "number": (int, float), "integer": int, "boolean": bool}
    assert isinstance(value, types[schema["type"]]), f"{where}: {value!r} is no {schema['type']}"
    if schema["type"] == "array":
        for i, item in enumerate(value):
            fits(item, schema["items"], schemas, f"{where}[{i}]")
    if "properties" in schema:
        assert set(schema["required"]) <= set(value), f"{where}: {sorted(value)}"
        for key, item in value.items():
            if key in schema["properties"]:
                fits(item, schema["properties"][key], schemas, f"{where}.{key}")
            else:
                assert schema == schemas["Problem"], f"{where}.{key} is not described"  # only problems may tell more
    elif "additionalProperties" in schema:
        for key, item in value.items():
            fits(item, schema["additionalProperties"], schemas, f"{where}.{key}")
    return None
