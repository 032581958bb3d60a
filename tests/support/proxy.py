"""An HTTP proxy in front of a store's server that does to requests what networks and overloaded servers do.

`proxy.faults = {7: "reset after"}` lets the seventh request through, and loses the answer to it.
"""

import http.client
import socket
import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import urlparse

FAULTS = ("503", "500 after", "reset", "reset after", "cut", "stall", "stall after")
SLOW_DOWN = b"<Error><Code>SlowDown</Code><Message>Please reduce your request rate.</Message></Error>"
HOP_BY_HOP = {"connection", "transfer-encoding", "keep-alive", "content-length", "date", "server"}


class Proxy:
    """`count` is the number of requests since `start` was called; `faults` maps numbers, from 1 on, to what happens.

    `data_bytes` is how much of the checkpoints' data has gone out since then.
    """

    def __init__(self, upstream: str) -> None:
        self.upstream = urlparse(upstream).netloc
        self.ended = threading.Event()
        self._lock = threading.Lock()
        self.start({})

    def start(self, faults: dict[int, str]) -> None:
        self.faults, self.count, self.data_bytes = faults, 0, 0

    def next_fault(self) -> str | None:
        with self._lock:
            self.count += 1
            return self.faults.get(self.count)

    def sent_data(self, size_bytes: int) -> None:
        with self._lock:
            self.data_bytes += size_bytes


def _handler(proxy: Proxy) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version, disable_nagle_algorithm = "HTTP/1.1", True

        def handle_any(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            fault = proxy.next_fault()
            if fault == "503":
                return self._answer(503, [], SLOW_DOWN)
            if fault == "reset":
                return self._reset()
            if fault == "stall":
                return self._stall()
            status, headers, answer = self._forward(body)
            if self.command == "GET" and urlparse(self.path).path.endswith(".bin"):
                proxy.sent_data(len(answer))
            if fault == "500 after":
                return self._answer(500, [], b"")
            if fault == "reset after":
                return self._reset()
            if fault == "stall after":
                return self._stall()
            return self._answer(status, headers, answer, cut=fault == "cut")

        do_GET = do_PUT = do_HEAD = do_DELETE = do_POST = handle_any

        def _forward(self, body: bytes) -> tuple[int, list[tuple[str, str]], bytes]:
            upstream = http.client.HTTPConnection(proxy.upstream, timeout=30)
            upstream.request(self.command, self.path, body, dict(self.headers))
            answer = upstream.getresponse()
            found = answer.status, answer.getheaders(), answer.read()
            upstream.close()
            return found

        def _answer(self, status: int, headers: list[tuple[str, str]], body: bytes, *, cut: bool = False) -> None:
            self.send_response(status)
            length = str(len(body))
            for name, value in headers:
                if name.lower() == "content-length" and self.command == "HEAD":
                    length = value
                if name.lower() not in HOP_BY_HOP:
                    self.send_header(name, value)
            self.send_header("Content-Length", length)
            self.end_headers()
            if self.command != "HEAD":  # its answer has no body, and one would be read as the next answer
                self.wfile.write(body[: len(body) // 2] if cut else body)
            if cut:
                self._reset()

        def _reset(self) -> None:
            """Close the connection in the way that a crashed peer's machine does."""
            self.wfile.flush()
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self.connection.close()
            self.close_connection = True

        def _stall(self) -> None:
            """Say nothing until the other side has given up."""
            while not proxy.ended.is_set() and self.connection.recv(1):
                pass
            self.close_connection = True

        def finish(self) -> None:
            with suppress(OSError):  # after a reset
                super().finish()

        def log_message(self, format: str, *args: Any) -> None:
            pass

    return Handler


@contextmanager
def proxied(upstream: str) -> Iterator[tuple[Proxy, str]]:
    """A proxy and its URL."""
    proxy = Proxy(upstream)
    server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(proxy))
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        yield proxy, f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        proxy.ended.set()
        server.shutdown()
        thread.join()
        server.server_close()
