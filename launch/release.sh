#!/usr/bin/env bash
# Build the files of a release: launch/release.sh TAG.
set -euo pipefail
cd -P "$(dirname "${BASH_SOURCE[0]}")/.."

usage() {
  cat <<'TEXT'
usage: launch/release.sh TAG

Builds the files of the release TAG, for example v0.1.0, into dist/: the wheel, the sdist, the tested pins as
constraints-VERSION.txt, and notes.md, the section of CHANGELOG.md for this version. The version is that of
jaxlm/version.py; the tag must be `v` and this version. PYTHON=... selects the interpreter.
TEXT
}

fail() {
  echo "error: $*" >&2
  exit 2
}

case "${1:-}" in
  -h | --help)
    usage
    exit 0
    ;;
  "")
    usage >&2
    fail "a tag must be given, got nothing"
    ;;
esac
tag=$1
python=${PYTHON:-python3}

version=$(sed -n 's/^__version__ = "\(.*\)"$/\1/p' jaxlm/version.py)
[ "$tag" = "v$version" ] || fail "the tag must be v$version, the version in jaxlm/version.py, got $tag"
notes=$(awk -v heading="## [$version]" '
  index($0, "## [") == 1 { inside = index($0, heading) == 1; next }
  inside' CHANGELOG.md)
[ -n "${notes//[[:space:]]/}" ] || fail "CHANGELOG.md must have a section ## [$version], got none; rename [Unreleased]"

rm -rf dist
mkdir dist
builder=$(mktemp -d)
trap 'rm -rf "$builder"' EXIT
"$python" -m venv "$builder"
install=("$builder/bin/python" -m pip install --quiet --disable-pip-version-check --constraint launch/constraints.txt)
"${install[@]}" build setuptools wheel
"$builder/bin/python" -m build --no-isolation --outdir dist .
cp launch/constraints.txt "dist/constraints-$version.txt"
printf '%s\n' "$notes" >dist/notes.md
ls -l dist
