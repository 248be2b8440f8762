#!/usr/bin/env bash
# Rerun a demonstration of the documentation: small models, three seeds, controls, one table.
# shellcheck disable=SC2034,SC1090 # a demonstration reads the variables
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

usage() {
  cat <<'TEXT'
usage: launch/demonstrate.sh NAME DATA [DIRECTORY]

Runs a demonstration and writes its tables to DIRECTORY, table.md and table.json first (default
runs/demonstrations/NAME). NAME:
  auxiliary_losses  the character Transformer with and without each of its losses (docs/character_transformer.md)
  awd_lstm          AWD-LSTM without each part of its regularization, on 150 kB of a novel (docs/awd_lstm.md)
  ulmfit            the stages of ULMFiT with 100 and 500 labels (docs/ulmfit.md)
  language_models   bits per byte of GPT, Transformer-XL, the LSTM and AWD-LSTM after the same tokens of the same books,
                    the loss by position, and the gain from a longer attention (docs/transformer_xl.md)
Every command is printed before it runs. After a stop at any moment, rerun the same command to resume; completed steps are not
repeated. DATA has books/train, books/valid and books/test (*.txt); for ulmfit also classify/trec/{train,test}.txt and
glue/SST-2/{train,dev}.tsv.
TEXT
}

fail() {
  usage >&2
  echo "error: $1" >&2
  exit 2
}

case "${1:-}" in
  -h | --help)
    usage
    exit 0
    ;;
  -*) fail "unknown option '$1'" ;;
esac
[ $# -ge 2 ] && [ $# -le 3 ] || fail "expected NAME, DATA and at most one DIRECTORY, got $# arguments"
name=$1
data=$2
out=${3:-runs/demonstrations/$name}
again="launch/demonstrate.sh $*"
case "$name" in
  auxiliary_losses) parts=(books/train books/valid/Anton_Chekhov_The_Duel.txt) ;;
  awd_lstm) parts=(books/train/Charles_Dickens_David_Copperfield.txt) ;;
  language_models) parts=(books/train books/test/Aldous_Huxley_Antic_Hay.txt) ;;
  ulmfit) parts=(books/train classify/trec glue/SST-2) ;;
  *) fail "NAME must be auxiliary_losses, awd_lstm, ulmfit or language_models, got '$name'" ;;
esac
for part in "${parts[@]}"; do
  [ -e "$data/$part" ] || fail "DATA must have $part, got none in $data"
done
seeds=(0 1 2)

launch/setup.sh cpu
. .venv/bin/activate
export JAX_PLATFORMS=cpu
mkdir -p "$out"

# A demonstration lists the names of its steps and their seconds, sources steps.bash, and runs them.
. "launch/demonstrations/$name.bash"
