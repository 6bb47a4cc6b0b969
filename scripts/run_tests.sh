#!/usr/bin/env bash
# Linters, types and all tests, end to end included; arguments go to pytest.
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit 1
exec scripts/run.sh bash -euo pipefail -c \
    'ruff check . && ruff format --check . && scripts/typecheck.sh && exec python -m pytest "$@"' tests "$@"
