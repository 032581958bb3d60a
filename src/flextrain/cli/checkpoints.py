"""`flextrain checkpoint …`: its parser, and the bodies of its verbs. Imports when a verb runs."""

import argparse
import json
from collections.abc import Callable
from datetime import UTC, datetime
from math import prod
from typing import TYPE_CHECKING, Any

from flextrain.errors import CheckpointCorrupt, CheckpointError, FlextrainError
from flextrain.units import format_bytes, format_count, format_seconds

if TYPE_CHECKING:
    from flextrain.checkpoint.manifest import Manifest
    from flextrain.checkpoint.retention import Keep
    from flextrain.checkpoint.survey import Found

Add = Callable[..., argparse.ArgumentParser]
URL_HELP = "folder or URL of a checkpoint, a run or an experiment"

ABOUT = """\
examples:
  flextrain checkpoint ls runs/default                        what an experiment has saved
  flextrain checkpoint verify s3://bucket/exp/RUN             every byte against its hash
  flextrain checkpoint export runs/default out --format safetensors
  flextrain checkpoint import ~/models/gpt2 runs/gpt2/imported
"""
LS = """\
examples:
  flextrain checkpoint ls runs/default
  flextrain checkpoint ls s3://bucket/experiment/RUN/checkpoints

A checkpoint is committed, unfinished (an attempt without a commit: being written, or left behind) or damaged.
"""
SHOW = """\
examples:
  flextrain checkpoint show runs/default                      the newest of the experiment
  flextrain checkpoint show s3://bucket/exp/RUN/checkpoints/step-00001000 --tensors
"""
VERIFY = """\
examples:
  flextrain checkpoint verify runs/default/RUN/checkpoints/step-00000100
  flextrain checkpoint verify runs/default                    every checkpoint of the experiment

Reads every byte. Exits with 0 where all are sound, or with 2 and what is not.
"""
GC = """\
examples:
  flextrain checkpoint gc runs/default --dry-run              what would go: leftovers of attempts that failed
  flextrain checkpoint gc s3://bucket/experiment --keep-last 3
  flextrain checkpoint gc runs/default --keep-last 1 --keep-every 10000 --keep-best 2 --metric loss

Leftovers go an hour after their last write, or at once where their step was committed by another attempt; checkpoints
only with --keep-last, per run. What somebody is writing stays.
"""
EXPORT = """\
examples:
  flextrain checkpoint export runs/default out --format safetensors
  flextrain checkpoint export s3://bucket/exp/RUN/checkpoints/step-00001000 out --format dcp

safetensors: the weights; with config.json, for AutoModelForCausalLM.from_pretrained(OUT), where the model came from
transformers. dcp: weights and optimizer state for torch.distributed.checkpoint.load. A run or an experiment gives its
newest checkpoint.
"""
IMPORT = """\
examples:
  flextrain checkpoint import ~/models/gpt2 runs/gpt2/imported
  flextrain checkpoint import torch-checkpoint s3://bucket/exp/RUN/checkpoints --format dcp

SOURCE is a folder with model.safetensors (or its index and files), whose tensors become weights, or one that
torch.distributed.checkpoint.save made of {"model": …, "optim": …} or of a model's state. Nothing in it is run.
OUT gets a folder step-00000000 or of the step that SOURCE records, unless it is named like one itself.
"""


