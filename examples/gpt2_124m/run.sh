#!/usr/bin/env bash
# Trains on this machine: one process per GPU, or one without. Flags such as --data.sources='[corpus/*.jsonl]' follow.
set -euo pipefail
exec flextrain train "$(dirname "$0")/config.yaml" "$@"
