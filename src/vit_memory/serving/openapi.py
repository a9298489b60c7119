"""The OpenAPI description of the server: shapes of bodies and answers, and the statuses that each route can have.

Written by hand, because answers are made as plain values: turning each into a model and back would cost as much as
computing it. A test compares answers with these shapes.
"""

from collections.abc import Mapping
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi

from vit_memory.serving.predict_body import IMAGE_FIELDS, PredictJson, PredictOptions
from vit_memory.serving.problems import MEDIA_TYPE

Schema = dict[str, Any]
_TEXT: Schema = {"type": "string"}
_NUMBER: Schema = {"type": "number"}
_COUNT: Schema = {"type": "integer", "minimum": 0}
_FILE: Schema = {"type": "string", "format": "binary"}
_MEANINGS = {
    200: "Done.",
    400: "Malformed: the detail says what and where.",
    401: "A token is missing or not valid.",
    403: "The token does not allow this, or the server is read-only.",
    404: "No such task or branch; the detail names those there are.",
    408: "The body did not arrive in time.",
    409: "In conflict with what the server holds: another digest, tasks that need it, or another backbone.",
    413: "The body or the number of images is above the limit.",
    415: "A content type that is not taken here.",
    422: "The image cannot be decoded.",
    503: "Too much to do, or stopping: try again after the seconds of Retry-After.",
    504: "Not answered within the time that the request allowed.",
}


def _object(required: Mapping[str, Schema], optional: Mapping[str, Schema] | None = None) -> Schema:
    return {"type": "object", "required": list(required), "properties": {**required, **(optional or {})}}


def _list(items: Schema) -> Schema:
    return {"type": "array", "items": items}


def _map(values: Schema) -> Schema:
    return {"type": "object", "additionalProperties": values}


def _ref(name: str) -> Schema:
    return {"$ref": f"#/components/schemas/{name}"}


def _or_null(schema: Schema) -> Schema:
    return {"anyOf": [schema, {"type": "null"}]}


_CHANCE = _object({"label": _TEXT, "probability": _NUMBER}, {"threshold": _NUMBER})
_BLOCK = _object(
    {
        "patches": _list(_or_null(_NUMBER)),
        "memory": _or_null(_NUMBER),
        "itself": _or_null(_NUMBER),
        "originals": _or_null(_NUMBER),
        "ancestors": _map(_or_null(_NUMBER)),
        "ancestor_memory": _map(_or_null(_NUMBER)),
    }
)
_ANSWER = _object(
    {"kind": {"enum": ["single-label", "multi-label", "regression"]}, "digest": _TEXT},
    {
        "label": _or_null(_TEXT),
        "confidence": _or_null(_NUMBER),
        "labels": _list(_CHANCE),
        "top": _list(_CHANCE),
        "values": _map(_or_null(_NUMBER)),
        "not_a_number": {"type": "boolean"},
    },
)
_IMAGE = _object(
    {"name": _TEXT},
    {
        "tasks": _map(_ref("TaskAnswer")),
        "original": _object(
            {
                "feature_size": _COUNT,
                "top": _or_null(_list(_CHANCE)),
                "identical": _or_null({"type": "boolean"}),
            }
        ),
        "explanations": _map(_object({"grid": _list(_COUNT), "blocks": _list(_BLOCK)})),
        "batch": _COUNT,
        "stages_ms": _map(_NUMBER),
        "error": _ref("Problem"),
    },
)
_TASK = _object(
    {
        "name": _TEXT,
        "kind": _TEXT,
        "regime": _TEXT,
        "method": _TEXT,
        "labels": _list(_TEXT),
        "parents": _list(_TEXT),
        "branch": _or_null(_TEXT),
        "digest": _TEXT,
        "parameters": _COUNT,
        "cells": _COUNT,
        "size_bytes": _COUNT,
        "metrics": {"type": "object"},
        "preprocessing": _or_null({"type": "object"}),
    },
    {"version": _TEXT},
)
_BRANCH = _object(
    {"name": _TEXT, "digest": _TEXT, "blocks": _COUNT, "start": _COUNT, "parameters": _COUNT, "size_bytes": _COUNT},
    {"version": _TEXT},
)
_BACKBONE = _object(
    {"name": _TEXT, "fingerprint": _TEXT},
    {
        "width": _COUNT,
        "depth": _COUNT,
        "heads": _COUNT,
        "parameters": _COUNT,
        "image_size": _list(_COUNT),
    },
)
SCHEMAS: dict[str, Schema] = {
    "Problem": {
        **_object(
            {"type": _TEXT, "title": _TEXT, "status": {"type": "integer"}, "detail": _TEXT, "instance": _TEXT},
        ),
        "description": "RFC 9457. `instance` is the id of the request, also in the header X-Request-Id and in the log.",
    },
    "TaskAnswer": _ANSWER,
    "Prediction": _object(
        {
            "version": _TEXT,
            "backbone": _BACKBONE,
            "images": _list(_IMAGE),
            "request_id": _TEXT,
            "seconds": _NUMBER,
        }
    ),
    "Task": _TASK,
    "Branch": _BRANCH,
    "Tasks": _object(
        {
            "version": _TEXT,
            "backbone": _BACKBONE,
            "tasks": _list(_ref("Task")),
            "branches": _list(_ref("Branch")),
            "unloaded": _list(_TEXT),
            "read_only": {"type": "boolean"},
            "persistent": {"type": "boolean"},
            "limits": _map(_NUMBER),
        }
    ),
    "Status": {"type": "object"},
}


