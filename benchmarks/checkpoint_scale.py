"""The commit of very many ranks, simulated: the coordinator does all of its work, the others are what they signed off.

The state has Llama-2-70B's shapes with AdamW's moments, fp32, sharded by dim 0 over all ranks as FSDP2 does it. Every
rank's record and (empty, sparse) data object lie in the store; then rank 0 gathers, merges and commits, and a reader
checks that every object is there and parses the manifest. `python benchmarks/checkpoint_scale.py --json FILE`
"""

import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from math import prod
from pathlib import Path

from common import Claim, Spread, benchmark_parser, print_table, report

from flextrain.checkpoint.arena import ALIGN_BYTES, Layout, Place, padded
from flextrain.checkpoint.catalog import Catalog
from flextrain.checkpoint.commit import Attempt, commit
from flextrain.checkpoint.generation import claim
from flextrain.checkpoint.manifest import CHUNK_BYTES, Manifest, ObjectEntry
from flextrain.checkpoint.parts import Part, part_of
from flextrain.checkpoint.retention import Keep
from flextrain.storage import Store, open_store

GOAL_S = 2.0
WIDTH, FFN, KV, VOCABULARY, LAYERS = 8192, 28672, 1024, 32000, 80
Shapes = dict[str, tuple[int, ...]]


def llama_70b(layers: int = LAYERS) -> Shapes:
    """Parameter shapes of Llama-2-70B: 69 billion in 723 tensors."""
    block: Shapes = {
        **{f"attention.w{name}": (WIDTH, WIDTH) for name in "qo"},
        **{f"attention.w{name}": (KV, WIDTH) for name in "kv"},
        "feed_forward.w1": (FFN, WIDTH),
        "feed_forward.w2": (WIDTH, FFN),
        "feed_forward.w3": (FFN, WIDTH),
        "attention_norm": (WIDTH,),
        "ffn_norm": (WIDTH,),
    }
    blocks = {f"layers.{i}.{name}.weight": shape for i in range(layers) for name, shape in block.items()}
    return {
        "tok_embeddings.weight": (VOCABULARY, WIDTH),
        **blocks,
        "norm.weight": (WIDTH,),
        "output.weight": (VOCABULARY, WIDTH),
    }


