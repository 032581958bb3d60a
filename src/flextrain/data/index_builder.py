"""Text to a token index: `python -m flextrain.data.index_builder data/*.jsonl -o index.bin`.

The same sources and settings give the same bytes. An index exists when its manifest.json does, which is written last:
a build that is killed leaves no index, and the next one overwrites what it left.
"""

import argparse
import json
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from pydantic import ValidationError
from tqdm import tqdm

from flextrain.config.schema import DataConfig
from flextrain.data.corpus import SPLITS, Corpus, Split
from flextrain.data.documents import Tally
from flextrain.data.encoding import encode_documents, pieces_of
from flextrain.data.index import TokenIndexFile
from flextrain.data.manifest import (
    FORMAT_VERSION,
    MANIFEST,
    Manifest,
    Skipped,
    SplitStats,
    digest_of,
    dtype_for,
    read_manifest,
)
from flextrain.data.shard_writer import SplitWriter
from flextrain.data.tokenizer import Tokenizer, load_tokenizer, trained_vocabulary
from flextrain.errors import AlreadyExists, DataError, FlextrainError
from flextrain.log import get_logger, setup
from flextrain.storage import Store, open_store
from flextrain.units import format_count

TOKENIZER_SAMPLE_BYTES = 64_000_000  # a BPE learns nothing new from more

log = get_logger("data")


@dataclass(frozen=True)
class _Plan:
    """What an index is made from. Equal recipes give equal indexes, on any machine."""

    corpus: Corpus
    config: DataConfig
    tokenizer: Tokenizer | None  # None: train one
    recipe: dict[str, Any]

    @property
    def recipe_digest(self) -> str:
        return digest_of(self.recipe)

    def texts(self, progress: bool) -> Iterator[str]:
        """What a tokenizer is trained on."""
        total = min(TOKENIZER_SAMPLE_BYTES, self.corpus.size_bytes)
        with _bar("tokenizer", total, progress) as bar:
            for document in self.corpus.training_sample(TOKENIZER_SAMPLE_BYTES):
                yield from pieces_of(document.text[:TOKENIZER_SAMPLE_BYTES])
                bar.update(document.text_bytes)


def build_index(
    config: DataConfig, out: str, *, tokenizer: Tokenizer | None = None, progress: bool = True
) -> tuple[str, str]:
    """Build the index of `config.sources` at `out`, a folder or URL; returns (uri, digest).

    An index that is there already and has the same recipe is left as it is. `tokenizer` replaces config.tokenizer.
    Raises DataError (sources, tokenizer, or another index at `out`) or StorageError; then nothing new is left at `out`.
    """
    return _build(_plan(config, tokenizer), out, progress)


def ensure_index(
    config: DataConfig, output_dir: str, *, tokenizer: Tokenizer | None = None, progress: bool = True
) -> tuple[str, str]:
    """(uri, digest) of the index that `config` names, or of the one built from its sources, once, in `output_dir`.

    Indexes of different recipes lie side by side in <output_dir>/indexes/<first 16 digits of the recipe's digest>.
    Raises as `build_index` and TokenIndexFile do.
    """
    if config.index:
        return _checked(config.index)
    plan = _plan(config, tokenizer)
    return _build(plan, f"{output_dir.rstrip('/')}/indexes/{plan.recipe_digest[:16]}", progress)


def _plan(config: DataConfig, tokenizer: Tokenizer | None) -> _Plan:
    vocab_size = None if tokenizer else trained_vocabulary(config.tokenizer)
    corpus = Corpus.of(config.sources, text_key=config.text_key, heldout_fraction=config.heldout_fraction)
    if tokenizer is None and vocab_size is None:
        tokenizer = load_tokenizer(config.tokenizer, ())
    recipe = {
        "version": FORMAT_VERSION,
        "sources": corpus.describe(),
        "text_key": config.text_key,
        "heldout_fraction": config.heldout_fraction,
        "shard_tokens": config.shard_tokens,
        "tokenizer": f"sha256:{tokenizer.digest}" if tokenizer else f"train:{vocab_size}",
    }
    return _Plan(corpus, config, tokenizer, recipe)


def _build(plan: _Plan, out: str, progress: bool) -> tuple[str, str]:
    store = open_store(out)
    ready = _ready(store, plan)
    if ready:
        log.info("index %s is ready", store.url)
        return _checked(store.url)
    tokenizer = plan.tokenizer or load_tokenizer(plan.config.tokenizer, plan.texts(progress))
    manifest = _write(store, plan, tokenizer, progress)
    for name, split in manifest.splits.items():
        log.info("%s: %s tokens of %d documents", name, format_count(split.tokens), split.documents)
    log.info("index written to %s", store.url)
    return store.url, manifest.digest


