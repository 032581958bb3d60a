"""The `flextrain` command: one subparser per verb. Nothing heavy is imported before a verb runs."""

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from typing import Any

from flextrain.cli import checkpoints
from flextrain.errors import ConfigError, FlextrainError, GangError
from flextrain.log import setup
from flextrain.world import World

Verb = Callable[[argparse.Namespace], None]
USER_MISTAKE, INTERRUPTED = 2, 130  # exit codes

NO_FLAGS = {"verb", "function", "parser", "takes_overrides", "config", "checkpoint", "url", "folder"}

ABOUT = """\
flextrain trains language models on machines that may vanish.

  flextrain train                                     a small model on this machine's own Python sources
  flextrain train config.yaml --training.lr=1e-3      your configuration, one key changed
  flextrain validate config.yaml                      every mistake with its line, before anything starts
"""
OVERRIDES = """\
Any key of the configuration can be set as --section.key=value (the value is YAML); flags win over the file.
`python -m flextrain.config.docs` lists the keys. Mistakes end with exit code 2 and say where they are."""

TRAIN = """\
examples:
  flextrain train                                             the embedded default, about a minute
  flextrain train config.yaml --ranks 2                       two processes on this machine
  flextrain train --training.max_steps=20 --data.sources='[book.txt]'
  torchrun --nproc-per-node 4 $(which flextrain) train config.yaml

Started again with the same main.experiment_name, it goes on from its newest checkpoint.
"""
VALIDATE = """\
examples:
  flextrain validate config.yaml
  flextrain validate config.yaml --distributed.strategy=fsdp

Exits with 0 and what differs from the defaults, or with 2 and every mistake.
"""
INDEX = """\
examples:
  flextrain index                                             this machine's own Python sources
  flextrain index --data.sources='[corpus/*.jsonl]' -o index.bin
  flextrain index config.yaml -o s3://bucket/indexes/corpus

An index of the same text and tokenizer that is there already is used again.
"""
EVALUATE = """\
examples:
  flextrain evaluate runs/default/RUN/checkpoints/step-00000150 --index runs/indexes/DIGEST
  flextrain evaluate s3://bucket/exp/RUN/checkpoints/step-00001000 --index s3://bucket/indexes/corpus --json eval.json

Scores held-out text and writes samples: loss, perplexity, bits per byte, accuracy, against simple baselines.
The model is the one the checkpoint records; CONFIG and flags say how it is measured (section `evaluation`).
"""
AUDIT = """\
examples:
  flextrain audit runs/default/RUN                            one run, on whatever it was interrupted by
  flextrain audit s3://bucket/experiment                      every run of an experiment

Reads what every rank recorded at every step. Exits with 0 where each sample was taken exactly once, in the same order
as if nothing had happened, and with 2 and what was not.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code: 0, 2 for the user's mistakes, 130 when interrupted."""
    try:
        return _run(list(sys.argv[1:] if argv is None else argv))
    except FlextrainError as error:
        print(error.render(), file=sys.stderr)
        return USER_MISTAKE
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return INTERRUPTED


def _run(argv: list[str]) -> int:
    flags, rest = split_overrides(argv)
    parser = build_parser()
    args, unknown = parser.parse_known_args(rest)
    if args.function is None:
        args.parser.print_help(sys.stderr)
        return USER_MISTAKE
    if not args.takes_overrides:
        unknown += flags
    if unknown:
        raise _unknown(unknown, args)
    args.overrides = flags
    setup(World.detect())
    verb: Verb = args.function
    verb(args)
    return 0


