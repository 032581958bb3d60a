"""One schema for Python, YAML, the command line and the flow."""

from flextrain.config.schema import Config, ModelConfig, Price

__all__ = ["Config", "ModelConfig", "Price"]
