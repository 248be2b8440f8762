#!/usr/bin/env bash
# A stand-in for the training command on a worker: does what the next line of $STAND_IN/plan says, and writes it down.
set -euo pipefail
echo "$(basename "$HOME"): $*" >>"$STAND_IN/trained"
number=$(grep -c "^$(basename "$HOME"): " "$STAND_IN/trained")
played=$(sed -n "${number}p" "$STAND_IN/plan")
echo "step 1 of 2, $played"
case "$played" in
  complete) ;;
  refuse)
    echo "error: model.width 7: a number that num_heads divides"
    exit 2
    ;;
  abort) kill -ABRT $$ ;;
  preempt)
    # A preparation runs on worker-0 alone.
    [[ "$(basename "$HOME")" != worker-1 && "$*" != *jaxlm.prepare* ]] || gcloud play preempt
    sleep 60
    ;;
  suspend)
    [ "$(basename "$HOME")" != worker-1 ] || gcloud play preempt pod SUSPENDED
    sleep 60
    ;;
  hang)
    [ "$(basename "$HOME")" = worker-0 ] || sleep 60
    ;;
  away)
    gcloud play lose_sight
    ;;
  wait) # until it is told how it ends
    sleep 100000 &
    trap 'kill $!; exit 75' TERM
    trap 'kill $!; exit 0' USR1
    trap 'kill $!; exit 1' USR2
    touch "$HOME/waits"
    wait
    ;;
  run)
    trap 'echo "$(basename "$HOME")" >>"$STAND_IN/terminated"' TERM
    touch "$STAND_IN/running-$(basename "$HOME")"
    # A signal to one worker leads all of them to save and end.
    until [ -e "$STAND_IN/signalled" ]; do sleep 0.01; done
    [ ! -e "$STAND_IN/code" ] || exit "$(cat "$STAND_IN/code")"
    echo "stopped at step 1, saved"
    exit 75
    ;;
esac