def names_and_shapes(shapes: Shapes) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Parameters and both moments, named as a checkpoint names them."""
    yield from ((f"model.{name}", shape) for name, shape in shapes.items())
    for name, shape in shapes.items():
        yield f"optim.{name}.exp_avg", shape
        yield f"optim.{name}.exp_avg_sq", shape


def layout_of(rank: int, ranks: int, shapes: Shapes) -> Layout:
    """What a rank holds: its rows of every tensor, and the step counter of a parameter now and then."""
    places, offset = [], 0

    def add(name: str, start: tuple[int, ...], size: tuple[int, ...], shape: tuple[int, ...]) -> None:
        nonlocal offset
        places.append(Place(name, "float32", start, size, shape, offset, 4 * prod(size)))
        offset += padded(4 * prod(size), ALIGN_BYTES)

    for name, shape in names_and_shapes(shapes):
        rows = -(-shape[0] // ranks)
        here = max(0, min(rows, shape[0] - rank * rows))
        if here:
            add(name, (rank * rows, *(0 for _ in shape[1:])), (here, *shape[1:]), shape)
    for name in list(shapes)[rank::ranks]:
        add(f"optim.{name}.step", (), (), ())
    return Layout(tuple(places), offset)


class Simulation:
    """`ranks` ranks below `root`, all of which have written and signed off but rank 0, who has yet to commit."""

    def __init__(self, root: str, ranks: int, shapes: Shapes) -> None:
        self.catalog, self.ranks, self.shapes = Catalog(open_store(root)), ranks, shapes
        self.prefix, self.step = claim(self.catalog.store, "simulated"), 0

    def write(self) -> Attempt:
        """The next step's data objects, without blocks on a local disk and empty elsewhere, and its records."""
        self.step += 1
        attempt = Attempt(self.step, f"{self.prefix}-{self.step}", self.ranks)
        folder = self.catalog.folder(self.step)
        with ThreadPoolExecutor(8) as pool:
            for _ in pool.map(lambda rank: self._write(folder, attempt, rank), range(self.ranks)):
                pass
        return attempt

    def _write(self, folder: Store, attempt: Attempt, rank: int) -> None:
        part = self.part(attempt, rank)
        for name, entry in part.objects.items():
            folder.put(name, bytes(0 if folder.local_root else entry.size_bytes))
            if folder.local_root:
                os.truncate(folder.local_root / name, entry.size_bytes)
        folder.put(attempt.record(rank), part.to_json())

    def part(self, attempt: Attempt, rank: int) -> Part:
        layout, name = layout_of(rank, self.ranks, self.shapes), attempt.data(rank)
        chunks = tuple(f"{rank * 65536 + index:016x}" for index in range(-(-layout.size_bytes // CHUNK_BYTES)))
        return part_of(layout, name, ObjectEntry(layout.size_bytes, chunks))

    def commit(self, attempt: Attempt) -> float:
        """Seconds for rank 0's half: gather, merge, settle, create, retire."""
        began_s = time.perf_counter()
        commit(self.catalog, attempt, {"loss": 1.0}, Keep(last_n=10**6), timeout_s=120.0)
        return time.perf_counter() - began_s

    def validate(self, attempt: Attempt) -> tuple[float, Manifest]:
        """Seconds for a reader to find it sound: the manifest parsed and checked, every object there in full size."""
        began_s = time.perf_counter()
        manifest = self.catalog.check(attempt.step)
        return time.perf_counter() - began_s, manifest


def parse_s(simulation: Simulation, attempt: Attempt) -> tuple[float, int]:
    """Seconds to parse and check the manifest alone, and its bytes."""
    text = simulation.catalog.folder(attempt.step).get("manifest.json")
    began_s = time.perf_counter()
    Manifest.from_json(text, "here")
    return time.perf_counter() - began_s, len(text)


def measure(root: str, ranks: int, shapes: Shapes, repetitions: int) -> list[Claim]:
    simulation = Simulation(root, ranks, shapes)
    commits, checks, parses = [], [], []
    for _ in range(repetitions):
        attempt = simulation.write()
        commits.append(simulation.commit(attempt))
        seconds, manifest = simulation.validate(attempt)
        checks.append(seconds)
        seconds, size_bytes = parse_s(simulation, attempt)
        parses.append(seconds)
    shards = sum(entry.shard_count for entry in manifest.tensors.values())
    record_bytes = len(simulation.part(attempt, ranks - 1).to_json())
    rows = [("commit", commits), ("check objects, parse manifest", checks), ("parse manifest alone", parses)]
    print(
        f"\n{ranks:,} ranks, {len(manifest.tensors):,} tensors, {manifest.size_bytes / 1e9:,.0f} GB, {shards:,} shards"
    )
    print(f"a manifest of {size_bytes / 1e6:.2f} MB; a record of {record_bytes / 1e3:.0f} kB from each rank")
    spreads = [(name, Spread.of(values)) for name, values in rows]
    print_table(
        ["s", "median", "low", "high"], [[n, *(f"{v:.3f}" for v in (s.median, s.low, s.high))] for n, s in spreads]
    )
    total = Spread.of([a + b for a, b in zip(commits, checks, strict=True)])
    return [
        Claim(f"{ranks:,} ranks commit and are validated", total.median, "s", f"<= {GOAL_S:g}"),
        Claim("of which: commit (gather, merge, create)", Spread.of(commits).median, "s"),
        Claim("of which: validation (objects, manifest)", Spread.of(checks).median, "s"),
        Claim("manifest, parsed and checked", Spread.of(parses).median, "s"),
        Claim("manifest", size_bytes / 1e6, "MB"),
        Claim("shards in it", float(shards), "shards"),
    ]


def main() -> None:
    parser = benchmark_parser(__doc__ or "")
    parser.add_argument("--ranks", type=int, default=1024)
    parser.add_argument("--layers", type=int, default=LAYERS, help="of the model (80)")
    parser.add_argument("--root", help="folder or URL to write below; by default a temporary folder")
    args = parser.parse_args()
    load = ", ".join(f"{value:.1f}" for value in os.getloadavg())
    print(f"load when started: {load}")
    folder = Path(tempfile.mkdtemp(prefix="scale-"))
    root, shapes = args.root or str(folder), llama_70b(args.layers)
    if open_store(root).local_root is None:  # a store has no sparse objects
        print("every row has one element here: as many tensors, shards and records, and few bytes")
        shapes = {name: (shape[0], 1) for name, shape in shapes.items()}
    try:
        report(measure(root, args.ranks, shapes, args.repetitions), args.json)
    finally:
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
