"""An empty place in a store of every kind. What is no folder and no memory is a server on this machine.

s3: moto. az: azurite, where npm has installed it on the PATH (`npm install -g azurite`). gs: obstore speaks Google's
XML API, which is that of S3 with a few headers of its own; the one emulator on PyPI, gcp-storage-emulator, has only the
JSON API (no lists, deletes or multipart uploads over XML). So moto answers here too, behind `_Google`, which translates
the precondition of create-if-absent and answers 404 for deleting what is not there, as Google does. That shows that our
client, its settings and all that stands on it work; what Google's servers themselves do, it takes Google to show.
"""

import base64
import hashlib
import hmac
import http.client
import re
import shutil
import subprocess
import threading
import urllib.request
import uuid
from collections.abc import Iterator
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import urlparse

import pytest

from flextrain.storage import Store, open_store
from tests.support.s3 import Bucket, bucket, s3_endpoint

__all__ = ["azurite", "bucket", "google", "place", "s3_endpoint", "store"]
KINDS = ("folder", "memory", "s3", "gs", "az")
AZURITE_ACCOUNT = "devstoreaccount1"  # it and its key are the same for every azurite, and published
AZURITE_KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="
AZURE_API = "2021-08-06"


@pytest.fixture(params=KINDS)
def place(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The URL of an empty place; the environment leads to its server."""
    if request.param == "folder":
        return str(tmp_path / "root")
    if request.param == "memory":
        return "memory://bucket/root"
    if request.param == "az":
        endpoint = request.getfixturevalue("azurite")
        monkeypatch.setenv("AZURE_STORAGE_USE_EMULATOR", "true")
        monkeypatch.setenv("AZURITE_BLOB_STORAGE_URL", endpoint)
        return f"az://{_container(endpoint)}/root"
    made: Bucket = request.getfixturevalue("bucket")
    if request.param == "gs":
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", request.getfixturevalue("google"))
        return f"gs://{made.name}/root"
    for name, value in made.environ.items():
        monkeypatch.setenv(name, value)
    return f"{made.url}/root"


@pytest.fixture
def store(place: str) -> Store:
    return open_store(place)


@pytest.fixture(scope="session")
def azurite() -> Iterator[str]:
    """URL of a server that lives as long as the tests do, and keeps all in memory."""
    program = shutil.which("azurite-blob")
    if not program:
        pytest.skip("azurite, the emulator of Azure's blobs, is not installed (npm install -g azurite)")
    quiet = ("--inMemoryPersistence", "--silent", "--disableTelemetry", "--skipApiVersionCheck")
    process = subprocess.Popen([program, "--blobPort", "0", *quiet], stdout=subprocess.PIPE, text=True)
    assert process.stdout
    found = (re.search(r"listens on (http\S+)", line) for line in process.stdout)
    yield next(match[1] for match in found if match)
    process.kill()
    process.wait()


def _container(endpoint: str) -> str:
    """Make one: obstore only uses them. https://learn.microsoft.com/rest/api/storageservices/authorize-with-shared-key"""
    name = f"flextrain-{uuid.uuid4().hex[:12]}"
    headers = {"x-ms-date": formatdate(usegmt=True), "x-ms-version": AZURE_API}
    said = "".join(f"{key}:{value}\n" for key, value in headers.items())
    text = "PUT" + "\n" * 12 + f"{said}/{AZURITE_ACCOUNT}/{AZURITE_ACCOUNT}/{name}\nrestype:container"
    signature = base64.b64encode(hmac.digest(base64.b64decode(AZURITE_KEY), text.encode(), hashlib.sha256)).decode()
    headers["Authorization"] = f"SharedKey {AZURITE_ACCOUNT}:{signature}"
    url = f"{endpoint}/{AZURITE_ACCOUNT}/{name}?restype=container"
    urllib.request.urlopen(urllib.request.Request(url, method="PUT", headers=headers)).close()
    return name


@pytest.fixture(scope="session")
def google(s3_endpoint: str) -> Iterator[str]:
    upstream = urlparse(s3_endpoint).netloc
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Google,), {"upstream": upstream}))
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    yield f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    thread.join()
    server.server_close()


class _Google(BaseHTTPRequestHandler):
    """Passes requests on to a server of S3's dialect."""

    protocol_version, disable_nagle_algorithm = "HTTP/1.1", True
    upstream: str

    def handle_any(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        headers = dict(self.headers.items())
        if headers.pop("x-goog-if-generation-match", None) == "0":
            headers["If-None-Match"] = "*"
        one = self.command == "DELETE" and "?" not in self.path  # not an upload to be aborted
        if one and self._ask("HEAD", b"", headers)[0] == 404:
            return self._answer(404, {}, b"")
        return self._answer(*self._ask(self.command, body, headers))

    do_GET = do_PUT = do_HEAD = do_DELETE = do_POST = handle_any

    def _ask(self, method: str, body: bytes, headers: dict[str, str]) -> tuple[int, dict[str, str], bytes]:
        connection = http.client.HTTPConnection(self.upstream, timeout=30)
        connection.request(method, self.path.replace("%2D", "-"), body, headers)  # moto takes that for another name
        answer = connection.getresponse()
        found = answer.status, dict(answer.getheaders()), answer.read()
        connection.close()
        return found

    def _answer(self, status: int, headers: dict[str, str], body: bytes) -> None:
        self.send_response_only(status)
        length = str(len(body))
        for name, value in headers.items():
            if name.lower() == "content-length" and self.command == "HEAD":
                length = value
            elif name.lower() not in ("content-length", "connection", "transfer-encoding"):
                self.send_header(name, value)
        self.send_header("Content-Length", length)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        pass
