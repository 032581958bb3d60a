#!/usr/bin/env bash
# Flags such as --training.max_steps=20 change any key of the configuration.
set -euo pipefail
exec python "$(dirname "$0")/quickstart.py" "$@"
