"""The hub: noticed as out of reach at once, and its libraries told so for as long as a session lasts."""

import socket
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from threading import Thread

import huggingface_hub.constants as constants
import pytest

from flextrain import hub

datasets = pytest.importorskip("datasets")


def test_offline_mode_ends_with_the_session(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub, "hub_reachable", lambda endpoint: False)
    before = constants.HF_HUB_OFFLINE
    with hub.hub_session() as offline:
        assert offline
        assert constants.HF_HUB_OFFLINE
        assert datasets.config.HF_HUB_OFFLINE
    assert before == constants.HF_HUB_OFFLINE == datasets.config.HF_HUB_OFFLINE


def test_a_reachable_hub_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub, "hub_reachable", lambda endpoint: True)
    with hub.hub_session() as offline:
        assert offline == constants.HF_HUB_OFFLINE


@pytest.fixture
def server() -> Iterator[str]:
    class NotFound(BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            self.send_error(404)

        def log_message(self, *_: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), NotFound) as http:
        thread = Thread(target=http.serve_forever, args=(0.01,))
        thread.start()
        yield f"http://127.0.0.1:{http.server_port}"
        http.shutdown()
        thread.join()


class TestProbe:
    probe = staticmethod(hub.hub_reachable.__wrapped__)

    def test_any_answer_counts(self, server: str) -> None:
        assert self.probe(server)

    def test_refusal_and_nonsense_do_not(self, server: str) -> None:
        with socket.socket() as closed:
            closed.bind(("127.0.0.1", 0))
            assert not self.probe(f"http://127.0.0.1:{closed.getsockname()[1]}")
        assert not self.probe("no url")

    def test_silence_does_not(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(hub, "PROBE_TIMEOUT_S", 0.1)
        with socket.create_server(("127.0.0.1", 0)) as silent:
            assert not self.probe(f"http://127.0.0.1:{silent.getsockname()[1]}")
