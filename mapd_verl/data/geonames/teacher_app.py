"""The HTTP side of the rule-based teacher: as much of OpenAI's chat API as LiteLLM and others ask for."""

from __future__ import annotations

import time
from typing import Any

import orjson
from fastapi import FastAPI, Request, Response

from mapd_verl.data.geonames.teacher_rules import MODEL, RuleTeacher, UnreadablePrompt

_JSON = "application/json"


def _tokens(characters: int) -> int:
    """A usual rule of thumb: four characters a token."""
    return -(-characters // 4)


def create_app(teacher: RuleTeacher) -> FastAPI:
    """The application over ``teacher``."""
    app = FastAPI(title="Rule-based teacher")
    started = int(time.time())
    served = 0

    def refuse(status: int, message: str, code: str) -> Response:
        body = {"error": {"message": message, "type": "invalid_request_error", "param": None, "code": code}}
        return Response(orjson.dumps(body), status, media_type=_JSON)

    @app.get("/livez")
    @app.get("/readyz")
    async def ready() -> Response:
        return Response(b'{"status":"ready"}', media_type=_JSON)

    @app.get("/v1/models")
    async def models() -> Response:
        model = {"id": MODEL, "object": "model", "created": started, "owned_by": "mapd-verl"}
        return Response(orjson.dumps({"object": "list", "data": [model]}), media_type=_JSON)

    @app.post("/v1/chat/completions")
    async def complete(request: Request) -> Response:
        nonlocal served
        try:
            body = orjson.loads(await request.body())
        except orjson.JSONDecodeError as error:
            return refuse(400, f"the body is not JSON: {error}", "invalid_json")
        problem = _request_problem(body)
        if problem:
            return refuse(400, problem, "invalid_request")
        if body["model"] != MODEL:
            return refuse(
                404, f"The model `{body['model']}` does not exist, this server has `{MODEL}`.", "model_not_found"
            )
        try:
            reply = teacher.reply(body["messages"])
        except UnreadablePrompt as error:
            return refuse(400, f"not a role prompt of the synthesis team: {error}", "unreadable_prompt")
        served += 1
        prompt = _tokens(sum(len(m["content"]) for m in body["messages"]))
        completion = _tokens(len(reply.content))
        answer = {
            "id": f"chatcmpl-{served}",
            "object": "chat.completion",
            "created": int(time.time()),
            "model": MODEL,
            "choices": [
                {
                    "index": 0,
                    "message": {"role": "assistant", "content": reply.content},
                    "finish_reason": reply.finish_reason,
                }
            ],
            "usage": {
                "prompt_tokens": prompt,
                "completion_tokens": completion,
                "total_tokens": prompt + completion,
            },
        }
        return Response(orjson.dumps(answer), media_type=_JSON)

    return app


def _request_problem(body: Any) -> str | None:
    if not isinstance(body, dict) or not isinstance(body.get("model"), str):
        return "want an object with a model"
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages:
        return "messages: want a list that is not empty"
    for number, message in enumerate(messages):
        if not isinstance(message, dict) or not all(isinstance(message.get(k), str) for k in ("role", "content")):
            return f"messages[{number}]: want a role and a content of text"
    if body.get("stream"):
        return "stream: this server does not stream"
    return None