def _checked(url: str) -> tuple[str, str]:
    """(uri, digest) of a finished index, each byte checked; one in a bucket is checked when it is fetched instead.

    Hashing costs 0.6 s a GB, once per run; training on changed tokens would cost the run.
    """
    index = TokenIndexFile(url)
    if open_store(url).local_root:
        index.verify()
    return index.url, index.digest


def _ready(store: Store, plan: _Plan) -> Manifest | None:
    """The finished index at the store, if there is one; DataError if it is another."""
    manifest = read_manifest(store)
    if manifest and manifest.recipe_digest != plan.recipe_digest:
        changed = [key for key, value in plan.recipe.items() if manifest.recipe.get(key) != value]
        raise DataError(
            f"{store.url} holds an index that was built from something else; different are: {', '.join(changed)}",
            number=18,
            remedy="choose another output, or delete that folder",
        )
    return manifest


def _write(store: Store, plan: _Plan, tokenizer: Tokenizer, progress: bool) -> Manifest:
    dtype = np.dtype(dtype_for(tokenizer.vocab_size)).newbyteorder("<")
    tally = Tally()
    fresh = not store.list()
    with TemporaryDirectory(prefix="flextrain-") as scratch:
        writers = {s: SplitWriter(store, s, dtype, plan.config.shard_tokens, Path(scratch)) for s in SPLITS}
        try:
            with _bar("index", plan.corpus.size_bytes, progress) as bar:
                for split, document, ids in encode_documents(plan.corpus.documents(tally), tokenizer):
                    writers[split].add(ids, document.text_bytes)
                    bar.update(document.source_bytes)
            return _commit(store, plan, tokenizer, {s: w.finish() for s, w in writers.items()}, tally)
        except BaseException:
            if fresh:
                _discard(store, writers.values())
            raise
        finally:
            for writer in writers.values():
                writer.close()


def _commit(store: Store, plan: _Plan, tokenizer: Tokenizer, splits: dict[Split, SplitStats], tally: Tally) -> Manifest:
    manifest = Manifest(
        recipe=plan.recipe,
        recipe_digest=plan.recipe_digest,
        dtype=dtype_for(tokenizer.vocab_size),
        vocab_size=tokenizer.vocab_size,
        shard_tokens=plan.config.shard_tokens,
        tokenizer=json.loads(tokenizer.to_json()),
        splits={str(name): stats for name, stats in splits.items()},
        skipped=Skipped(
            empty_documents=tally.empty_documents, bad_records=tally.bad_records, examples=tuple(tally.examples)
        ),
    )
    for quote in tally.examples:
        log.warning("skipped %s", quote)
    try:
        store.put(MANIFEST, manifest.to_json(), create=True)
    except AlreadyExists:  # somebody built the same folder at the same time: equal recipes wrote equal bytes
        return _ready(store, plan) or manifest
    return manifest


def _discard(store: Store, writers: Iterable[SplitWriter]) -> None:
    """Take back what a failed build wrote into a place that was empty."""
    store.delete(key for writer in writers for shard in writer.shards for key in (shard.tokens_key, shard.ends_key))
    folder = store.local_root
    if folder and folder.is_dir() and not any(folder.iterdir()):
        folder.rmdir()


def _bar(what: str, total: int, progress: bool) -> "tqdm[Any]":
    """Progress in bytes of source, with an estimate of the rest; nothing where stderr is no terminal."""
    return tqdm(
        desc=what, total=total, unit="B", unit_scale=True, leave=False, disable=None if progress else True, delay=0.5
    )


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m flextrain.data.index_builder", description="Build a token index.")
    parser.add_argument("sources", nargs="+", help="files, folders or globs of .txt .jsonl .parquet, s3://…, hf:NAME")
    parser.add_argument("-o", "--output", required=True, help="folder or URL of the index")
    parser.add_argument("--tokenizer", default="train:4096", help="train:VOCAB, a transformers name or a local folder")
    parser.add_argument("--text-key", default="text", help="JSON key or column of the text")
    arguments = parser.parse_args(argv)
    setup()
    try:
        config = DataConfig(sources=arguments.sources, tokenizer=arguments.tokenizer, text_key=arguments.text_key)
    except ValidationError as error:
        parser.error("; ".join(f"{e['loc'][0]}: {e['msg']}" for e in error.errors()))
    try:
        uri, digest = build_index(config, arguments.output)
    except FlextrainError as error:
        print(error.render(), file=sys.stderr)
        return 2
    print(f"{uri}  sha256:{digest}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
