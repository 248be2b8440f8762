#!/usr/bin/env bash
# Create .venv with jaxlm and its dependencies, at the versions pinned in launch/constraints.txt.
set -euo pipefail
cd -P "$(dirname "${BASH_SOURCE[0]}")/.."

usage() {
  cat <<'TEXT'
usage: launch/setup.sh [cpu|gpu|tpu] [EXTRA ...]

Creates .venv with jaxlm and pinned versions of its dependencies, for this kind of device (default: cpu).
It does nothing if everything is installed; another kind may be added to the same .venv. EXTRA: gpt1 tfds test parity
harness docs (described in setup.cfg). PYTHON=... selects the interpreter (3.11 or later).
TEXT
}

fail() {
  echo "error: $*" >&2
  exit 2
}

kind=cpu
case "${1:-cpu}" in
  cpu | gpu | tpu) kind=${1:-cpu} ;;
  -h | --help)
    usage
    exit 0
    ;;
  *)
    usage >&2
    fail "the kind of device must be cpu, gpu or tpu, got '$1'"
    ;;
esac
[ $# -eq 0 ] || shift
for extra in "$@"; do
  case "$extra" in
    gpt1 | tfds | test | parity | harness | docs) ;;
    *)
      usage >&2
      fail "an extra must be gpt1, tfds, test, parity, harness or docs, got '$extra'"
      ;;
  esac
done

python=.venv/bin/python
new_enough='import sys, ensurepip; sys.exit(sys.version_info < (3, 11))'

find_python() {
  local candidate
  for candidate in ${PYTHON:+"$PYTHON"} python3 python3.14 python3.13 python3.12 python3.11; do
    if "$candidate" -c "$new_enough" >/dev/null 2>&1; then
      echo "$candidate"
      return
    fi
    [ "$candidate" != "${PYTHON:-}" ] || fail "PYTHON must be a Python 3.11 or later with pip, got $PYTHON"
  done
  fail "no Python 3.11 or later with pip was found: install one, or name it in PYTHON=..."
}

# A .venv contains the path it was created at: a moved or incomplete one is recreated.
if ! "$python" -c "$new_enough" >/dev/null 2>&1 || [ "$("$python" -c 'import sys; print(sys.prefix)')" != "$PWD/.venv" ]; then
  found=$(find_python)
  echo "making .venv with $("$found" --version)"
  "$found" -m venv --clear .venv
fi

# Each installed kind or extra is recorded with a checksum of everything that decides it. When that changes, all recorded
# ones are updated together, so that none is left with incompatible versions.
key="$({ cat setup.cfg pyproject.toml launch/constraints.txt && "$python" --version && echo "$PWD"; } | cksum)"
wanted=("$kind" "$@")
missing=()
for name in "${wanted[@]}"; do
  [ "$(cat ".venv/.jaxlm-$name" 2>/dev/null)" = "$key" ] || missing+=("$name")
done
if [ ${#missing[@]} -eq 0 ]; then
  echo ".venv is ready: ${wanted[*]}"
  exit 0
fi
for note in .venv/.jaxlm-*; do
  [ ! -e "$note" ] || wanted+=("${note#.venv/.jaxlm-}")
done

extras=()
for name in "${wanted[@]}"; do
  [ "$name" = cpu ] || extras+=("$name")
done
package=.
if [ ${#extras[@]} -gt 0 ]; then
  package=".[$(IFS=, && echo "${extras[*]}")]"
fi
echo "installing into .venv for: ${missing[*]} (minutes the first time)"
install=("$python" -m pip install --quiet --disable-pip-version-check --constraint launch/constraints.txt)
"${install[@]}" setuptools wheel
"${install[@]}" --no-build-isolation --editable "$package"
for name in "${wanted[@]}"; do
  printf '%s\n' "$key" >".venv/.jaxlm-$name"
done
echo ".venv is ready: ${missing[*]}"
