#!/usr/bin/env bash
# Build the documentation strictly and without a network beyond the installation: launch/docs.sh [sphinx-build arguments].
set -euo pipefail
cd -P "$(dirname "${BASH_SOURCE[0]}")/.."

if [ "${1:-}" = "-h" ] || [ "${1:-}" = "--help" ]; then
  cat <<'TEXT'
usage: launch/docs.sh [sphinx-build arguments]

Sets up .venv if needed and builds docs/ into build/docs; open build/docs/index.html. A warning is an error: a link
within the pages that leads nowhere, a page that no list contains, an unknown name. External links are not checked.
TEXT
  exit 0
fi

launch/setup.sh cpu docs
export JAX_PLATFORMS=cpu
.venv/bin/python -m sphinx -n -W --keep-going -b html "$@" docs build/docs
echo "build/docs/index.html is ready"
