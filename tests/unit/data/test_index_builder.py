"""Building an index: the tokens of the corpus, the same bytes every time, and all or nothing."""

import os
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import tokenizers
from tests.support.texts import small_config, write_corpus

from flextrain.data.corpus import Corpus
from flextrain.data.index import TokenIndexFile
from flextrain.data.index_builder import build_index, ensure_index, main
from flextrain.data.tokenizer import Tokenizer
from flextrain.errors import DataError


def content(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def test_an_index_holds_every_document_in_order(corpus_folder: Path, index_folder: Path) -> None:
    corpus = Corpus.of([str(corpus_folder)], text_key="text", heldout_fraction=0.2)
    for split in ("train", "heldout"):
        index = TokenIndexFile(index_folder, split=split)
        texts = [document.text for s, document in corpus.documents() if s == split]
        tokenizer = index.tokenizer()
        expected = [np.append(ids, tokenizer.end_of_text) for ids in tokenizer.encode_batch(texts)]
        assert np.array_equal(index.tokens[:], np.concatenate(expected))
        assert index.document_ends.tolist() == np.cumsum([len(ids) for ids in expected]).tolist()
        assert index.text_bytes == sum(len(text.encode()) for text in texts)
        assert (index.num_documents, index.num_tokens) == (len(texts), sum(map(len, expected)))


def test_builds_are_equal_to_the_byte_wherever_the_corpus_lies(index_folder: Path, tmp_path: Path) -> None:
    elsewhere = write_corpus(tmp_path / "elsewhere")
    _, digest = build_index(small_config(elsewhere), str(tmp_path / "again"), progress=False)
    assert content(tmp_path / "again") == content(index_folder)
    assert digest == TokenIndexFile(index_folder).digest


def test_the_size_of_shards_changes_no_token(corpus_folder: Path, index_folder: Path, tmp_path: Path) -> None:
    build_index(small_config(corpus_folder, shard_tokens=1024), str(tmp_path / "small"), progress=False)
    for split in ("train", "heldout"):
        whole, cut = (TokenIndexFile(path, split=split) for path in (index_folder, tmp_path / "small"))
        assert np.array_equal(whole.tokens[:], cut.tokens[:])
        assert np.array_equal(whole.document_ends, cut.document_ends)
        assert [len(shard) for shard in cut.tokens.shards[:-1]] == [1024] * (len(cut.tokens.shards) - 1)
    assert len(TokenIndexFile(tmp_path / "small").tokens.shards) > 1


def test_a_finished_index_of_the_same_recipe_is_left_as_it_is(corpus_folder: Path, tmp_path: Path) -> None:
    first = build_index(small_config(corpus_folder), str(tmp_path / "i"), progress=False)
    before = {path.name: path.stat().st_ino for path in (tmp_path / "i").iterdir()}
    assert build_index(small_config(corpus_folder), str(tmp_path / "i"), progress=False) == first
    assert {path.name: path.stat().st_ino for path in (tmp_path / "i").iterdir()} == before


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"tokenizer": "train:301"}, "tokenizer"),
        ({"heldout_fraction": 0.3}, "heldout_fraction"),
        ({"shard_tokens": 2048}, "shard_tokens"),
    ],
)
def test_another_recipe_never_replaces_an_index(
    corpus_folder: Path, index_folder: Path, change: dict[str, object], named: str
) -> None:
    before = content(index_folder)
    with pytest.raises(DataError, match=rf"built from something else; different are: {named}"):
        build_index(small_config(corpus_folder, **change), str(index_folder), progress=False)
    assert content(index_folder) == before


def test_a_changed_file_is_another_recipe(tmp_path: Path) -> None:
    write_corpus(tmp_path / "c")
    build_index(small_config(tmp_path / "c"), str(tmp_path / "i"), progress=False)
    text = (tmp_path / "c" / "b.txt").read_text()
    (tmp_path / "c" / "b.txt").write_text(text.replace("if", "fi", 1))
    with pytest.raises(DataError, match="different are: sources"):
        build_index(small_config(tmp_path / "c"), str(tmp_path / "i"), progress=False)


KILLED_BUILD = """
import os, signal, sys
from flextrain.data.index_builder import build_index
from flextrain.storage import Store
from tests.support.texts import small_config
puts, put = 0, Store.put
def put_and_die(self, *args, **kwargs):
    global puts
    if puts == int(sys.argv[3]):
        os.kill(os.getpid(), signal.SIGKILL)
    puts += 1
    put(self, *args, **kwargs)
Store.put = put_and_die
build_index(small_config(sys.argv[1], shard_tokens=1024), sys.argv[2], progress=False)
"""


