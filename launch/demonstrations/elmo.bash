# What the vectors of a small ELMo are worth for chunking with few labels, beside words alone and an untrained ELMo.
#
# pretrain/elmo_small reads 3 million words of the books. The taggers are finetune/bilstm with the same sizes and steps, with
# and without features, on at most 64 words of a sentence; each seed draws labelled sentences of its own, the same for every
# arm. The pretraining has one seed. The probes are logistic regressions on the layers of both ELMos.

# shellcheck shell=bash disable=SC2154
arms=(words characters untrained elmo)
declare -A samples=([1]=89 [5]=447 [10]=894 [100]=7436) # sentences of each percentage of CoNLL-2000's 8,936, and all but dev
declare -A steps=([1]=300 [5]=300 [10]=300 [100]=900)

names=(store validation pretrain untrained)
guesses=(60 10 2400 60)
for percent in 1 5 10 100; do
  for seed in "${seeds[@]}"; do
    for arm in "${arms[@]}"; do
      names+=("$arm-$percent-$seed")
      guesses+=($((steps[$percent] / 6 + 30)))
    done
  done
done
names+=(probe-untrained probe-elmo table)
guesses+=(200 200 2)
. launch/steps.bash

run store python -m jaxlm.prepare --source "text:$data/books/train/*.txt" --tokenizer words:20000 --sentences split \
  --output "$out/store"
run validation python -m jaxlm.prepare --source "text:$data/books/valid/*.txt" --tokenizer "store:$out/store" \
  --sentences split --output "$out/validation"
# 3 million words in rows of 32 x 20, in each direction.
run pretrain python -m jaxlm.pretrain pretrain/elmo_small --run "$out/elmo" --data.store "$out/store" \
  --data.validation "$out/validation" --num-steps 4700
run untrained python -m jaxlm.pretrain pretrain/elmo_small --run "$out/untrained" --data.store "$out/store" \
  --optimizer.peak-lr 0 --num-steps 1 --eval-every 0
for percent in 1 5 10 100; do
  for seed in "${seeds[@]}"; do
    for arm in "${arms[@]}"; do
      case "$arm" in
        words) more=(--model.character-width 0) ;;
        characters) more=() ;;
        *) more=(--word-features "$out/$arm") ;;
      esac
      run "$arm-$percent-$seed" python -m jaxlm.finetune finetune/bilstm --run "$out/$arm-$percent-$seed" --task chunk \
        --task-dir "$data/chunk/conll2000" --tokenizer "store:$out/store" --sample "${samples[$percent]}" \
        --held-out-seed "$seed" --seed "$seed" --num-steps "${steps[$percent]}" --length 64 --eval-every 150 \
        --eval-rows 500 "${more[@]}"
    done
  done
done
for arm in untrained elmo; do
  run "probe-$arm" --makes "$out/probe-$arm.json" python launch/systems/probe.py --run "$out/$arm" --task ud_pos \
    --data "$data/ud/ewt" --all-layers --output "$out/probe-$arm.json"
done
rows=(words='word vectors' characters='and characters' untrained='and an untrained ELMo' elmo='and ELMo')
columns=()
for percent in 1 5 10 100; do
  columns+=("$percent %={row}-$percent-{seed}/results.json:value:runs.0.test.entity_f1")
done
run table python launch/demonstrations/table.py --directory "$out" --seeds "${seeds[@]}" --scale 100 --digits 1 \
  --columns "${columns[@]}" --rows "${rows[@]}"
