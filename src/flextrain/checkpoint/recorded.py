"""The configuration that a checkpoint records of the run that made it."""

from pydantic import ValidationError

from flextrain.checkpoint.manifest import Manifest
from flextrain.config import Config
from flextrain.errors import CheckpointMismatch


def recorded_config(manifest: Manifest, checkpoint_url: str) -> Config | None:
    """None where it records none. Raises CheckpointMismatch where this flextrain does not understand it."""
    recorded = manifest.state.get("config")
    if recorded is None:
        return None
    try:
        return Config.model_validate(recorded)
    except ValidationError as error:
        first = error.errors()[0]
        raise CheckpointMismatch(
            f"{checkpoint_url} records a configuration that this flextrain does not understand: "
            f"{'.'.join(map(str, first['loc']))}: {first['msg']}",
            number=30,
            remedy="use the version of flextrain that saved it",
        ) from error
