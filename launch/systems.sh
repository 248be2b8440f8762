#!/usr/bin/env bash
# Train a small model of each family that reads word pieces on the same text, and fine-tune and probe it: one table.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

usage() {
  cat <<'TEXT'
usage: launch/systems.sh [--tokens N] DATA [DIRECTORY]

Trains a small model of each family that reads word pieces on N tokens (default 3,000,000) of DATA/books, fine-tunes it
with three seeds on TREC-6 and on 1,000 labels of SST-2, does the same without pretraining, probes its states for the
entities of WNUT-17, and writes DIRECTORY/systems.md, DIRECTORY/systems.json and DIRECTORY/report.html (default
runs/systems).
It takes about two hours on two cores. After a stop, rerun the same command to resume; completed steps are not
repeated. DATA has:
  books/train/*.txt, books/test/*.txt          plain text
  classify/trec/train.txt, test.txt            TREC's questions
  glue/SST-2/train.tsv, dev.tsv                GLUE's files
  ner/wnut17/train.conll, test.conll           WNUT-17's files
TEXT
}

fail() {
  usage >&2
  echo "error: $1" >&2
  exit 2
}

tokens=3000000
given=("$@")
while [ $# -gt 0 ]; do
  case "$1" in
    -h | --help)
      usage
      exit 0
      ;;
    --tokens)
      tokens=${2:-}
      [[ "$tokens" =~ ^[0-9]{5,}$ ]] || fail "--tokens must be a number of at least 10000, got '$tokens'"
      shift 2
      ;;
    -*) fail "unknown option '$1'" ;;
    *) break ;;
  esac
done
[ $# -ge 1 ] && [ $# -le 2 ] || fail "expected DATA and at most one DIRECTORY, got $# arguments"
data=$1
out=${2:-runs/systems}
again="launch/systems.sh ${given[*]}"
for part in books/train books/test classify/trec glue/SST-2 ner/wnut17; do
  [ -d "$data/$part" ] || fail "DATA must have a directory $part, got none in $data"
done

# A family is one row: name, tenths of tokens in a step, kind of its vocabulary, objective. Its configs are
# pretrain/NAME_small and finetune/NAME_small. Steps of bert_small have 64 rows: of 32 tokens in three fifths of the
# steps, and of 128 in the others. The windows of awd_lstm_small have 124.3 tokens in the mean. A masked language model
# gives no text a probability, and so has no bits per byte.
families=(
  "gpt 20480 sentencepiece causal"
  "transformer_xl 20480 sentencepiece causal"
  "lstm 20480 sentencepiece causal"
  "awd_lstm 19890 sentencepiece causal"
  "bert 45056 wordpiece masked"
)
vocabulary=4000
seeds=3

launch/setup.sh cpu
. .venv/bin/activate
export JAX_PLATFORMS=cpu
mkdir -p "$out"

names=(sentencepiece-store sentencepiece-test wordpiece-store wordpiece-test)
guesses=(18 2 43 3)
for family in "${families[@]}"; do
  read -r name _ _ objective <<<"$family"
  names+=("$name-pretrain")
  guesses+=(600)
  if [ "$objective" = causal ]; then
    names+=("$name-perplexity")
    guesses+=(20)
  fi
  names+=("$name-probe" "$name-trec" "$name-sst2" "$name-trec-scratch" "$name-sst2-scratch")
  guesses+=(60 200 60 200 60)
done
names+=(table report)
guesses+=(2 5)
. launch/steps.bash

for kind in sentencepiece wordpiece; do
  run "$kind-store" python -m jaxlm.prepare --source "text:$data/books/train/*.txt" \
    --tokenizer "train-$kind:$vocabulary" --output "$out/stores/$kind"
  run "$kind-test" python -m jaxlm.prepare --source "text:$data/books/test/*.txt" \
    --tokenizer "store:$out/stores/$kind" --output "$out/stores/$kind-test"
done

finetune() { # NAME-TASK NAME TASK TASK_DIR FLAG …
  local run=$1 name=$2 task=$3 directory=$4
  shift 4
  run "$run" python -m jaxlm.finetune "finetune/${name}_small" --run "$out/$run" --task "$task" --task-dir "$directory" \
    --seeds "$seeds" --select last --length 64 "$@"
}

for family in "${families[@]}"; do
  read -r name step kind objective <<<"$family"
  store="$out/stores/$kind"
  run "$name-pretrain" python -m jaxlm.pretrain "pretrain/${name}_small" --run "$out/$name" \
    --data.store "$store" --num-steps "$((tokens * 10 / step))"
  if [ "$objective" = causal ]; then
    run "$name-perplexity" --makes "$out/$name-perplexity.json" python -m jaxlm.evaluate perplexity --run "$out/$name" \
      --data.store "$store-test" --output "$out/$name-perplexity.json"
  fi
  run "$name-probe" --makes "$out/$name-probe.json" python launch/systems/probe.py --run "$out/$name" \
    --data "$data/ner/wnut17" --seeds "$seeds" --output "$out/$name-probe.json"
  finetune "$name-trec" "$name" trec "$data/classify/trec" --start "$out/$name"
  finetune "$name-sst2" "$name" sst2 "$data/glue/SST-2" --sample 1000 --start "$out/$name"
  finetune "$name-trec-scratch" "$name" trec "$data/classify/trec" --tokenizer "store:$store"
  finetune "$name-sst2-scratch" "$name" sst2 "$data/glue/SST-2" --sample 1000 --tokenizer "store:$store"
done

run table python launch/systems/table.py --directory "$out"
runs=()
for family in "${families[@]}"; do
  name=${family%% *}
  runs+=("$out/$name" "$out/$name-trec" "$out/$name-sst2" "$out/$name-trec-scratch" "$out/$name-sst2-scratch")
done
run report python -m jaxlm.report "${runs[@]}" --output "$out/report.html"
