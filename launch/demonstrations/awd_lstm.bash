# AWD-LSTM and the same model without one part, on 150 kB of David Copperfield; the next 50 kB validate.
#
# The parts are regularization, so the text is small and is read forty times. Settings are those of the authors' README
# for the Penn Treebank; the sizes and the batch are ours.

# shellcheck shell=bash disable=SC2154
novel="$data/books/train/Charles_Dickens_David_Copperfield.txt"
declare -A without=(
  [full]=""
  [weight_drop]="--model.recurrent-dropout-rate 0"
  [locked]="--model.embedding-dropout-rate 0 --model.dropout-rate 0 --model.output-dropout-rate 0"
  [word_dropout]="--model.word-dropout-rate 0"
  [ar_tar]="--objective.activation-regularization 0 --objective.temporal-activation-regularization 0"
  [weight_decay]="--optimizer.weight-decay 0"
  [windows]="--data.windows fixed"
  [averaging]="--average-iterates off"
)
without[all_dropout]="${without[weight_drop]} ${without[locked]} ${without[word_dropout]} ${without[ar_tar]}"
order=(full weight_drop locked word_dropout ar_tar weight_decay windows averaging all_dropout)

names=(store validation-store)
guesses=(3 3)
for seed in "${seeds[@]}"; do
  for arm in "${order[@]}"; do
    names+=("$arm-$seed")
    guesses+=(110)
  done
done
names+=(table)
guesses+=(2)
. launch/steps.bash

head -c 150000 "$novel" >"$out/train.txt"
head -c 200000 "$novel" | tail -c 50000 >"$out/valid.txt"
run store python -m jaxlm.prepare --source "text:$out/train.txt" --tokenizer words:3000 --output "$out/stores/train"
run validation-store python -m jaxlm.prepare --source "text:$out/valid.txt" --tokenizer "store:$out/stores/train" \
  --output "$out/stores/valid"
for seed in "${seeds[@]}"; do
  for arm in "${order[@]}"; do
    read -ra flags <<<"${without[$arm]}"
    run "$arm-$seed" python -m jaxlm.pretrain pretrain/awd_lstm_ptb --run "$out/$arm-$seed" --seed "$seed" \
      --data.store "$out/stores/train" --data.validation "$out/stores/valid" --model.num-layers 2 --model.width 128 \
      --model.units 256 --batch-size 10 --num-epochs 40 --eval-every 40 --checkpoint-every 400 "${flags[@]}"
  done
done
run table python launch/demonstrations/table.py --directory "$out" --seeds "${seeds[@]}" \
  --columns 'lowest validation loss={row}-{seed}/metrics.jsonl:min:validation_loss' \
  'last validation loss={row}-{seed}/metrics.jsonl:last:validation_loss' \
  'training loss={row}-{seed}/metrics.jsonl:recent:nll' \
  --rows full=AWD-LSTM weight_drop='without weight drop' locked='without locked dropout' \
  word_dropout='without dropout of words' ar_tar='without AR and TAR' weight_decay='without weight decay' \
  windows='windows of one length' averaging='without NT-ASGD' all_dropout='without any dropout, AR and TAR'
