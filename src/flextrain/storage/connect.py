"""How a bucket is reached: credentials and endpoints from the environment, patience with a server that ails."""

import os
from datetime import timedelta
from typing import Any

from obstore.store import from_url

# Server errors (SlowDown among them), refused and lost connections, and timeouts are met with up to eight more tries,
# each after a random time between the first pause and three times the one before: some twenty seconds in all. A pause
# is random so that many ranks do not come back at once. A request has failed after 90 s: long enough for eight parts of
# 32 MiB at a time over a line of 24 Mbit/s. Nothing is tried again 180 s after the first try.
RETRY = {
    "max_retries": 8,
    "retry_timeout": timedelta(seconds=180),
    "backoff": {"init_backoff": timedelta(seconds=0.2), "max_backoff": timedelta(seconds=15), "base": 3.0},
}
CLIENT = {"connect_timeout": timedelta(seconds=5), "timeout": timedelta(seconds=90)}


def connect(scheme: str, bucket: str) -> Any:
    """An obstore store. Nothing is contacted yet; raises what botocore raises where there are no credentials for S3."""
    options = {"s3": _s3, "gs": _google}.get(scheme, _azure)()
    http = {"allow_http": True} if options.pop("http", False) else {}
    return from_url(f"{scheme}://{bucket}", client_options={**CLIENT, **http}, retry_config=RETRY, **options)


def _s3() -> dict[str, Any]:
    from obstore.auth.boto3 import Boto3CredentialProvider

    provider = Boto3CredentialProvider()
    endpoint = os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL") or ""
    own = {"endpoint": endpoint, "virtual_hosted_style_request": False} if endpoint else {}
    region = provider.config.get("region") or os.environ.get("AWS_REGION") or "us-east-1"
    # To sign the payload is to hash it by sha256, which costs three times what sending does; TLS guards it as well.
    config = {**own, "region": region, "unsigned_payload": True}
    return {"config": config, "credential_provider": provider, "http": endpoint.startswith("http://")}


def _google() -> dict[str, Any]:
    """Google's own variables are read by obstore; an emulator is named as Google's libraries have it."""
    emulator = os.environ.get("STORAGE_EMULATOR_HOST", "")
    if not emulator:
        return {}
    url = emulator if "://" in emulator else f"http://{emulator}"
    anyone = {"token": "emulator", "expires_at": None}
    return {"config": {"base_url": url}, "credential_provider": lambda: anyone, "http": url.startswith("http://")}


def _azure() -> dict[str, Any]:
    """AZURE_STORAGE_ACCOUNT_NAME, …_ACCOUNT_KEY, …_ENDPOINT, …_USE_EMULATOR and their like are read by obstore."""
    return {"http": os.environ.get("AZURE_STORAGE_ENDPOINT", "").startswith("http://")}
