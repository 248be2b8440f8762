# What the vectors of a translation's encoder (CoVe) are worth for classifying questions and sentences.
#
# finetune/mt_lstm_small translates Multi30k from English to German, in six passes. The networks are finetune/bcn at smaller widths over
# word vectors by counts and a decomposition of the books, which stay fixed; beside them nothing, random vectors, the states
# of an untrained encoder, and those of the trained one. Each seed draws labelled rows of its own for SST.

# shellcheck shell=bash disable=SC2154
tasks=(trec trec50 sst_binary)
arms=(vectors random untrained cove)

names=(vectors store)
guesses=(180 5)
names+=(translation untrained-translation)
guesses+=(1500 60)
for task in "${tasks[@]}"; do
  for seed in "${seeds[@]}"; do
    for arm in "${arms[@]}"; do
      names+=("$arm-$task-$seed")
      guesses+=(90)
    done
  done
done
names+=(table)
guesses+=(2)
. launch/steps.bash
. launch/multi30k.bash

files=$out/multi30k
link_multi30k "$data" "$files"
run vectors --makes "$out/vectors.txt" python launch/demonstrations/vectors.py --text "$data/books/train/*.txt" \
  --output "$out/vectors.txt" --width 100
run store python -m jaxlm.prepare --source "lines:$files/train.en" --source "lines:$files/train.de" \
  --tokenizer train-sentencepiece:8000 --output "$out/store"
translation=(--tokenizer "store:$out/store" --task translation --task-dir "$files" --options.languages en-de)
run translation python -m jaxlm.finetune finetune/mt_lstm_small --run "$out/cove" "${translation[@]}" \
  --num-epochs 6
run untrained-translation python -m jaxlm.finetune finetune/mt_lstm_small --run "$out/untrained" "${translation[@]}" \
  --optimizer.peak-lr 0 --num-steps 1 --eval-rows 8
sizes=(--model.input-feed-forward-width 100 --model.width 128 --model.units 64 --num-epochs 5 --length 32)
for task in "${tasks[@]}"; do
  sample=()
  case "$task" in
    trec) directory=$data/classify/trec ;;
    trec50) directory=$data/classify/trec50 ;;
    *) directory=$data/classify/sst_trees sample=(--sample 2000) ;;
  esac
  for seed in "${seeds[@]}"; do
    for arm in "${arms[@]}"; do
      case "$arm" in
        vectors) more=() ;;
        random) more=(--word-features "$out/untrained:0") ;; # the vectors of the pieces, which no step has changed
        *) more=(--word-features "$out/$arm:-1") ;;
      esac
      run "$arm-$task-$seed" python -m jaxlm.finetune finetune/bcn --run "$out/$arm-$task-$seed" --task "$task" \
        --task-dir "$directory" --tokenizer "vectors:$out/vectors.txt" --word-vectors "$out/vectors.txt" --freeze-words \
        --held-out-seed "$seed" --seed "$seed" "${sizes[@]}" "${sample[@]}" "${more[@]}"
    done
  done
done
rows=(vectors='word vectors' random='and random vectors' untrained='and an untrained encoder' cove='and CoVe')
columns=()
for task in "${tasks[@]}"; do
  columns+=("$task={row}-$task-{seed}/results.json:value:runs.0.test.accuracy")
done
run table python launch/demonstrations/table.py --directory "$out" --seeds "${seeds[@]}" --scale 100 --digits 1 \
  --columns "${columns[@]}" --rows "${rows[@]}"
