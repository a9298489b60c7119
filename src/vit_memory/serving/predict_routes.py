"""POST /v1/predict: images in, the answers of all tasks out, from one version of the task set."""

import asyncio
import time
from collections.abc import Sequence
from typing import Any

from fastapi import APIRouter, Request, Response

from vit_memory.errors import DataError, ImageError, TaskError
from vit_memory.serving.answer_json import answer_json, answer_size
from vit_memory.serving.engine import Answer
from vit_memory.serving.limits import Body, unless_gone
from vit_memory.serving.openapi import PREDICT_BODY, PREDICT_QUERY, PREDICTION, responses
from vit_memory.serving.predict_body import PredictOptions, SentImage, query_options, read_images
from vit_memory.serving.problems import ProblemError, json_bytes, problem_of
from vit_memory.serving.security import PREDICT
from vit_memory.serving.state import ServerState
from vit_memory.serving.task_set import TaskSet

LARGE_ANSWER = 5_000  # numbers; about 10 ms from which other requests would wait, so a thread builds it
Outcome = Answer | DataError | ImageError  # of one image


def router(state: ServerState) -> APIRouter:
    """The route of predictions."""
    routes = APIRouter(prefix="/v1", dependencies=[PREDICT], tags=["predict"])
    limits = state.settings.limits

    @routes.post(
        "/predict",
        summary="Answer images",
        responses=responses({200: PREDICTION}, 400, 401, 403, 404, 408, 413, 415, 422, 503, 504),
        openapi_extra={"requestBody": PREDICT_BODY, "parameters": PREDICT_QUERY},
    )
    async def predict(request: Request) -> Response:
        started = time.perf_counter()
        query = query_options(request)
        task_set = state.engine.task_set
        if state.engine.stats.waiting >= state.engine.options.max_queue:
            raise ProblemError(503, "the queue is full. Try again.")  # before its body takes memory
        with Body(request, state.bodies, limits.max_body_bytes, limits.body_timeout_s) as body:
            images, options = await read_images(request, body, query, limits.max_images)
            _check_tasks(task_set, options)
            _check_explained(len(images), len(set(options.explain)), limits.max_explained)
            timeout = min(options.timeout_s or state.engine.options.timeout_s, limits.max_timeout_s)
            outcomes = await unless_gone(request, _predict_all(state, images, options, task_set, timeout))
        request.state.log = {"images": len(images)}
        if len(outcomes) == 1 and not isinstance(outcomes[0], Answer):
            raise outcomes[0]
        request_id = request.state.request_id

        def build() -> bytes:
            answers: list[dict[str, Any]] = []
            for image, outcome in zip(images, outcomes, strict=True):
                if isinstance(outcome, Answer):
                    answers.append(answer_json(image.name, outcome, task_set, options.top_k))
                else:
                    problem = problem_of(outcome)
                    assert problem is not None
                    answers.append({"name": image.name, "error": problem.record(request_id)})
            return json_bytes(
                {
                    "version": task_set.version,
                    "backbone": {"name": state.backbone_name, "fingerprint": task_set.model.backbone.fingerprint},
                    "images": answers,
                    "request_id": request_id,
                    "seconds": round(time.perf_counter() - started, 6),
                }
            )

        size = sum(answer_size(outcome) for outcome in outcomes if isinstance(outcome, Answer))
        content = build() if size < LARGE_ANSWER else await asyncio.to_thread(build)
        return Response(content, media_type="application/json")

    return routes


def _check_tasks(task_set: TaskSet, options: PredictOptions) -> None:
    """Refuse unknown tasks before an image is decoded."""
    for name in options.tasks or ():
        task_set.tasks[name]
    for name in options.explain:
        if task_set.tasks[name].class_token is None:
            raise TaskError(f"task {name!r} is of regime 'head': it has no attention of its own to explain.")


def _check_explained(images: int, tasks: int, most: int) -> None:
    if images * tasks > most:
        raise ProblemError(
            400,
            f"{tasks} tasks to explain for {images} images are {images * tasks} explanations; at most {most} in one "
            f"request. Send fewer images, or explain fewer tasks.",
            limit=most,
        )


async def _predict_all(
    state: ServerState, images: Sequence[SentImage], options: PredictOptions, task_set: TaskSet, timeout_s: float
) -> list[Outcome]:
    """All images, in order. What is wrong with an image is its outcome; any other error ends them all."""

    async def one(image: SentImage) -> Outcome:
        if not isinstance(image.content, bytes):
            return image.content
        try:
            return await state.engine.predict(
                image.content,
                options.tasks,
                timeout_s=timeout_s,
                explain=options.explain,
                check_original=options.check_original,
                name=image.name,
                task_set=task_set,
            )
        except (DataError, ImageError) as error:
            return error

    if len(images) == 1:
        return [await one(images[0])]
    jobs = [asyncio.create_task(one(image)) for image in images]
    try:
        return list(await asyncio.gather(*jobs))
    finally:
        for job in jobs:
            job.cancel()
        await asyncio.gather(*jobs, return_exceptions=True)  # their errors are seen, if only to be dropped
