#!/usr/bin/env bash
# Makes the environment in $SMARTGEN_CACHE (default: ~/.cache/sglang-smartgen) and prints its folder.
#   env-HASH       all pinned packages; shared by every checkout with the same requirements
#   checkout-HASH  a thin venv on top of it, with this checkout installed in editable form, and what
#                  only the documentation needs
#   models/        the small model of the demo and the end-to-end tests
# Each is stamped last, so that an interrupted set-up is done again; a lock keeps two runs apart.
# Settings: SMARTGEN_CACHE, SMARTGEN_PYTHON (which Python 3.11), SMARTGEN_DEVICE=cpu|cuda (mooncake build).
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)
cache=${SMARTGEN_CACHE:-$HOME/.cache/sglang-smartgen}
mkdir -p "$cache"
cache=$(cd "$cache" && pwd -P)
started=$SECONDS

say() { printf '[setup %3ds] %s\n' "$((SECONDS - started))" "$*" >&2; }
die() { printf 'setup: %s\n' "$*" >&2; exit 1; }
hash_of() { sha256sum | cut -c1-12; }

say_progress() { # stdin: pip's output  $1: number of packages
    local line count=0
    while IFS= read -r line; do
        case $line in
            Collecting*) ((++count % 25)) || say "  $count of $1 packages fetched" ;;
            Installing*) say "  all fetched, unpacking" ;;
        esac
    done
}

find_python() {
    local candidate
    for candidate in ${SMARTGEN_PYTHON:-python3.11 python3 /usr/bin/python3.11}; do
        if "$candidate" -c 'import ensurepip, sys, venv; sys.exit(sys.version_info[:2] != (3, 11))' \
            >/dev/null 2>&1; then
            command -v "$candidate"
            return
        fi
    done
    die "Python 3.11 with venv was not found: install it (Debian: python3.11-venv) or name one in SMARTGEN_PYTHON."
}

missing_libraries() { # Debian packages of the shared libraries that Mooncake loads
    local known
    known=$(PATH=$PATH:/sbin:/usr/sbin ldconfig -p 2>/dev/null || true)
    [[ $known == *libibverbs.so.1* ]] || echo libibverbs1
    [[ $known == *librdmacm.so.1* ]] || echo librdmacm1
}

install_system_packages() {
    local wanted
    wanted=$(missing_libraries | xargs)
    PATH=$PATH:/sbin:/usr/sbin command -v tc >/dev/null || wanted="$wanted iproute2"
    [[ -n $wanted ]] || return 0
    if [[ $(id -u) == 0 ]] && command -v apt-get >/dev/null; then
        say "apt-get install $wanted"
        # shellcheck disable=SC2086
        { apt-get update -qq && DEBIAN_FRONTEND=noninteractive \
            apt-get install -y -qq --no-install-recommends $wanted; } >&2 </dev/null || true
    fi
    wanted=$(missing_libraries | xargs)
    [[ -z $wanted ]] ||
        die "Mooncake needs the system package(s) $wanted, which are missing and could not be installed from here: install them as root."
}

make_base() { # $1: folder
    local base=$1 count files="-r requirements/base.txt -r requirements/$device.txt -r requirements/dev.txt -r requirements/eval.txt -r requirements/model.txt"
    rm -rf "$base"
    say "making the environment $base (about 11 GB, some minutes)"
    "$python" -m venv "$base"
    count=$(cat requirements/{base,"$device",dev,eval,model}.txt | grep -c '^[a-zA-Z]')
    say "installing $count pinned packages (pip's output is in $base/pip.log)"
    # Every pin is in the files, so nothing is left to resolve. Compiling all 36,000 modules now would
    # take minutes more; run.sh lets Python keep those that are used when it first imports them.
    # shellcheck disable=SC2086
    PYTHONUNBUFFERED=1 "$base/bin/python" -m pip install --no-input --no-deps --no-compile \
        --disable-pip-version-check --progress-bar off $files 2>&1 </dev/null |
        tee "$base/pip.log" | say_progress "$count" ||
        { grep -A5 '^ERROR' "$base/pip.log" >&2 || true; die "pip could not install the pinned packages."; }
    say "checking the imports"
    "$base/bin/python" -c 'import torch, torchvision, triton, transformers, sglang, mooncake.engine, sglang_router' >&2
    touch "$base/.ready"
}

make_checkout() { # $1: folder  $2: base
    local thin=$1 base=$2 site script
    rm -rf "$thin"
    say "installing this checkout ($root) into $thin"
    "$base/bin/python" -m venv --without-pip "$thin"
    site=$(echo "$thin"/lib/python3.*/site-packages)
    echo "import site; site.addsitedir('$(echo "$base"/lib/python3.*/site-packages)')" >"$site/smartgen_base.pth"
    # Commands of the packages (pytest, sglang, ...) must see this checkout too.
    for script in $(grep -lIs "^#!$base/bin/python" "$base"/bin/* | grep -v '/pip[0-9.]*$'); do
        sed "1s|$base|$thin|" "$script" >"$thin/bin/${script##*/}"
        chmod +x "$thin/bin/${script##*/}"
    done
    "$base/bin/python" -m pip --python "$thin/bin/python" install -q -q --no-input --no-deps \
        --no-build-isolation --disable-pip-version-check --editable "$root" >&2 </dev/null
    "$base/bin/python" -m pip --python "$thin/bin/python" install -q -q --no-input --no-deps \
        --no-compile --disable-pip-version-check -r requirements/docs.txt >&2 </dev/null
    "$thin/bin/python" -P -c 'import importlib.util, sys
sys.exit(importlib.util.find_spec("sglang_smartgen.triton_kernels") is None)' >&2
    echo "$base" >"$thin/base"
    touch "$thin/.ready"
}

cd "$root"
unset PYTHONDONTWRITEBYTECODE
if [[ -n ${SMARTGEN_DEVICE:-} ]]; then
    device=$SMARTGEN_DEVICE
elif compgen -G '/dev/nvidia[0-9]*' >/dev/null; then
    device=cuda
else
    device=cpu
fi
[[ $device == cpu || $device == cuda ]] || die "SMARTGEN_DEVICE is '$device'; allowed are cpu and cuda."

pins=$({ cat requirements/{base,cpu,cuda,dev,eval,model}.txt; echo "3.11 $device"; } | hash_of)
base=$cache/env-$pins
thin=$cache/checkout-$({ echo "$root $pins"; cat pyproject.toml setup.py requirements/docs.txt scripts/setup.sh; } | hash_of)
model=$cache/models/smollm2-135m-instruct

if [[ ! -e $base/.ready || ! -e $thin/.ready || ! -d $model || -n $(missing_libraries) ]]; then
    exec 9>"$cache/setup.lock"
    flock -n 9 || { say "waiting for another set-up to end"; flock 9; }
    install_system_packages
    python=$(find_python)
    [[ -e $base/.ready ]] || make_base "$base"
    [[ -e $thin/.ready ]] || make_checkout "$thin" "$base"
    if [[ ! -d $model ]]; then
        say "converting the model (SmolLM2-135M-Instruct, 540 MB)"
        SMARTGEN_CACHE=$cache HF_HUB_OFFLINE=1 TQDM_DISABLE=1 "$thin/bin/python" -P -m sglang_smartgen.report.model_cache >/dev/null
    fi
    exec 9>&-
    say "ready"
fi
echo "$thin"
