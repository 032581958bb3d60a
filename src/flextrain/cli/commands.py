"""The verbs as functions, for the command line and for flow steps alike. Each imports what it needs when it runs."""

import json
import uuid
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from flextrain.config import Config, load_config
from flextrain.errors import GangError
from flextrain.flowkit.refs import IndexRef

if TYPE_CHECKING:
    from flextrain.data import TokenIndexFile
    from flextrain.elastic.audit import Audit
    from flextrain.evaluate.report import EvalReport


def validate(path: str, overrides: Sequence[str] = ()) -> str:
    """What a configuration file changes, as text. Raises ConfigError with every mistake in it."""
    changed = list(changed_keys(load_config(path, overrides)))
    if not changed:
        return f"{path} is valid and changes nothing: every key is at its default"
    width = max(len(name) for name, _, _ in changed)
    rows = [f"  {name:<{width}}  {_short(value)}  (default {_short(default)})" for name, value, default in changed]
    count = "1 key differs" if len(changed) == 1 else f"{len(changed)} keys differ"
    return "\n".join([f"{path} is valid; {count} from the defaults:", *rows])


def index(config: Config, out: str | None = None, *, progress: bool = True) -> IndexRef:
    """Build the token index of `config.data` at `out` (folder or URL), or find it built.

    Without `out`: the index that data.index names, else one below checkpoint.storage or, without that, main.output_dir.
    Raises DataError or StorageError.
    """
    from flextrain.data.index_builder import build_index, ensure_index

    if out:
        return IndexRef(*build_index(config.data, out, progress=progress))
    return IndexRef(*ensure_index(config.data, config.checkpoint.storage or config.main.output_dir, progress=progress))


def audit(url: str) -> Iterator[tuple[str, "Audit"]]:
    """What each run at or below `url` took of its samples. Raises StorageError, and GangError where there is no run."""
    from flextrain.data.order import SampleOrder
    from flextrain.elastic.audit import audit
    from flextrain.storage import open_store
    from flextrain.tracking import read_events

    store = open_store(url)
    folders = {entry.key.rpartition("/")[0] for entry in store.list() if entry.key.endswith(".jsonl")}
    runs = sorted(folder for folder in folders if folder.rpartition("/")[2] == "events")
    if not runs:
        raise GangError(f"{url} holds no run", number=31, remedy="name the folder of a run: OUTPUT/EXPERIMENT/RUN")
    for folder in runs:
        place = store.child(folder)
        yield (
            place.url.removesuffix("/events"),
            audit(
                read_events(place),
                lambda samples, seed, position, count: SampleOrder(samples, seed).ids(position, count),
            ),
        )


def train(config: Config, ranks: int | None = None) -> dict[str, Any]:
    """Index the text, train on this machine with `ranks` processes, and return what the trainer reports.

    Under torchrun this process is one rank of the world that torchrun made. Otherwise an agent starts the ranks.
    Goes on from the experiment's newest checkpoint where checkpoint.auto_resume is on. Raises FlextrainError.
    """
    from flextrain.world import World

    if World.detect().size > 1:
        from flextrain.train.main import train_under_torchrun

        return train_under_torchrun(config, lambda: index(config).uri)
    from flextrain.elastic.agent import run_agent
    from flextrain.elastic.place import choose_run, look_back
    from flextrain.elastic.spec import AgentSpec
    from flextrain.storage import open_store
    from flextrain.tracking import read_events

    reference = index(config)
    run_id, root = choose_run(config)
    attempt, _ = look_back(read_events(open_store(root).child("events")))
    spec = AgentSpec(
        config=config.model_dump(mode="json"),
        index_uri=reference.uri,
        run_id=run_id,
        run_root=root,
        attempt=attempt,
        node=0,
        num_nodes=1,
        incarnation=uuid.uuid4().hex[:12],
        ranks_per_node=ranks,
    )
    return {**run_agent(spec), "index": reference.uri}


def evaluate(config: Config, checkpoint_url: str, index: "str | TokenIndexFile") -> "EvalReport":
    """Score one checkpoint on the held-out split of an index (opened, or its folder or URL), and write samples.

    Raises CheckpointError, DataError, ModelError or StorageError.
    """
    from flextrain.evaluate import suite

    return suite.evaluate(config, checkpoint_url=checkpoint_url, index=index)


def changed_keys(config: Config) -> Iterator[tuple[str, Any, Any]]:
    """(section.key, value, default) of every key that is not at its default."""
    defaults = Config().model_dump(mode="json")
    for section, values in config.model_dump(mode="json").items():
        for key, value in values.items():
            if value != defaults[section][key]:
                yield f"{section}.{key}", value, defaults[section][key]


def _short(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 60 else f"{text[:59]}…"