def split_overrides(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """(`--section.key=value` flags, everything else). Raises ConfigError for `--section.key value`."""
    flags = [word for word in argv if word.startswith("--") and "." in word.partition("=")[0]]
    for flag in flags:
        if "=" not in flag:
            raise ConfigError(f"{flag} has no value", number=5, remedy=f"write {flag}=VALUE, as one word")
    return flags, [word for word in argv if word not in flags]


def _unknown(words: list[str], args: argparse.Namespace) -> ConfigError:
    """The error for words that the verb does not take, with the flag or key that each may mean."""
    from difflib import get_close_matches

    from flextrain.config.explain import did_you_mean
    from flextrain.config.load import schema_words

    lines = []
    for word in words:
        name, _, value = word.lstrip("-").partition("=")
        options = get_close_matches(name, [key.replace("_", "-") for key in set(vars(args)) - NO_FLAGS], 1)
        keys = schema_words().nearest((name,)) if word.startswith("--") and args.takes_overrides and not options else []
        near = [f"--{option}" for option in options] + [f"--{key}={value or 'VALUE'}" for key in keys]
        lines.append(f"{word}: `flextrain {args.verb}` does not take this.{did_you_mean(near)}")
    remedy = f"`flextrain {args.verb} --help` shows what it takes"
    keys_too = "; keys of the configuration are --section.key=value" if args.takes_overrides else ""
    return ConfigError("\n".join(lines), number=6, remedy=remedy + keys_too)


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "flextrain",
        description=ABOUT,
        epilog=OVERRIDES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.set_defaults(function=None, parser=parser)
    verbs = parser.add_subparsers(title="commands", metavar="COMMAND")

    def add(name: str, function: Verb, about: str, examples: str) -> argparse.ArgumentParser:
        verb = _add_parser(verbs, name, about, f"{examples}\n{OVERRIDES}")
        verb.set_defaults(verb=name, function=function, takes_overrides=True)
        return verb

    train = add("train", _train, "train a model on this machine, or go on with it", TRAIN)
    _config_argument(train)
    train.add_argument("--ranks", type=_count, metavar="N", help="processes; by default one per GPU, or one")
    validate = add("validate", _validate, "check a configuration file", VALIDATE)
    validate.add_argument("config", metavar="FILE", help="YAML file")
    index = add("index", _index, "turn text into a token index", INDEX)
    _config_argument(index)
    index.add_argument("-o", "--out", metavar="OUT", help="folder or URL to write; by default below main.output_dir")
    evaluate = add("evaluate", _evaluate, "score a checkpoint on held-out text", EVALUATE)
    evaluate.add_argument("checkpoint", metavar="CHECKPOINT", help="folder or URL of one checkpoint, …/step-00000150")
    _config_argument(evaluate)
    evaluate.add_argument("--index", required=True, metavar="PATH", help="folder or URL of the token index")
    evaluate.add_argument("--json", metavar="FILE", help="file or URL to write the report to as well")
    audit = _add_parser(verbs, "audit", "prove that a run took each sample exactly once", AUDIT)
    audit.set_defaults(verb="audit", function=_audit, takes_overrides=False)
    audit.add_argument("url", metavar="RUN", help="folder or URL of a run or an experiment")
    _add_checkpoint(verbs)
    return parser


def _add_checkpoint(verbs: Any) -> None:
    """`checkpoint`, and its own commands below it."""
    group = _add_parser(verbs, "checkpoint", "list, check, clean up and export checkpoints", checkpoints.ABOUT)
    group.set_defaults(verb="checkpoint", parser=group)
    below = group.add_subparsers(title="commands", metavar="COMMAND")

    def add(name: str, function: Verb, about: str, examples: str) -> argparse.ArgumentParser:
        verb = _add_parser(below, name, about, examples)
        verb.set_defaults(verb=f"checkpoint {name}", function=function, takes_overrides=False)
        return verb

    checkpoints.add_verbs(add)


def _add_parser(verbs: Any, name: str, about: str, examples: str) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = verbs.add_parser(
        name,
        help=about,
        description=f"{about[0].upper()}{about[1:]}.",
        epilog=examples,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    return parser


def _config_argument(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("config", nargs="?", metavar="CONFIG", help="YAML file; without one, the defaults")


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number >= 1")
    return int(text)


def _train(args: argparse.Namespace) -> None:
    from flextrain.cli import commands
    from flextrain.config import load_config

    config = load_config(args.config, args.overrides)
    result = commands.train(config, ranks=args.ranks)
    if World.detect().is_main:
        print(f"step        {result['step']}\nloss        {result['loss']:.4f} nats per token")
        print(f"checkpoint  {result['checkpoint']['url']}")
        print(f"next        flextrain evaluate {result['checkpoint']['url']} --index {result['index']}")


def _validate(args: argparse.Namespace) -> None:
    from flextrain.cli import commands

    print(commands.validate(args.config, args.overrides))


def _index(args: argparse.Namespace) -> None:
    from flextrain.cli import commands
    from flextrain.config import load_config

    config = load_config(args.config, args.overrides)
    reference = commands.index(config, args.out)
    print(f"index   {reference.uri}\ndigest  {reference.digest}")


def _audit(args: argparse.Namespace) -> None:
    from flextrain.cli import commands

    problems = 0
    for url, found in commands.audit(args.url):
        problems += len(found.problems)
        print(f"{url}\n{found.summary()}", flush=True)
    if problems:
        raise GangError(
            "the records of this run do not show that it took each sample exactly once",
            number=30,
            remedy="a node that was lost may have taken its last seconds of records with it; anything else is a bug",
        )


def _evaluate(args: argparse.Namespace) -> None:
    from flextrain.cli import commands
    from flextrain.config import load_config
    from flextrain.storage import open_store

    config = load_config(args.config, args.overrides)
    report = commands.evaluate(config, args.checkpoint, args.index)
    print(report.summary())
    if args.json:
        folder, _, name = args.json.rpartition("/")
        open_store(folder or ".").put(name, json.dumps(report.to_dict(), indent=1).encode() + b"\n")


if __name__ == "__main__":
    sys.exit(main())