def add_verbs(add: Add) -> None:
    """Add the commands below `checkpoint`; `add(name, function, about, examples)` makes a parser of main's style."""
    _url(add("ls", ls, "list the checkpoints at or below a place", LS))
    show_ = _url(add("show", show, "what a checkpoint holds", SHOW))
    show_.add_argument("--tensors", action="store_true", help="list every tensor")
    _url(add("verify", verify, "read every byte and compare it with its hash", VERIFY))
    gc_ = add("gc", gc, "remove leftovers, and checkpoints too many", GC)
    gc_.add_argument("url", metavar="URL", help="folder or URL of a run or an experiment")
    gc_.add_argument("--keep-last", type=_count, metavar="N", help="of each run keep the newest N checkpoints alone")
    gc_.add_argument("--keep-every", type=_count, metavar="K", help="besides, those of every K-th step")
    gc_.add_argument("--keep-best", type=_count, metavar="N", help="besides, the best N by --metric")
    gc_.add_argument("--metric", default="loss", metavar="NAME", help="a number that checkpoints record (default loss)")
    gc_.add_argument("--mode", choices=["min", "max"], default="min", help="is a small or a large one best (min)")
    gc_.add_argument("--dry-run", action="store_true", help="say what would go and leave it")
    export_ = _url(add("export", export, "write a checkpoint in another format", EXPORT))
    export_.add_argument("folder", metavar="OUT", help="folder to make")
    export_.add_argument("--format", required=True, choices=["safetensors", "dcp"], help="format to write")
    import_ = add("import", import_checkpoint, "make a checkpoint of another format one of ours", IMPORT)
    import_.add_argument("source", metavar="SOURCE", help="folder of this machine")
    import_.add_argument("out", metavar="OUT", help="folder or URL where checkpoints lie, or the checkpoint to make")
    import_.add_argument("--format", choices=["safetensors", "dcp"], help="format to read (default: look)")


def ls(args: argparse.Namespace) -> None:
    from flextrain.checkpoint.survey import survey

    now = datetime.now(UTC)
    rows = [("step", "size", "world", "age", "state", "checkpoint")]
    for found in survey(args.url):
        world, state = _world_and_state(found)
        age = format_seconds(max(0.0, (now - found.modified).total_seconds()))
        step = "-" if found.step is None else str(found.step)
        rows.append((step, format_bytes(found.size_bytes), world, age, state, printable(found.name)))
    if len(rows) == 1:
        raise _nothing(args.url)
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        numbers = [text.rjust(width) for text, width in zip(row[:4], widths, strict=False)]
        print("  ".join([*numbers, row[4].ljust(widths[4]), row[5]]))


def show(args: argparse.Namespace) -> None:
    from flextrain.checkpoint.survey import newest_below

    found = newest_below(args.url)
    manifest = _manifest(found)
    counts = sum(prod(entry.shape) for name, entry in manifest.tensors.items() if name.startswith("model."))
    facts: list[tuple[str, str]] = [
        ("checkpoint", found.url),
        ("step", str(manifest.step)),
        ("committed", f"{found.modified:%Y-%m-%d %H:%M:%S} UTC"),
        ("attempt", manifest.attempt),
        ("world size", str(manifest.world_size)),
        ("size", f"{format_bytes(manifest.size_bytes)} in {len(manifest.objects)} objects"),
        ("tensors", f"{len(manifest.tensors)} ({format_count(counts)} weights)"),
        ("digest", manifest.digest),
        *((key, _fact(value)) for key, value in manifest.state.items() if key != "dcp"),
    ]
    width = max(len(name) for name, _ in facts)
    print("\n".join(f"{printable(name):<{width}}  {printable(value)}" for name, value in facts))
    if args.tensors:
        print("\n".join(_tensor_lines(manifest)))


def verify(args: argparse.Namespace) -> None:
    """Raises the first error after all checkpoints have been read."""
    from flextrain.checkpoint.catalog import check_objects
    from flextrain.checkpoint.reader import verify
    from flextrain.checkpoint.survey import committed_below
    from flextrain.storage import open_store

    errors: list[FlextrainError] = []
    for found in committed_below(args.url):
        folder = open_store(found.url)
        try:
            manifest = _manifest(found)
            check_objects(folder, manifest)
            verify(folder, manifest)
            print(f"sound    {format_bytes(manifest.size_bytes):>8}  {found.url}", flush=True)
        except FlextrainError as error:
            errors.append(error)
            print(f"UNSOUND  {format_bytes(found.size_bytes):>8}  {found.url}", flush=True)
    if errors:
        raise errors[0]


