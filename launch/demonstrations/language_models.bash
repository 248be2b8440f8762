# Every causal family after the same tokens of the same books, in bits per byte of other books.
#
# The models have about as many parameters, and batch, length, optimizer and schedule are the same: those of
# pretrain/gpt_small. A step of awd_lstm_small has 16 windows of 124.3 tokens in the mean, a step of the others 2,048.

# shellcheck shell=bash disable=SC2154
tokens=1000000
declare -A model=([gpt]="gpt_small" [lstm]="lstm_small" [lstm_streams]="lstm_small --data.layout streams"
  [awd_lstm]="awd_lstm_small")
declare -A step=([gpt]=20480 [lstm]=20480 [lstm_streams]=20480 [awd_lstm]=19890)
order=(gpt lstm lstm_streams awd_lstm)

names=(store test-store)
guesses=(20 2)
for seed in "${seeds[@]}"; do
  for row in "${order[@]}"; do
    names+=("$row-$seed" "$row-$seed-perplexity")
    guesses+=(200 20)
  done
done
names+=(table)
guesses+=(2)
. launch/steps.bash

run store python -m jaxlm.prepare --source "text:$data/books/train/*.txt" --tokenizer train-sentencepiece:4000 \
  --output "$out/stores/train"
run test-store python -m jaxlm.prepare --source "text:$data/books/test/*.txt" --tokenizer "store:$out/stores/train" \
  --output "$out/stores/test"
for seed in "${seeds[@]}"; do
  for row in "${order[@]}"; do
    read -ra words <<<"${model[$row]}"
    run "$row-$seed" python -m jaxlm.pretrain "pretrain/${words[0]}" "${words[@]:1}" --run "$out/$row-$seed" \
      --seed "$seed" --data.store "$out/stores/train" --num-steps "$((tokens * 10 / step[$row]))"
    run "$row-$seed-perplexity" --makes "$out/$row-$seed.json" python -m jaxlm.evaluate perplexity \
      --run "$out/$row-$seed" --data.store "$out/stores/test" --output "$out/$row-$seed.json"
  done
done
run table python launch/demonstrations/table.py --directory "$out" --seeds "${seeds[@]}" \
  --columns 'bits per byte={row}-{seed}.json:value:bits_per_byte' \
  --rows gpt='GPT' lstm='LSTM' lstm_streams='LSTM, state carried on' awd_lstm='AWD-LSTM'
