#!/usr/bin/env bash
# Run the tests on the CPU: launch/test.sh [pytest arguments] (paths from the top of the repository).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

if [ "${1:-}" = "-h" ] || [ "${1:-}" = "--help" ]; then
  cat <<'TEXT'
usage: launch/test.sh [pytest arguments]

Sets up .venv where needed and runs the tests on the CPU, which plays eight devices.
  launch/test.sh -m 'not slow'             the quick ones
  launch/test.sh tests/test_data_rows.py   one file
Tests on real data look for it in $JAXLM_DATA (.data unless set), those against PyTorch need
launch/setup.sh cpu parity first; both skip, with the reason, where it is absent.
TEXT
  exit 0
fi

launch/setup.sh cpu test
export JAX_PLATFORMS=cpu
# Two processes, a file to one of them: most of the time is one thread that compiles.
exec .venv/bin/python -m pytest -n 2 --dist loadfile "$@"
