#!/usr/bin/env bash
# Damage files at random and read them, many times: launch/faults.sh [N].
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

usage() {
  cat <<'TEXT'
usage: launch/faults.sh [N]

Runs the long part of the tests: N random faults (1000 unless given), every tenth of them through a command, each to
end in one line that refuses, in a recovery, or in an unaffected result; and N/10 random histories of a pod. Two cores
take about an hour and a half for 1,000. The judged faults are kept in runs/faults/journal.jsonl: stopped at any moment,
the same command goes on, and a larger N adds to them. A seed brings its fault back; remove its line from the journal to
judge it again.
TEXT
}

case "${1:-}" in
  -h | --help)
    usage
    exit 0
    ;;
esac
count=${1:-1000}
if [ $# -gt 1 ] || ! [[ "$count" =~ ^[1-9][0-9]*$ ]]; then
  usage >&2
  echo "error: N must be one number above 0, got '$*'" >&2
  exit 2
fi
launch/setup.sh cpu test
export JAX_PLATFORMS=cpu
exec .venv/bin/python -m pytest -m campaign --campaign "$count" --campaign-directory runs/faults tests
