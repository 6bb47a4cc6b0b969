#!/usr/bin/env bash
# scripts/run.sh CMD...  runs a command inside the environment, setting it up first where needed.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd -P)
[[ $# -gt 0 ]] || { echo "usage: scripts/run.sh CMD..." >&2; exit 2; }
VIRTUAL_ENV=$("$here/setup.sh")
export VIRTUAL_ENV
base=$(<"$VIRTUAL_ENV/base")
export PATH=$VIRTUAL_ENV/bin:$base/bin:$PATH
unset PYTHONDONTWRITEBYTECODE  # the packages are compiled when they are first imported (setup.sh)
# SAFEPATH: the current folder must not be importable, or `triton_kernels` would be (see setup.py).
export PYTHONSAFEPATH=1 PYTHONNOUSERSITE=1
export SMARTGEN_CACHE=${SMARTGEN_CACHE:-$HOME/.cache/sglang-smartgen}
exec "$@"
