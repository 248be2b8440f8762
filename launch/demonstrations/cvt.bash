# What cross-view training gains for chunking with few labels, over supervised training with as many labelled steps and with
# as many updates, and what each view gives with the fewest labels.
#
# The network is that of finetune/cvt at a quarter of the widths, with 32 filters over characters, in batches of 32. The
# sentences without tags are those of CoNLL-2000 that the sample leaves out. Each seed draws labelled sentences of its own, the
# same for every arm.

# shellcheck shell=bash disable=SC2154
declare -A samples=([1]=89 [5]=447 [10]=894)
arms=(supervised supervised-twice cvt)
views=(full forwards backwards future past)
updates=400 # of labelled batches, where unlabelled ones are between them

names=(store)
guesses=(10)
for percent in 1 5 10; do
  for seed in "${seeds[@]}"; do
    for arm in "${arms[@]}"; do
      names+=("$arm-$percent-$seed")
      guesses+=(130)
    done
  done
done
for seed in "${seeds[@]}"; do
  for view in "${views[@]}"; do
    names+=("without-$view-$seed")
    guesses+=(130)
  done
done
names+=(table views raw)
guesses+=(2 2 2)
. launch/steps.bash

cut -d ' ' -f 1 "$data/chunk/conll2000/train.txt" >"$out/words.txt"
run store python -m jaxlm.prepare --source "lines:$out/words.txt" --tokenizer words:20000 --output "$out/store"
sizes=(--model.word-width 100 --model.character-width 16 --model.filters 3 32 --model.width 128 --model.units 256 128
  --batch-size 32 --length 64 --optimizer.warmup 200 --ema 0.99)
tagger() { # NAME PERCENT SEED FLAG …
  local name=$1 percent=$2 seed=$3
  shift 3
  run "$name-$seed" python -m jaxlm.finetune finetune/cvt --run "$out/$name-$seed" --task chunk \
    --task-dir "$data/chunk/conll2000" --tokenizer "store:$out/store" --sample "${samples[$percent]}" \
    --held-out-seed "$seed" --seed "$seed" --eval-every 200 --eval-rows 500 "${sizes[@]}" "$@"
}
for percent in 1 5 10; do
  for seed in "${seeds[@]}"; do
    tagger "supervised-$percent" "$percent" "$seed" --num-steps "$updates"
    tagger "supervised-twice-$percent" "$percent" "$seed" --num-steps $((2 * updates))
    tagger "cvt-$percent" "$percent" "$seed" --num-steps $((2 * updates)) --unlabelled rest
  done
done
for seed in "${seeds[@]}"; do
  for view in "${views[@]}"; do
    others=()
    for other in "${views[@]}"; do [ "$other" = "$view" ] || others+=("$other"); done
    tagger "without-$view" 1 "$seed" --num-steps $((2 * updates)) --unlabelled rest --views "${others[@]}"
  done
done
rows=(supervised='supervised, equal labelled steps' supervised-twice='supervised, equal updates' cvt='cross-view training')
columns=()
raw=()
for percent in 1 5 10; do
  columns+=("$percent %={row}-$percent-{seed}/results.json:value:runs.0.test.entity_f1")
  raw+=("$percent %={row}-$percent-{seed}/metrics.jsonl:last:raw_dev_entity_f1")
done
run table python launch/demonstrations/table.py --directory "$out" --seeds "${seeds[@]}" --scale 100 --digits 1 \
  --columns "${columns[@]}" --rows "${rows[@]}"
rows=(cvt-1='all views')
for view in "${views[@]}"; do rows+=("without-$view=without $view"); done
run views python launch/demonstrations/table.py --directory "$out" --name views --seeds "${seeds[@]}" --scale 100 --digits 1 \
  --columns '1 %={row}-{seed}/results.json:value:runs.0.test.entity_f1' --rows "${rows[@]}"
rows=(supervised='supervised, equal labelled steps' supervised-twice='supervised, equal updates' cvt='cross-view training')
run raw python launch/demonstrations/table.py --directory "$out" --name raw --seeds "${seeds[@]}" --scale 100 --digits 1 \
  --columns "${raw[@]}" --rows "${rows[@]}"
