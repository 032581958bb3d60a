"""A small corpus and its index, shared by the tests of this room."""

from pathlib import Path

import pytest
from tests.support.s3 import bucket, s3_endpoint
from tests.support.texts import small_config, write_corpus

from flextrain.data.index_builder import build_index

__all__ = ["bucket", "s3_endpoint"]


@pytest.fixture(scope="session")
def corpus_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_corpus(tmp_path_factory.mktemp("corpus"))


@pytest.fixture(scope="session")
def index_folder(corpus_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """For reading; tests that change it copy it first."""
    out = tmp_path_factory.mktemp("index") / "index.bin"
    build_index(small_config(corpus_folder), str(out), progress=False)
    return out
