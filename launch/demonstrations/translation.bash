# English to German from scratch: an encoder-decoder and a decoder with the same number of parameters and of steps.
#
# The captions of Multi30k, 29,000 pairs. BLEU and chrF are those of the test set of 2016. Vocabulary, schedule, dropout
# and label smoothing are the same; each has the optimizer of its family.

# shellcheck shell=bash disable=SC2154
arms=(translation_t5_small translation_small)

names=(store)
guesses=(4)
for seed in "${seeds[@]}"; do
  names+=("translation_t5_small-$seed" "translation_small-$seed")
  guesses+=(600 1100)
done
names+=(table curves)
guesses+=(2 2)
. launch/steps.bash
. launch/multi30k.bash

files=$out/multi30k
link_multi30k "$data" "$files"
run store python -m jaxlm.prepare --source "lines:$files/train.en" --source "lines:$files/train.de" \
  --tokenizer train-sentencepiece:4000 --output "$out/store"
for seed in "${seeds[@]}"; do
  for arm in "${arms[@]}"; do
    run "$arm-$seed" python -m jaxlm.finetune "finetune/$arm" --run "$out/$arm-$seed" --seed "$seed" \
      --tokenizer "store:$out/store" --task translation --task-dir "$files" --options.languages en-de --num-epochs 5
  done
done
rows=(translation_t5_small='encoder-decoder' translation_small='decoder')
run table python launch/demonstrations/table.py --directory "$out" --seeds "${seeds[@]}" --digits 2 \
  --columns 'BLEU={row}-{seed}/results.json:value:runs.0.test.bleu' \
  'chrF={row}-{seed}/results.json:value:runs.0.test.chrf' \
  'loss={row}-{seed}/results.json:value:runs.0.test.loss' --rows "${rows[@]}"
# The evaluations of the first 200 rows of dev, one after each pass over the pairs.
columns=()
for epoch in 1 2 3 4 5; do
  columns+=("epoch $epoch={row}-{seed}/metrics.jsonl:$((epoch - 1)):dev_bleu")
done
run curves python launch/demonstrations/table.py --directory "$out" --name curves --seeds "${seeds[@]}" --digits 1 \
  --columns "${columns[@]}" --rows "${rows[@]}"
