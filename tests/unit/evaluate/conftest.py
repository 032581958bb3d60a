"""A small index with text outside ASCII, shared by the tests of this room."""

import pytest
from tests.support.texts import small_config, write_corpus

from flextrain.data import TokenIndexFile
from flextrain.data.index_builder import build_index


@pytest.fixture(scope="session")
def index(tmp_path_factory: pytest.TempPathFactory) -> TokenIndexFile:
    """Its held-out split."""
    folder = tmp_path_factory.mktemp("evaluate")
    build_index(small_config(write_corpus(folder / "corpus")), str(folder / "index"), progress=False)
    return TokenIndexFile(folder / "index", split="heldout")
