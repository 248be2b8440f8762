# The stages of ULMFiT on TREC-6 with 100 and 500 labels and on SST-2 with 500.
#
# A language model on the books, its training on the unlabelled text of the task, and classifiers. Each seed draws
# labelled rows of its own, the same for every arm. Every classifier has 120 updates with 100 labels, 150 with 500. The models are
# small, and the rates are the paper's; nothing was tuned.

# shellcheck shell=bash disable=SC2154
tasks=(trec-100 trec-500 sst2-500)
declare -A epochs=([trec-100]=40 [trec-500]=10 [sst2-500]=10)
tuned=(--optimizer.peak-lr 0.01)
constant=(--optimizer.warmup 0 --optimizer.decay constant --optimizer.floor 0)
equal=(--optimizer.layer-decay 1)
together=(--unfreeze all)
fixed=(--freeze-layers 2 --freeze-embeddings) # with the dropout of the body, unlike --frozen
arms=(scratch last full discriminative slanted gradual)
sizes=(--model.num-layers 2 --model.width 192 --model.units 492)

names=(store general)
guesses=(20 500)
for task in trec sst2; do
  names+=("$task-store" "$task-target")
  guesses+=(5 250)
done
for seed in "${seeds[@]}"; do
  for task in "${tasks[@]}"; do
    for arm in "${arms[@]}"; do
      names+=("$arm-$task-$seed")
      guesses+=(35)
    done
  done
done
names+=(table)
guesses+=(2)
. launch/steps.bash

run store python -m jaxlm.prepare --source "text:$data/books/train/*.txt" --tokenizer train-sentencepiece:4000 \
  --output "$out/stores/general"
run general python -m jaxlm.pretrain pretrain/awd_lstm_small --run "$out/general" --data.store "$out/stores/general" \
  --num-steps 1508
# One document per question or sentence, without its label; of SST-2 the first 8,000 distinct ones in their order.
cut -d ' ' -f 2- "$data/classify/trec/train.txt" | sed G >"$out/trec.txt"
awk -F '\t' 'NR > 1 && !seen[$1]++ && kept++ < 8000 {print $1 "\n"}' "$data/glue/SST-2/train.tsv" >"$out/sst2.txt"
for task in trec sst2; do
  run "$task-store" python -m jaxlm.prepare --source "lines:$out/$task.txt" --tokenizer "store:$out/stores/general" \
    --output "$out/stores/$task"
  run "$task-target" python -m jaxlm.pretrain pretrain/ulmfit_target_code --run "$out/target-$task" \
    --start "$out/general" --data.store "$out/stores/$task" --num-epochs 10
done

classify() { # ARM TASK-LABELS SEED FLAG …
  local arm=$1 name=$2 task=${2%-*} seed=$3
  shift 3
  local directory=$data/classify/trec
  [ "$task" = trec ] || directory=$data/glue/SST-2
  run "$arm-$name-$seed" python -m jaxlm.finetune finetune/ulmfit --run "$out/$arm-$name-$seed" --task "$task" \
    --task-dir "$directory" --sample "${name#*-}" --held-out-seed "$seed" --seed "$seed" --batch-size 32 --length 48 \
    --num-epochs "${epochs[$name]}" --select last --eval-every 1000 "${tuned[@]}" "$@"
}

for seed in "${seeds[@]}"; do
  for name in "${tasks[@]}"; do
    target=$out/target-${name%-*}
    classify scratch "$name" "$seed" --tokenizer "store:$out/stores/general" "${sizes[@]}" "${together[@]}" \
      "${equal[@]}"
    classify last "$name" "$seed" --start "$target" "${fixed[@]}" "${together[@]}" "${equal[@]}"
    classify full "$name" "$seed" --start "$target" "${together[@]}" "${equal[@]}" "${constant[@]}"
    classify discriminative "$name" "$seed" --start "$target" "${together[@]}" "${constant[@]}"
    classify slanted "$name" "$seed" --start "$target" "${together[@]}"
    classify gradual "$name" "$seed" --start "$target"
  done
done
run table python launch/demonstrations/table.py --directory "$out" --seeds "${seeds[@]}" --scale 100 --digits 1 \
  --columns 'TREC-6, 100 labels={row}-trec-100-{seed}/results.json:value:runs.0.test.accuracy' \
  'TREC-6, 500 labels={row}-trec-500-{seed}/results.json:value:runs.0.test.accuracy' \
  'SST-2, 500 labels={row}-sst2-500-{seed}/results.json:value:runs.0.dev.accuracy' --rows gradual='gradual, discriminative, slanted (ULMFiT)' \
  slanted='discriminative, slanted' discriminative='discriminative' full='all layers' last='the head alone' \
  scratch='from scratch'
