#!/usr/bin/env bash
# Checks this machine's CUDA device against eager references and measures an 8B-shaped model: under 8 minutes, no
# downloads. The last thing printed is a short table; the exit status is 1 when a correctness check failed.
#
#   scripts/gpu_check.sh          on a CUDA device
#   scripts/gpu_check.sh --tiny   the same road on the CPU, with a tiny model, in under a minute
#
# It takes the current python; another one: PYTHON=.venv/bin/python scripts/gpu_check.sh
set -euo pipefail
cd "$(dirname "$0")/.."
PYTHON="${PYTHON:-python}"

if ! "$PYTHON" -c 'import torch, drafttrain' 2>/dev/null; then
  echo "error: $PYTHON has no torch, or no drafttrain. In an environment whose torch sees the device run: " \
    "$PYTHON -m pip install -e ." >&2
  exit 2
fi
exec "$PYTHON" scripts/gpu_check.py "$@"
