"""The Hugging Face hub: is it reachable, and its libraries kept from waiting for a network that is not there.

Without this, `from_pretrained` and `load_dataset` retry for 23 to 46 s on a machine without network (measured with
huggingface_hub 2.4); with it they look into their caches at once.
"""

import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

PROBE_TIMEOUT_S = 5.0


@contextmanager
def hub_session() -> Iterator[bool]:
    """Within it the Hugging Face libraries use their caches alone where the hub is out of reach; yields whether so."""
    import huggingface_hub.constants as hub

    modules: list[Any] = [hub]
    if "datasets.config" in sys.modules:  # it keeps a copy; models and tokenizers need huggingface_hub alone
        modules.append(sys.modules["datasets.config"])
    before = [module.HF_HUB_OFFLINE for module in modules]
    offline = any(before) or not hub_reachable(hub.ENDPOINT)
    for module in modules:
        module.HF_HUB_OFFLINE = offline
    try:
        yield offline
    finally:
        for module, value in zip(modules, before, strict=True):
            module.HF_HUB_OFFLINE = value


@cache
def hub_reachable(endpoint: str) -> bool:
    """Whether anything answers there within PROBE_TIMEOUT_S, proxies of the environment included."""
    answered = threading.Event()

    def ask() -> None:
        try:
            urllib.request.urlopen(urllib.request.Request(endpoint, method="HEAD"), timeout=PROBE_TIMEOUT_S).close()
        except urllib.error.HTTPError:
            pass  # an answer all the same
        except (OSError, ValueError):
            return
        answered.set()

    # A thread, because name resolution knows no timeout.
    thread = threading.Thread(target=ask, name="hub-probe", daemon=True)
    thread.start()
    thread.join(PROBE_TIMEOUT_S)
    return answered.is_set()
