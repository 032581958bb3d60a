"""One schema for Python, YAML, the command line and the flow."""

from flextrain.config.load import config_digest, load_config, parse_config
from flextrain.config.schema import Config, ModelConfig, Price

__all__ = ["Config", "ModelConfig", "Price", "config_digest", "load_config", "parse_config"]