@pytest.mark.parametrize("puts", [1, 3])
def test_a_killed_build_leaves_no_index_and_the_next_one_succeeds(
    corpus_folder: Path, tmp_path: Path, puts: int
) -> None:
    out = tmp_path / "i"
    command = [sys.executable, "-c", KILLED_BUILD, str(corpus_folder), str(out), str(puts)]
    killed = subprocess.run(command, env={**os.environ, "TMPDIR": str(tmp_path)}, cwd=Path(__file__).parents[3])
    assert killed.returncode == -signal.SIGKILL
    assert len(list(out.iterdir())) == puts
    with pytest.raises(DataError, match="no finished index"):
        TokenIndexFile(out)
    config = small_config(corpus_folder, shard_tokens=1024)
    build_index(config, str(out), progress=False)
    build_index(config, str(tmp_path / "undisturbed"), progress=False)
    assert content(out) == content(tmp_path / "undisturbed")


def test_a_build_that_fails_leaves_nothing(tmp_path: Path) -> None:
    write_corpus(tmp_path / "c")
    (tmp_path / "c" / "z.txt").write_bytes(b"fine\xff")
    with pytest.raises(DataError, match=r"z\.txt is not text"):
        build_index(small_config(tmp_path / "c", shard_tokens=1024), str(tmp_path / "i"), progress=False)
    assert not (tmp_path / "i").exists()


def test_shards_of_a_build_that_fails_late_are_taken_back(
    corpus_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        assert (tmp_path / "i" / "train-00000.bin").exists()
        raise KeyboardInterrupt

    monkeypatch.setattr("flextrain.data.index_builder._commit", fail)
    with pytest.raises(KeyboardInterrupt):
        build_index(small_config(corpus_folder, shard_tokens=1024), str(tmp_path / "i"), progress=False)
    assert not (tmp_path / "i").exists()


def test_builders_of_the_same_index_at_the_same_time_agree(corpus_folder: Path, tmp_path: Path) -> None:
    config = small_config(corpus_folder, shard_tokens=1024)
    with ThreadPoolExecutor(4) as pool:
        jobs = [pool.submit(build_index, config, str(tmp_path / "i"), progress=False) for _ in range(4)]
    assert len({job.result() for job in jobs}) == 1
    TokenIndexFile(tmp_path / "i").verify()


def test_large_vocabularies_take_four_bytes_a_token(tmp_path: Path) -> None:
    words = {f"w{i}": i for i in range(70_000)}
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="w0"))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    (tmp_path / "a.txt").write_text("w1 w69999 " * 20)
    config = small_config(tmp_path / "a.txt")
    build_index(config, str(tmp_path / "i"), tokenizer=Tokenizer(backend, 69_998), progress=False)
    index = TokenIndexFile(tmp_path / "i")
    assert index.dtype == np.uint32
    assert index.window(0, 2).tolist() == [1, 69_999]
    assert index.window(index.num_tokens - 1, 1).tolist() == [69_998]


def test_what_was_skipped_is_in_the_manifest(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "one"}\n{"text": ""}\nbroken\n{"text": "two"}\n')
    build_index(small_config(tmp_path / "a.jsonl"), str(tmp_path / "i"), progress=False)
    skipped = TokenIndexFile(tmp_path / "i").manifest.skipped
    assert (skipped.empty_documents, skipped.bad_records) == (1, 1)
    assert skipped.examples[0].startswith(f"{tmp_path}/a.jsonl:3: not JSON")


def test_ensure_index_builds_once_per_recipe_below_the_output_folder(corpus_folder: Path, tmp_path: Path) -> None:
    one = ensure_index(small_config(corpus_folder), str(tmp_path), progress=False)
    other = ensure_index(small_config(corpus_folder, tokenizer="train:301"), str(tmp_path), progress=False)
    assert ensure_index(small_config(corpus_folder), str(tmp_path), progress=False) == one != other
    folders = {path.name for path in (tmp_path / "indexes").iterdir()}
    assert folders == {TokenIndexFile(uri).manifest.recipe_digest[:16] for uri, _ in (one, other)}


def test_ensure_index_takes_the_index_that_is_named(index_folder: Path, tmp_path: Path) -> None:
    config = small_config("no/such/file.txt", index=str(index_folder))
    assert ensure_index(config, str(tmp_path)) == (str(index_folder), TokenIndexFile(index_folder).digest)
    assert not list(tmp_path.iterdir())


def test_the_command_builds_an_index(
    corpus_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    files = [str(path) for path in corpus_folder.glob("*")]
    assert main([*files, "-o", "index.bin", "--tokenizer", "train:300"]) == 0
    assert TokenIndexFile("index.bin").digest in capsys.readouterr().out


def test_a_mistake_on_the_command_line_exits_with_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(tmp_path / "none.jsonl"), "-o", str(tmp_path / "i")]) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith("[FT-DAT-001]")
    assert "none.jsonl does not exist" in captured.err
    with pytest.raises(SystemExit) as stopped:
        main(["stdlib", "-o", str(tmp_path / "i"), "--text-key", ""])
    assert stopped.value.code == 2
    assert "text_key" in capsys.readouterr().err


def test_building_an_index_never_imports_torch(corpus_folder: Path, tmp_path: Path) -> None:
    code = (
        "import sys; from flextrain.data.index_builder import main; "
        f"main([{str(corpus_folder)!r}, '-o', {str(tmp_path / 'i')!r}]); sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
