"""Tokenizers: lossless, deterministic, and blind to special tokens spelt out in a text."""

import pickle
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from flextrain.data.documents import Document
from flextrain.data.encoding import encode_documents, pieces_of
from flextrain.data.tokenizer import END_OF_TEXT, Tokenizer, load_tokenizer
from flextrain.errors import DataError

TEXTS = [
    "def f(x):\n    return x + 1\n",
    "The quick brown fox. " * 40,
    "naïve café 𝄞 \x00\x7f\r\n",
    "aaa bbb ccc " * 30,
]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.train(400, TEXTS)


@given(text=st.text(max_size=300))
@settings(deadline=None)
def test_decoding_gives_back_every_text(tokenizer: Tokenizer, text: str) -> None:
    text = text.encode("utf-8", "ignore").decode()
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert ids.dtype == np.uint32
    assert not len(ids) or ids.max() < tokenizer.vocab_size


def test_end_of_text_spelt_out_is_plain_text(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode(f"a{END_OF_TEXT}b")
    assert tokenizer.end_of_text not in ids
    assert len(ids) > 3
    assert tokenizer.decode(ids) == f"a{END_OF_TEXT}b"
    assert tokenizer.decode([tokenizer.end_of_text]) == END_OF_TEXT


def test_batches_encode_as_single_texts_do(tokenizer: Tokenizer) -> None:
    for text, ids in zip(TEXTS, tokenizer.encode_batch(TEXTS), strict=True):
        assert np.array_equal(ids, tokenizer.encode(text))


def test_training_learns_merges_and_respects_the_size(tokenizer: Tokenizer) -> None:
    assert 257 < tokenizer.vocab_size <= 400
    assert len(tokenizer.encode("The quick brown fox.")) < 10
    assert Tokenizer.train(257, TEXTS).vocab_size == 257


def test_the_same_texts_train_the_same_tokenizer_in_another_process(tokenizer: Tokenizer) -> None:
    code = f"from flextrain.data.tokenizer import Tokenizer; print(Tokenizer.train(400, {TEXTS!r}).digest)"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip()
    assert found == tokenizer.digest


def test_json_and_pickle_keep_everything(tokenizer: Tokenizer) -> None:
    for copy in (Tokenizer.from_json(tokenizer.to_json()), pickle.loads(pickle.dumps(tokenizer))):
        assert copy.digest == tokenizer.digest
        assert (copy.end_of_text, copy.vocab_size) == (tokenizer.end_of_text, tokenizer.vocab_size)
        assert np.array_equal(copy.encode(TEXTS[0] + END_OF_TEXT), tokenizer.encode(TEXTS[0] + END_OF_TEXT))


@pytest.mark.parametrize("text", ["", "{}", "[]", '{"tokenizer": {}, "end_of_text": 0}'])
def test_broken_json_is_a_data_error(text: str) -> None:
    with pytest.raises(DataError, match="no tokenizer as flextrain stores it"):
        Tokenizer.from_json(text)


@pytest.mark.parametrize("spec", ["train:", "train:abc", "train:256", "train:-1", "train:4096.5", "train:²"])
def test_impossible_vocabularies_are_refused_with_an_example(spec: str) -> None:
    with pytest.raises(DataError, match="no possible vocabulary") as caught:
        load_tokenizer(spec, TEXTS)
    assert "train:4096" in caught.value.remedy


def test_a_transformers_tokenizer_is_taken_from_a_folder_as_it_is(tokenizer: Tokenizer, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    backend = tokenizer._backend
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=END_OF_TEXT)
    fast.save_pretrained(tmp_path)
    loaded = load_tokenizer(str(tmp_path), ())
    assert (loaded.vocab_size, loaded.end_of_text) == (tokenizer.vocab_size, tokenizer.end_of_text)
    text = f"def café {END_OF_TEXT} quick brown"
    assert np.array_equal(loaded.encode(text), tokenizer.encode(text))
    fast.pad_token = END_OF_TEXT
    fast(["truncate me", "now"], truncation=True, max_length=2, padding=True)
    assert np.array_equal(Tokenizer.from_transformers(fast).encode(text), tokenizer.encode(text))


def test_a_tokenizer_without_end_of_sequence_is_refused() -> None:
    transformers = pytest.importorskip("transformers")
    import tokenizers

    bare = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "b": 1}, unk_token="a"))
    with pytest.raises(DataError, match="no end-of-sequence token"):
        Tokenizer.from_transformers(transformers.PreTrainedTokenizerFast(tokenizer_object=bare))


@example(["word", "\r\n", "word"], 1)  # a border at the very start of a piece
@given(
    st.lists(st.sampled_from(["word", "x1", " ", "\n", "\r\n", "\n\n", ";", "é", "    "]), max_size=200),
    st.integers(1, 40),
)
@settings(deadline=None)
def test_long_documents_encode_piecewise_to_the_same_ids(tokenizer: Tokenizer, words: list[str], limit: int) -> None:
    text = "".join(words)
    pieces = list(pieces_of(text, limit))
    assert "".join(pieces) == text
    ids = np.concatenate(tokenizer.encode_batch(pieces))
    assert np.array_equal(ids, tokenizer.encode(text))


def test_a_document_of_many_lines_comes_in_pieces_of_bounded_length() -> None:
    assert max(map(len, pieces_of("some words\n" * 1_000, 100))) <= 111


def test_documents_come_back_in_order_each_closed_by_the_end_of_text(tokenizer: Tokenizer) -> None:
    texts = [f"document {i} " * (i + 1) for i in range(50)]
    documents = [("train", Document(str(i), text, len(text), len(text))) for i, text in enumerate(texts)]
    for text, (split, document, ids) in zip(texts, encode_documents(documents, tokenizer), strict=True):
        assert (split, document.text) == ("train", text)
        assert ids[-1] == tokenizer.end_of_text
        assert np.array_equal(ids[:-1], tokenizer.encode(text))
