"""What an agent is told, and what it tells its ranks. Both travel as JSON."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class AgentSpec:
    """One node's part in one attempt of a run. `run_root` is the URL that checkpoints and events lie below, `main_host`
    the address at which the other nodes reach node 0, `gang` a name no other gang of this run has had."""

    config: dict[str, Any]
    index_uri: str
    run_id: str
    run_root: str
    attempt: int
    node: int
    num_nodes: int
    incarnation: str
    main_host: str = "127.0.0.1"
    resume_from: str | None = None
    ranks_per_node: int | None = None

    @property
    def gang(self) -> str:
        return f"attempt-{self.attempt:04d}"


@dataclass(frozen=True)
class RankSpec:
    """What every rank of a node is started with: the configuration, the index, its place (RunPlace as a dict), the
    rendezvous object, and the folder into which local rank r writes `result-r.json` or `error-r.json`."""

    config: dict[str, Any]
    index_uri: str
    place: dict[str, Any]
    board: str
    board_key: str
    main_host: str
    reports: str

    def save(self, path: Path) -> Path:
        path.write_text(json.dumps(asdict(self)))
        return path

    @classmethod
    def load(cls, path: Path) -> "RankSpec":
        return cls(**json.loads(path.read_text()))
