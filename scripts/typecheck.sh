#!/usr/bin/env bash
# mypy --strict on the folders without SGLang. mypy does not know the folder mapping of setup.py, so the
# folders are laid (as links) under their import names first.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)
tree=$(mktemp -d)
trap 'rm -rf "$tree"' EXIT
mkdir "$tree/sglang_smartgen"
ln -s "$root"/sglang_smartgen/*.py "$root"/sglang_smartgen/py.typed "$root"/triton_kernels "$tree/sglang_smartgen/"
packages=()
for folder in calibrate core patching select transfer triton_kernels; do
    [[ $folder == triton_kernels ]] || ln -s "$root/sglang_smartgen/$folder" "$tree/sglang_smartgen/$folder"
    packages+=(-p "sglang_smartgen.$folder")
done
cd "$tree"
mypy --config-file "$root/pyproject.toml" --cache-dir "$root/.mypy_cache" "${packages[@]}" "$@"
