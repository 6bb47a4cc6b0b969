#!/usr/bin/env bash
# LongBench with and without SmartGen (`smartgen eval`; see `scripts/run_longbench.sh --help`):
#   scripts/run_longbench.sh --out runs/small --quick                       the small set of this repository
#   scripts/run_longbench.sh --out runs/lb --data hub --tasks longbench-e \
#       --model MODEL --url http://ROUTER:8000 --stock-url http://OTHER:8000
# Killed at any moment, the same command goes on where it stopped.
here=$(dirname "${BASH_SOURCE[0]}")
exec "$here/run.sh" smartgen eval --data "$here/../tests/data/longbench" "$@"
