# What span corruption is worth for a small T5 with 1,000 labels, in rows of 64 and of 512 tokens.
#
# pretrain/t5_tiny on the books, with the same number of tokens in a step for both lengths, then TREC-6 and SST-2 as text to text.
# Each seed draws labelled rows of its own, the same for every arm. The pretraining has one seed. Nothing was tuned.

# shellcheck shell=bash disable=SC2154
tasks=(trec sst2)
arms=(spans-512 spans-64 scratch)
sizes=(--model.vocab-size 0 --model.num-encoder-layers 3 --model.num-layers 3 --model.width 192 --model.num-heads 6
  --model.head-width 32 --model.feed-forward-width 512 --model.feed-forward geglu --model.output untied
  --model.no-scaled-output)

names=(store 512-pretrain 64-pretrain)
guesses=(45 700 600)
for seed in "${seeds[@]}"; do
  for task in "${tasks[@]}"; do
    for arm in "${arms[@]}"; do
      names+=("$arm-$task-$seed")
      guesses+=(120)
    done
  done
done
names+=(table)
guesses+=(2)
. launch/steps.bash

run store python -m jaxlm.prepare --source "text:$data/books/train/*.txt" --tokenizer train-sentencepiece:8000 \
  --output "$out/store"
for length in 512 64; do
  run "$length-pretrain" python -m jaxlm.pretrain pretrain/t5_tiny --run "$out/pretrained-$length" \
    --data.store "$out/store" --length "$length" --batch-size $((2048 / length)) --eval-every 0
done
for seed in "${seeds[@]}"; do
  for task in "${tasks[@]}"; do
    directory=$data/classify/trec
    [ "$task" = trec ] || directory=$data/glue/SST-2
    for arm in "${arms[@]}"; do
      start=(--start "$out/pretrained-${arm#spans-}")
      [ "$arm" != scratch ] || start=(--tokenizer "store:$out/store" "${sizes[@]}")
      run "$arm-$task-$seed" python -m jaxlm.finetune finetune/t5 --run "$out/$arm-$task-$seed" --task "$task" \
        --task-dir "$directory" --as-text --sample 1000 --held-out-seed "$seed" --seed "$seed" --length 64 \
        --num-epochs 10 --select last --eval-every 1000 "${start[@]}"
    done
  done
done
run table python launch/demonstrations/table.py --directory "$out" --seeds "${seeds[@]}" --scale 100 --digits 1 \
  --columns 'TREC-6={row}-trec-{seed}/results.json:value:runs.0.test.accuracy' \
  'SST-2={row}-sst2-{seed}/results.json:value:runs.0.dev.accuracy' \
  --rows spans-512='span corruption, rows of 512' spans-64='span corruption, rows of 64' scratch='from scratch'