def _json(schema: Schema) -> Schema:
    return {"content": {"application/json": {"schema": schema}}}


PREDICTION = _json(_ref("Prediction"))
TASKS = _json(_ref("Tasks"))
STATUS = _json(_ref("Status"))
ONE = {"task": _json(_ref("Task")), "branch": _json(_ref("Branch"))}
FILE: Schema = {"content": {"application/octet-stream": {"schema": _FILE}}}
EVENTS: Schema = {"content": {"text/event-stream": {}}}  # a stream of events, each with fields: no JSON value
FILE_BODY: Schema = {"required": True, **FILE}


def _without_null(schema: Schema) -> Schema:
    """A value in a query or a form, where there is no null: it is left out instead."""
    (value,) = [one for one in schema.get("anyOf", [schema]) if one != {"type": "null"}]
    return {**{key: one for key, one in schema.items() if key != "anyOf" and one is not None}, **value}


_OPTIONS = {name: _without_null(schema) for name, schema in PredictOptions.model_json_schema()["properties"].items()}
PREDICT_QUERY: list[Schema] = [
    {"name": name, "in": "query", "required": False, "description": schema["description"], "schema": schema}
    for name, schema in _OPTIONS.items()
]
PREDICT_BODY: Schema = {
    "required": True,
    "content": {
        "multipart/form-data": {
            "schema": {
                "type": "object",
                "properties": {
                    **{name: {**_list(_FILE), "minItems": 1} for name in IMAGE_FIELDS},
                    **_OPTIONS,
                },
                "anyOf": [{"required": [name]} for name in IMAGE_FIELDS],
                "additionalProperties": False,
            }
        },
        "application/octet-stream": {"schema": _FILE},
        "image/*": {"schema": _FILE},
        "application/json": {"schema": _ref("PredictJson")},
    },
}


def responses(answers: Mapping[int, Schema], *problems: int) -> dict[int | str, Schema]:
    """What a route can answer: shapes by status, and the statuses of problems."""
    problem = {"content": {MEDIA_TYPE: {"schema": _ref("Problem")}}}
    return {
        **{status: {"description": _MEANINGS.get(status, "Done."), **answer} for status, answer in answers.items()},
        **{status: {"description": _MEANINGS[status], **problem} for status in problems},
    }


def describe(app: FastAPI) -> dict[str, Any]:
    """The whole description, made once."""
    if app.openapi_schema is None:
        description = get_openapi(title=app.title, version=app.version, description=app.description, routes=app.routes)
        for path in description["paths"].values():
            for operation in path.values():
                _without_default_422(operation)
        schemas = description.setdefault("components", {}).setdefault("schemas", {})
        for name in ("HTTPValidationError", "ValidationError"):
            schemas.pop(name, None)
        body = PredictJson.model_json_schema(ref_template="#/components/schemas/{model}")
        schemas |= {**body.pop("$defs", {}), "PredictJson": body, **SCHEMAS}
        app.openapi_schema = description
    return app.openapi_schema


def _without_default_422(operation: dict[str, Any]) -> None:
    """FastAPI announces 422 for parameters; here they get a 400."""
    content = operation["responses"].get("422", {}).get("content", {})
    if "HTTPValidationError" in str(content.get("application/json")):
        del operation["responses"]["422"]
