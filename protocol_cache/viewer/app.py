"""The viewer's pages. Loopback only, no script, nothing from elsewhere; what a teacher wrote is escaped everywhere."""

from __future__ import annotations

import hmac
import secrets
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

from fastapi import FastAPI, Request, Response
from fastapi.responses import HTMLResponse, RedirectResponse
from jinja2 import Environment, PackageLoader, StrictUndefined

from mapd_verl.errors import UserError
from protocol_cache.render import render, template_names
from protocol_cache.reviews import NOTE_LIMIT, REVIEW_VERDICTS, Review, drop_review, protocol_digest, put_reviews
from protocol_cache.store import ProtocolStore
from protocol_cache.viewer.catalogue import FACETS, SORTS, Catalogue, Filter, pretty
from protocol_cache.viewer.detail import grounded, steps

_HEADERS = {
    # No script runs, whatever a page might come to hold, and no other site can frame it.
    "Content-Security-Policy": (
        "default-src 'none'; style-src 'self'; img-src 'self'; form-action 'self'; frame-ancestors 'none'; "
        "base-uri 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "same-origin",
    "Cache-Control": "no-store",
}
#: A protocol's fields that its page has a form for; any other (a control's trajectory) is shown as it is.
_KNOWN = {"schema_version", "variant", "task_type", "reasoning_plan", "grounding_facts", "partial_findings", "answer"}
_KNOWN |= {"answer_grounded"}
_LOOPBACK = ("127.0.0.1", "localhost", "[::1]")
#: Bytes of a review's form: a note of NOTE_LIMIT characters in percent encoding, and then some.
BODY_LIMIT = 12 * NOTE_LIMIT + 4096


class Refused(Exception):
    """A request that is answered with ``status`` and one line."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


def make_app(cache: str | Path, readonly: bool = False) -> FastAPI:
    """The pages of one cache.

    Args:
        readonly: no reviews.

    Raises:
        UserError: the file is no protocol cache.
    """
    catalogue = Catalogue(cache)
    token = secrets.token_urlsafe(32)
    app = FastAPI(title="protocols", docs_url=None, redoc_url=None, openapi_url=None)
    pages = _environment(Path(cache).name, readonly)

    def page(name: str, status_code: int = 200, **values: Any) -> HTMLResponse:
        reviewed = len(catalogue.reviews)
        text = pages.get_template(name).render(count=len(catalogue), reviewed_count=reviewed, **values)
        # Half a surrogate pair, which a teacher may write, is no UTF-8.
        return HTMLResponse(text.encode(errors="backslashreplace"), status_code)

    @app.middleware("http")
    async def guard(request: Request, call_next: Callable[[Request], Awaitable[Response]]) -> Response:
        host = request.headers.get("host", "")
        # Another name for this address means that a site's own name was made to point here (DNS rebinding).
        if host.rpartition(":")[0] not in _LOOPBACK and host not in _LOOPBACK:
            return Response("this page is served to this machine alone\n", 421, media_type="text/plain")
        response = await call_next(request)
        response.headers.update(_HEADERS)
        return response

    @app.exception_handler(Refused)
    async def refused(_: Request, error: Refused) -> HTMLResponse:
        return page("error.html", error.status, message=str(error), status=error.status)

    @app.exception_handler(UserError)
    async def user_error(_: Request, error: UserError) -> HTMLResponse:
        return page("error.html", 409, message=str(error), status=409)

    @app.get("/")
    async def listing(request: Request) -> HTMLResponse:
        catalogue.refresh(least_s=1.0)
        wanted = Filter.from_query(request.query_params)
        found = catalogue.listing(wanted, _number(request.query_params.get("page")))
        return page("list.html", wanted=wanted, found=found, reviews=catalogue.reviews, facets=FACETS, sorts=SORTS)

    @app.get("/protocol")
    async def protocol(request: Request) -> HTMLResponse:
        catalogue.refresh(least_s=1.0)
        query = request.query_params
        wanted, qid = Filter.from_query(query), query.get("id", "")
        with ProtocolStore(cache, readonly=True) as store:
            record = store.get(qid)
            if record is None:
                raise Refused(404, f"there is no question {qid!r} in this cache")
            candidates, log = store.candidates(qid), store.log(qid)
        facts, passages = grounded(record.protocol, log)
        template = query.get("template", "compact")
        text = _rendered(record.protocol, template) if record.protocol else None
        before, after, place, length = catalogue.neighbours(wanted, qid)
        review = catalogue.reviews.get(qid)
        return page(
            "protocol.html",
            record=record,
            candidates=candidates,
            facts=facts,
            others={k: v for k, v in (record.protocol or {}).items() if k not in _KNOWN},
            passages=passages,
            steps=steps(log, passages),
            has_log=log is not None,
            text=text,
            template=template,
            templates=template_names(),
            wanted=wanted,
            before=before,
            after=after,
            place=place,
            length=length,
            review=review,
            verdicts=REVIEW_VERDICTS,
            note_limit=NOTE_LIMIT,
            token=token,
            saved="saved" in query,
        )

    @app.post("/review")
    async def review(request: Request) -> RedirectResponse:
        if readonly:
            raise Refused(403, "this viewer was started with --readonly")
        form = await _form(request, token)
        qid, verdict, note = form.get("id", ""), form.get("verdict", ""), form.get("note", "")
        with ProtocolStore(cache, readonly=True) as store:
            record = store.get(qid)
        if record is None or record.protocol is None:
            raise Refused(404, f"there is no protocol of question {qid!r} in this cache")
        digest = protocol_digest(record.protocol)
        if form.get("digest") != digest:
            raise Refused(409, "this protocol was made anew since the page was loaded: look at it again")
        if verdict == "clear":
            drop_review(cache, qid)
        elif verdict in REVIEW_VERDICTS:
            put_reviews(cache, [Review(qid, digest, verdict, note.replace("\r\n", "\n").strip())])
        else:
            raise Refused(400, f"verdict: choose from {', '.join(REVIEW_VERDICTS)}")
        catalogue.refresh()
        wanted = Filter.from_query({k: v[-1] for k, v in parse_qs(form.get("filter", "")).items()})
        return RedirectResponse(f"/protocol?{wanted.query(id=qid, saved=1)}", 303)

    @app.get("/stats")
    async def stats() -> HTMLResponse:
        catalogue.refresh(least_s=1.0)
        with ProtocolStore(cache, readonly=True) as store:
            return page("stats.html", stats=store.stats())

    @app.get("/style.css")
    async def style() -> Response:
        return Response(_STYLE.read_bytes(), media_type="text/css; charset=utf-8")

    @app.get("/favicon.ico")
    async def icon() -> Response:
        return Response(status_code=204)

    catalogue.refresh()
    return app


_STYLE = Path(__file__).parent / "static/style.css"


async def _form(request: Request, token: str) -> dict[str, str]:
    """The fields of a posted form that this viewer's own page sent.

    A browser names the page that a POST comes from; the token covers those that don't, and other programs.
    """
    origin, host = request.headers.get("origin"), request.headers.get("host")
    if request.headers.get("sec-fetch-site", "same-origin") not in ("same-origin", "none"):
        raise Refused(403, "this form was sent by another site")
    if origin is not None and urlsplit(origin).netloc != host:
        raise Refused(403, "this form was sent by another site")
    body = b""
    async for piece in request.stream():
        body += piece
        if len(body) > BODY_LIMIT:
            raise Refused(413, f"a review of more than {BODY_LIMIT} bytes")
    try:
        fields = parse_qs(body.decode("ascii"), keep_blank_values=True, max_num_fields=20, errors="strict")
    except ValueError as error:
        raise Refused(400, "not a form") from error
    form = {name: values[-1] for name, values in fields.items()}
    if not hmac.compare_digest(form.get("token", "").encode(), token.encode()):
        raise Refused(403, "this form is of another run of the viewer: load the page again")
    return form


def _rendered(protocol: dict[str, Any], template: str) -> str:
    if template not in template_names():  # a file's name is not for a page to ask for
        raise Refused(404, f"there is no template {template!r}")
    try:
        return render(protocol, template)
    except ValueError as error:
        return f"({error})"


def _number(text: str | None) -> int:
    return int(text) if text and text.isascii() and text.isdigit() and len(text) < 9 else 1


def _environment(name: str, readonly: bool) -> Environment:
    environment = Environment(
        loader=PackageLoader("protocol_cache.viewer"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {
        "pretty": pretty,
        "digest": protocol_digest,
        "when": lambda seconds: time.strftime("%Y-%m-%d %H:%M", time.localtime(seconds)),
        "words": lambda text: str(text).replace("_", " "),
    }
    environment.globals |= {"cache_name": name, "readonly": readonly}
    return environment
