# Functions of scripts that run many commands: quickstart.sh and systems.sh source this file. Each command is printed, run
# and timed. The script defines:
#   out       directory of the results; the seconds of each step are added to $out/steps.jsonl
#   again     the command line that continues after a stop
#   names     the names of the steps, in their order
#   guesses   seconds of each step on the author's two cores. Their sum, scaled by the speed of this machine so far,
#             estimates the remaining time.

# shellcheck shell=bash disable=SC2154
total=${#names[@]}
number=0
guessed=0 # expected seconds of the steps that were run, not found complete
spent=0   # their actual seconds
begun=$SECONDS
current=

finish() {
  local code=$?
  [ -z "$current" ] || {
    note_seconds "$code"
    echo "stopped in step $number of $total ($current); $again continues" >&2
  }
}
trap finish EXIT

clock() { printf '%d:%02d' $(($1 / 60)) $(($1 % 60)); }

note_seconds() {
  printf '{"step": "%s", "seconds": %d, "code": %d}\n' "$current" $((SECONDS - step_begun)) "$1" >>"$out/steps.jsonl"
}

shown() { # print the command as one would type it
  local word
  printf '$'
  for word in "$@"; do
    case "$word" in
      *[!A-Za-z0-9_./:=,@%+-]* | '') printf " '%s'" "$word" ;;
      *) printf ' %s' "$word" ;;
    esac
  done
}

run() { # NAME [--to FILE | --makes FILE] COMMAND …: --to also writes the output to FILE; an existing FILE is not remade
  current=$1
  shift
  local file="" how=""
  case "$1" in
    --to | --makes)
      how=$1 file=$2
      shift 2
      ;;
  esac
  local left=0 i
  for ((i = number; i < total; i++)); do left=$((left + guesses[i])); done
  [ "$guessed" -lt 10 ] || left=$((left * spent / guessed))
  number=$((number + 1))
  printf '\n[%d/%d] %s, %s so far, about %s to go\n' "$number" "$total" "$current" "$(clock $((SECONDS - begun)))" "$(clock $left)"
  step_begun=$SECONDS
  if [ "$how" = --to ]; then
    printf '%s > %s\n' "$(shown "$@")" "$file"
  else
    printf '%s\n' "$(shown "$@")"
  fi
  if [ -n "$how" ] && [ -s "$file" ]; then
    echo "$file is complete"
  elif [ "$how" = --to ]; then
    "$@" | tee "$file.partial"
    mv "$file.partial" "$file"
  else
    "$@"
  fi
  note_seconds 0
  local took=$((SECONDS - step_begun)) guess=${guesses[number - 1]}
  if [ $((took * 5)) -ge "$guess" ]; then # otherwise it was already complete
    guessed=$((guessed + guess))
    spent=$((spent + took))
  fi
  current=
}
