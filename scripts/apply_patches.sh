#!/usr/bin/env bash
# scripts/apply_patches.sh [--target DIR]  puts the series of patches/ into an installed SGLang; without
# --target into that of run.sh's environment, which all checkouts with the same pins share.
exec "$(dirname "${BASH_SOURCE[0]}")/run.sh" smartgen patch apply "$@"
