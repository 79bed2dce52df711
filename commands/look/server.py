"""The viewer's server: pages and data of runs, accessible only to the user who started it.

    GET /?token=...           sets a cookie and redirects to the page without the token
    GET /api/...              JSON; see `api.py`

The server listens only on the loopback address, which other users of this machine and any page in the user's browser can reach
too. So a request needs the token, in the URL or as a cookie, which other sites cannot send (SameSite=Strict). Its Host header
must name the loopback address; other names that resolve to it are refused. The page runs only its own scripts and contacts only
this server (Content-Security-Policy). Models' texts are sent as JSON and displayed as text.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable, Sequence
from pathlib import Path
from urllib.parse import parse_qsl, urlencode

from fastapi import FastAPI, HTTPException, Request
from pydantic import ValidationError
from starlette.middleware.base import RequestResponseEndpoint
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.responses import HTMLResponse, RedirectResponse, Response

from marsrl.commands.look.api import LISTS, Api
from marsrl.commands.look.export import page
from marsrl.rollout.http_server import listen, serve

HEADERS = {
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cache-Control": "no-store",
}


class PlainJson(Response):
    """JSON in ASCII, which preserves any text of a model, even lone surrogates."""

    media_type = "application/json"

    def render(self, content: object) -> bytes:
        return json.dumps(content, ensure_ascii=True, allow_nan=False, separators=(",", ":")).encode("ascii")


def make_app(runs: Sequence[Path], token: str, cookie: str = "marsrl_view") -> FastAPI:
    """Return the application.

    cookie: name of the application's cookie. Viewers on different ports of a host share cookies, so each needs another name.
    """
    app = FastAPI(
        title="marsrl view", docs_url=None, redoc_url=None, openapi_url=None, default_response_class=PlainJson
    )
    questions, (file, policy) = Api(runs).questions, page()
    headers = {**HEADERS, "Content-Security-Policy": f"{policy}; frame-ancestors 'none'"}

    def is_right(given: str | None) -> bool:
        return given is not None and secrets.compare_digest(given.encode("utf-8", "replace"), token.encode())

    @app.middleware("http")
    async def guard(request: Request, go_on: RequestResponseEndpoint) -> Response:
        """Reject requests without the token, and add the security headers to every response."""
        if is_right(request.query_params.get("token")) and request.method == "GET":
            rest = urlencode([(k, v) for k, v in parse_qsl(request.url.query) if k != "token"])
            response: Response = RedirectResponse(f"/?{rest}" if rest else "/", status_code=303)
            response.set_cookie(cookie, token, httponly=True, samesite="strict")
        elif is_right(request.cookies.get(cookie)):
            response = await go_on(request)
        else:
            text = "marsrl view: this address needs the token that `marsrl view` printed: open the whole address from there\n"
            response = Response(text, status_code=403, media_type="text/plain")
        response.headers.update(headers)
        return response

    @app.get("/")
    def show() -> Response:
        return HTMLResponse(file)

    @app.get("/api/{question}")
    def answer(question: str, request: Request) -> Response:
        if question not in questions:
            raise HTTPException(404)
        given = request.query_params
        asked = {key: given.getlist(key) if key in LISTS else given[key] for key in given}
        return PlainJson(questions[question](**asked))

    @app.exception_handler(ValueError)
    def refused(_: Request, error: Exception) -> Response:
        text = f"a parameter cannot be read: {error}" if isinstance(error, ValidationError) else str(error)
        return PlainJson({"detail": text[:400]}, status_code=400)

    app.add_middleware(TrustedHostMiddleware, allowed_hosts=["127.0.0.1", "localhost"], www_redirect=False)
    return app


def view(runs: Sequence[Path], port: int, on_address: Callable[[str], None]) -> None:
    """Serve until Ctrl-C. on_address: called with the URL and its token once the server is reachable. port: 0 for any free port.

    Raises OSError if the port is not available.
    """
    token = secrets.token_urlsafe(24)
    with listen("127.0.0.1", port) as listening:
        number = listening.getsockname()[1]
        app = make_app(runs, token, f"marsrl_view_{number}")
        serve(app, listening, lambda: on_address(f"http://127.0.0.1:{number}/?token={token}"))