def gc(args: argparse.Namespace) -> None:
    from flextrain.checkpoint.catalog import Catalog, step_folder
    from flextrain.checkpoint.survey import survey
    from flextrain.storage import open_store

    keep = _keep(args)
    checkpoints = survey(args.url)
    if not checkpoints:
        raise _nothing(args.url)
    if any(found.url == open_store(args.url).url for found in checkpoints):
        raise CheckpointError(
            f"{args.url} is one checkpoint, and gc compares those of a run",
            number=27,
            remedy="name the run, or its folder `checkpoints`",
        )
    verb = "would go" if args.dry_run else "removed"
    roots = sorted({found.root for found in checkpoints if found.step is not None})
    if not roots:
        print("no folder is named like step-00000100: they belong to no run, and stay")
    for root in roots:
        catalog = Catalog(open_store(root))
        doomed = catalog.doomed(keep)
        leftovers = [f"{step_folder(step)}/{attempt}" for step, attempt in doomed.attempts]
        if not args.dry_run:
            catalog.remove(doomed)
            catalog.drop_spares()
        for name in [*map(step_folder, doomed.steps), *leftovers]:
            print(f"{verb}  {root}/{printable(name)}")
        kept = len(catalog.steps()) - (len(doomed.steps) if args.dry_run else 0)
        print(f"{root}: {len(doomed.steps)} checkpoints and {len(leftovers)} leftovers {verb}, {kept} checkpoints stay")


def _keep(args: argparse.Namespace) -> "Keep | None":
    from flextrain.checkpoint.retention import Keep

    if args.keep_last:
        return Keep(args.keep_last, args.keep_every, args.keep_best or 0, args.metric, args.mode)
    if args.keep_every or args.keep_best:
        raise CheckpointError(
            "--keep-every and --keep-best name what stays besides the newest, and --keep-last is missing",
            number=28,
            remedy="add --keep-last 1, or more",
        )
    return None


def export(args: argparse.Namespace) -> None:
    from flextrain.checkpoint.export import export_dcp, export_safetensors
    from flextrain.checkpoint.survey import newest_below

    found = newest_below(args.url)
    write = export_safetensors if args.format == "safetensors" else export_dcp
    files = write(found.url, args.folder)
    print("\n".join([f"checkpoint  {found.url}", *(f"wrote       {args.folder}/{name}" for name in files)]))


def import_checkpoint(args: argparse.Namespace) -> None:
    from flextrain.checkpoint.importing import import_checkpoint

    made = import_checkpoint(args.source, args.out, args.format)
    print(f"checkpoint  {made.url}")
    print(f"holds       {len(made.manifest.tensors)} tensors, {format_bytes(made.manifest.size_bytes)}")
    for name in made.left_out:
        print(f"left out    {printable(name)} (no tensor)")


def printable(text: str) -> str:
    """Text of a manifest, whose author may be anybody, without what would steer a terminal."""
    return text if text.isprintable() else ascii(text)


def _url(verb: argparse.ArgumentParser) -> argparse.ArgumentParser:
    verb.add_argument("url", metavar="URL", help=URL_HELP)
    return verb


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number >= 1")
    return int(text)


def _manifest(found: "Found") -> "Manifest":
    from flextrain.checkpoint.catalog import read_manifest
    from flextrain.storage import open_store

    return read_manifest(open_store(found.url))


def _world_and_state(found: "Found") -> tuple[str, str]:
    if not found.committed:
        return "-", "unfinished"
    try:
        return str(_manifest(found).world_size), "committed"
    except CheckpointCorrupt:
        return "-", "damaged"


def _tensor_lines(manifest: "Manifest") -> list[str]:
    rows = [
        (entry.dtype, "x".join(map(str, entry.shape)) or "scalar", f"{entry.shard_count} shards", printable(name))
        for name, entry in sorted(manifest.tensors.items())
    ]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def _fact(value: Any) -> str:
    """A fact of the manifest's state in one line; of what has parts, how many."""
    text = json.dumps(value)
    return text if len(text) <= 100 else f"{len(value)} {'keys' if isinstance(value, dict) else 'parts'}"


def _nothing(url: str) -> CheckpointError:
    return CheckpointError(
        f"there is no checkpoint at or below {url}", number=4, remedy="name a checkpoint, a run or an experiment"
    )
