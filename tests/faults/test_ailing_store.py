"""An object store that answers 503, stalls, or drops connections at any request of a save or a load."""

import random
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest
import xxhash
from tests.support.proxy import FAULTS, Proxy, proxied
from tests.support.s3 import Bucket, bucket, s3_endpoint
from tests.support.seeds import seeded
from tests.support.subject import CHUNK_BYTES, Subject, _small_chunks

from flextrain.checkpoint import commit, transfer
from flextrain.errors import FlextrainError
from flextrain.storage import connect, open_store, store

__all__ = ["_small_chunks", "bucket", "s3_endpoint"]
pytestmark = pytest.mark.usefixtures("_small_chunks")


@pytest.fixture
def proxy(bucket: Bucket, monkeypatch: pytest.MonkeyPatch) -> Iterator[Proxy]:
    """The way to the bucket for all that follows, by a client that is as patient as ours, in a hurry."""
    plain = connect.from_url

    def hurried(url: str, **options: Any) -> Any:
        pauses = {"init_backoff": timedelta(milliseconds=5), "max_backoff": timedelta(milliseconds=20), "base": 2.0}
        options["retry_config"] = {"max_retries": 4, "backoff": pauses}
        options["client_options"] = {**options["client_options"], "timeout": timedelta(seconds=1.5)}
        return plain(url, **options)

    monkeypatch.setattr(connect, "from_url", hurried)
    monkeypatch.setattr(transfer, "_pause", lambda seconds: None)
    monkeypatch.setattr(commit, "REMOTE_POLL_S", 0.02)
    with proxied(bucket.endpoint) as (made, url):
        for name, value in {**bucket.environ, "AWS_ENDPOINT_URL": url}.items():
            monkeypatch.setenv(name, value)
        yield made


def burst(rng: random.Random, requests: int) -> dict[int, str]:
    """A fault, or several in a row: short ones are survived, long ones are not."""
    first, kind = rng.randint(1, requests), rng.choice(FAULTS)
    length = rng.choice([1, 1, 2, 3]) if "stall" in kind else rng.choice([1, 1, 2, 4, 5, 200])
    return dict.fromkeys(range(first, first + length), kind)


@seeded(70, sample=1)
def test_an_ailing_store_at_any_request_of_a_save(bucket: Bucket, proxy: Proxy, seed: int) -> None:
    rng = random.Random(seed)
    subject = Subject(f"{bucket.url}/run", seed, keep=rng.randint(1, 2))
    subject.save(1)
    proxy.start({})
    subject.save(2)
    proxy.start(burst(rng, proxy.count))
    error = None
    try:
        subject.save(3)
    except FlextrainError as caught:
        error = caught
    proxy.start({})
    committed = subject.check()
    assert error or 3 in committed
    assert set([*[1, 2], *committed[-1:]][-subject.keep :]) <= {*committed, 3}, "a commit was lost"
    if 3 not in committed:
        subject.save(3)
    subject.save(4)
    assert subject.check() == [1, 2, 3, 4][-subject.keep :]


@seeded(50, sample=1)
def test_an_ailing_store_at_any_request_of_a_resumption(bucket: Bucket, proxy: Proxy, seed: int) -> None:
    rng = random.Random(seed)
    subject = Subject(f"{bucket.url}/run", seed)
    for step in (1, 2):
        subject.save(step)
    proxy.start({})
    assert subject.resume() == 2
    proxy.start(burst(rng, proxy.count))
    try:
        assert subject.resume() == 2
    except FlextrainError:
        assert proxy.count >= min(proxy.faults)
    proxy.start({})
    assert subject.check() == [1, 2], "an ailing store is not a bad checkpoint"
    assert subject.resume() == 2


@seeded(60, sample=1)
def test_an_ailing_store_at_any_request_of_an_upload_in_parts(
    bucket: Bucket, proxy: Proxy, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    monkeypatch.setattr(store, "PART_BYTES", 5 << 20)  # S3 takes no smaller ones
    rng, folder = random.Random(seed), open_store(f"{bucket.url}/run")
    content = rng.randbytes(11 << 20)
    proxy.start(burst(rng, requests=5))
    try:
        entry = transfer.upload(folder, "a/rank-00000.bin", memoryview(content), len(content))
    except FlextrainError:
        proxy.start({})
        assert folder.size("a/rank-00000.bin") in (None, len(content)), "part of an object appeared"
        entry = transfer.upload(folder, "a/rank-00000.bin", memoryview(content), len(content))
    proxy.start({})
    assert folder.get("a/rank-00000.bin") == content
    assert entry.chunks == tuple(
        xxhash.xxh3_64_hexdigest(content[at : at + CHUNK_BYTES]) for at in range(0, len(content), CHUNK_BYTES)
    )
