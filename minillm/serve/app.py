"""The routes, as a Starlette application over an `EngineThread`.

A client that hangs up is noticed while its answer is made: its request is aborted, and its blocks are
free at the next step.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from importlib.resources import files

from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import HTMLResponse, JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

from minillm.guard.inputs import RequestError
from minillm.ladder.request import TokenEvent
from minillm.load.tokenizer import Tokenizer
from minillm.serve.engine_thread import Answer, EngineThread, QueueFull, Stopped
from minillm.serve.openai import ApiError, Shape, read_body
from minillm.serve.page import state

MOST_BYTES = 1 << 20  # of a body
HUNG_UP = 499  # what a log shows where nobody is left to answer
WHY_ENDED = {  # a request that did not finish by itself
    "error": (500, "the model's output was unusable: its numbers are not finite", "model_error"),
    "abort": (503, "the server gave the request up: it is shutting down, or a step failed", "aborted"),
}


class Server:
    """The handlers. `model` is the name that clients ask for."""

    def __init__(self, thread: EngineThread, tokenizer: Tokenizer, model: str, api_key: str | None = None) -> None:
        self.thread, self.tokenizer, self.model, self.api_key = thread, tokenizer, model, api_key
        self.started = int(time.time())

    def app(self) -> Starlette:
        routes = [
            Route("/v1/completions", partial(self.complete, chat=False), methods=["POST"]),
            Route("/v1/chat/completions", partial(self.complete, chat=True), methods=["POST"]),
            Route("/v1/models", self.models), Route("/v1/models/{name:path}", self.models),
            Route("/health", self.health), Route("/metrics", self.metrics),
            Route("/", self.page), Route("/state", self.state),
        ]
        errors = {ApiError: refuse, HTTPException: refuse, Exception: refuse, ClientDisconnect: hung_up}
        return Starlette(routes=routes, exception_handlers=errors, lifespan=self.lifespan)

    @asynccontextmanager
    async def lifespan(self, app: Starlette) -> AsyncIterator[None]:
        self.thread.start()
        try:
            yield
        finally:
            await self.thread.stop()

    # -- completions ------------------------------------------------------------------------------

    async def complete(self, request: Request, chat: bool) -> Response:
        """/v1/completions and /v1/chat/completions, streamed or whole."""
        self.check_key(request)
        body = await read_json(request)
        context = self.thread.engine.max_context
        try:  # a long text is cut into tokens beside the event loop, not on it
            asked = await asyncio.to_thread(read_body, body, chat, self.model, self.tokenizer, context)
            answer = await self.thread.submit(asked.prompt, asked.params)
        except (RequestError, ValueError) as error:
            raise ApiError(400, str(error)) from None
        except QueueFull as error:
            raise ApiError(429, str(error), "rate_limit_error", "queue_full") from None
        except Stopped as error:
            raise ApiError(503, str(error), "server_error", "shutting_down") from None
        shape = Shape(answer.id, self.model, asked)
        return EventStream(answer, shape) if asked.stream else await whole(request, answer, shape)

    def check_key(self, request: Request) -> None:
        """ApiError 401 unless the request brings the server's key, where it has one."""
        brought = request.headers.get("authorization", "").encode()
        if self.api_key is not None and not hmac.compare_digest(brought, f"Bearer {self.api_key}".encode()):
            raise ApiError(401, "the key is missing or wrong: send Authorization: Bearer KEY", code="invalid_api_key")

    # -- about the server -------------------------------------------------------------------------

    async def models(self, request: Request) -> Response:
        """/v1/models and /v1/models/NAME: the one model."""
        self.check_key(request)
        name = request.path_params.get("name", self.model)
        if name != self.model:
            raise ApiError(404, f"this server has {self.model!r}, not {name!r:.100}", code="model_not_found")
        card = {"id": self.model, "object": "model", "created": self.started, "owned_by": "minillm",
                "max_model_len": self.thread.engine.max_context}
        listed = {"object": "list", "data": [card]}
        return JSONResponse(card if "name" in request.path_params else listed)

    async def health(self, request: Request) -> Response:
        """/health: 200 while the engine's thread lives."""
        return Response(status_code=503 if self.thread.stopped else 200)

    async def metrics(self, request: Request) -> Response:
        """/metrics, in Prometheus' text format."""
        return Response(generate_latest(self.thread.metrics.registry), media_type=CONTENT_TYPE_LATEST)

    async def page(self, request: Request) -> Response:
        """/: the live page, one file that loads nothing else."""
        return HTMLResponse(files("minillm.serve").joinpath("page.html").read_text(encoding="utf-8"))

    async def state(self, request: Request) -> Response:
        """/state: what the page draws."""
        return JSONResponse(await self.thread.call(partial(state, self.thread, self.model)))


