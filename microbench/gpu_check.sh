#!/usr/bin/env bash
# Everything that needs an NVIDIA GPU, in under ten minutes, with what the machine's python3 has: see --help.
set -euo pipefail
exec python3 -u "$(dirname "$0")/gpu_check.py" "$@"
