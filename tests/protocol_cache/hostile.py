"""A real HTTP server with OpenAI's chat API that replies whatever a test wants, and remembers what it was asked."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any


@dataclass(frozen=True)
class Asked:
    """One request: the role named in the system message, the inputs, and all messages."""

    role: str
    inputs: dict[str, Any]
    messages: list[dict[str, str]]
    response_format: Any = None


#: A content, or an HTTP status with a whole body.
Responder = Callable[[Asked], "str | tuple[int, bytes] | None"]


class HostileTeacher:
    """``url`` is the API base; ``asked`` holds every request in order."""

    def __init__(self, respond: Responder) -> None:
        self.asked: list[Asked] = []
        outer = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                asked = replace(_read(body["messages"]), response_format=body.get("response_format"))
                outer.asked.append(asked)
                answer = respond(asked)
                status, content = answer if isinstance(answer, tuple) else (200, completion(answer))
                self.send_response(status)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

            def log_message(self, *args: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_port}/v1"
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.02})
        self._thread.start()

    def roles(self) -> list[str]:
        return [asked.role for asked in self.asked]

    def __enter__(self) -> HostileTeacher:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def _read(messages: list[dict[str, str]]) -> Asked:
    role = re.search(r"^Role: (\S+)$", messages[0]["content"], re.MULTILINE)
    block = re.search(r"^```json\n(.*?)\n```$", messages[1]["content"], re.MULTILINE | re.DOTALL)
    assert role and block
    return Asked(role[1], json.loads(block[1]), messages)


def completion(content: str | None, **message_fields: Any) -> bytes:
    message = {"role": "assistant", "content": content, **message_fields}
    body = {
        "id": "c",
        "object": "chat.completion",
        "created": 1,
        "model": "m",
        "choices": [{"index": 0, "message": message, "finish_reason": "stop"}],
        "usage": {"prompt_tokens": 100, "completion_tokens": 10, "total_tokens": 110},
    }
    return json.dumps(body).encode()