# -- requests in ----------------------------------------------------------------------------------


async def read_json(request: Request) -> object:
    """The body. ApiError if it is too long, not said to be JSON, or not JSON."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":  # a page of another site can send any other kind without asking
        raise ApiError(415, f"send Content-Type: application/json, not {kind!r:.60}")
    body = bytearray()
    async for part in request.stream():
        body += part
        if len(body) > MOST_BYTES:
            raise ApiError(413, f"the body is longer than {MOST_BYTES:,} bytes", code="body_too_long")
    try:
        return json.loads(body)
    except (ValueError, RecursionError) as error:
        raise ApiError(400, f"the body is not JSON: {error!s:.100}", code="invalid_json") from None


async def refuse(request: Request, error: Exception) -> Response:
    """Any error, in OpenAI's shape."""
    if isinstance(error, HTTPException):
        error = ApiError(error.status_code, f"{request.method} {request.url.path:.100}: {error.detail}")
    elif isinstance(error, Stopped):
        error = ApiError(503, str(error), "server_error", "shutting_down")
    elif not isinstance(error, ApiError):
        error = ApiError(500, "the server failed; its log says how", "server_error")
    return JSONResponse(error.body, error.status, {"Retry-After": "1"} if error.status in (429, 503) else None)


async def hung_up(request: Request, error: Exception) -> Response:
    """A client that left before its body was read; nobody gets this."""
    return PlainTextResponse("", HUNG_UP)


# -- answers out ----------------------------------------------------------------------------------


async def whole(request: Request, answer: Answer, shape: Shape) -> Response:
    """The answer in one piece; it is aborted if the client hangs up before."""
    making, leaving = asyncio.ensure_future(collect(answer, shape)), asyncio.ensure_future(hang_up(request))
    try:
        await asyncio.wait({making, leaving}, return_when=asyncio.FIRST_COMPLETED)
        return JSONResponse(await making) if making.done() else PlainTextResponse("", HUNG_UP)
    finally:
        making.cancel()
        leaving.cancel()
        answer.close()


async def collect(answer: Answer, shape: Shape) -> dict:
    """All events as one answer; ApiError if it did not end by itself."""
    texts, reason = [], None
    async for event in answer:
        shape.tokens += len(event.token_ids)
        texts.append(event.text)
        reason = event.finish_reason
    if reason in WHY_ENDED:
        raise failed(reason)
    return shape.whole("".join(texts), reason)


async def hang_up(request: Request) -> None:
    """Returns when the client has closed the connection."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


class EventStream(StreamingResponse):
    """The answer as server-sent events. Also if it is never read, its request does not run on for nobody."""

    def __init__(self, answer: Answer, shape: Shape) -> None:
        super().__init__(chunks(answer, shape), media_type="text/event-stream", headers={"Cache-Control": "no-cache"})
        self.answer = answer

    async def __call__(self, scope, receive, send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self.answer.close()


async def chunks(answer: Answer, shape: Shape) -> AsyncIterator[bytes]:
    """Each step's event, the usage if it was asked for, and the end."""
    async for event in answer:
        if event.finish_reason in WHY_ENDED:
            yield sent(failed(event.finish_reason).body)
            break
        yield sent(chunk_of(event, shape))
    else:
        if shape.asked.usage_at_end:
            yield sent(shape.last_chunk())
    yield b"data: [DONE]\n\n"


def chunk_of(event: TokenEvent, shape: Shape) -> dict:
    """The piece of a stream for one event, whose tokens it counts."""
    shape.tokens += len(event.token_ids)
    return shape.chunk(event.text, event.finish_reason)


def failed(reason: str) -> ApiError:
    """What a client is told of a request that ended for a reason of ours."""
    status, message, code = WHY_ENDED[reason]
    return ApiError(status, message, "server_error", code)


def sent(data: dict) -> bytes:
    """One server-sent event."""
    return b"data: " + json.dumps(data, ensure_ascii=False, separators=(",", ":")).encode() + b"\n\n"
