"""The `flextrain` command."""
