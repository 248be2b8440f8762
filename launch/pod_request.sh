#!/usr/bin/env bash
# Request, watch and delete a pod for launch/tpu_pod.sh: launch/pod_request.sh --help.
# shellcheck disable=SC2034,SC2154  # the variables are launch/tpu_pod.sh's
set -euo pipefail

if [ "${BASH_SOURCE[0]}" = "$0" ]; then
  cat <<'TEXT'
usage: launch/pod_request.sh is read by launch/tpu_pod.sh

Requests a pod, waits for it and deletes it. A request carries the label jaxlm_run, a hash of the run. An existing
request is used if it has the label of this run. Before every deletion the label is read again, and a pod without it is
not deleted. If a request disappears that this launcher has not deleted, somebody else deleted it: the launcher ends and
requests nothing.
TEXT
  exit 0
fi

mine=''  # the label of the run; without --run the label of the existing request
held=''  # set while a request is known to exist and this launcher has not deleted it
ready='' # set once the pod has been seen with all its nodes
made=''  # set once this launcher has made a request
asked='' # since when a request may have been made although gcloud failed
[ -z "$run" ] || mine=$(git hash-object --stdin <<<"$run")

# Read the state of the request (ACTIVE, WAITING_FOR_RESOURCES, SUSPENDED, FAILED ...), its fields and its label. Two
# versions of the interface name the count and the prefix of the nodes differently.
ask() {
  local spec='tpu.nodeSpec[0]' fields
  fields="state.state,$spec.node.labels.jaxlm_run,$spec.node.acceleratorType,$spec.nodeId"
  fields+=",$spec.multisliceParams.nodeIdPrefix,$spec.multiNodeParams.nodeIdPrefix"
  fields+=",$spec.multisliceParams.nodeCount,$spec.multiNodeParams.nodeCount"
  IFS=, read -r state label kind node prefix other_prefix count other_count <<<"$(
    described queued-resources "$name" "value[separator=\",\"]($fields)"
  )"
  state=${state:-UNKNOWN}
  case "$state" in
    UNKNOWN) ;;
    NONE) exists='' ;;
    *) if [ -n "$mine" ] && ours; then exists=does; fi ;;
  esac
}

ours() { [ -n "$label" ] && [ "$label" = "$mine" ]; }

# Fail for a pod that was not made for this run, or that differs from the current flags.
check_pod() {
  local named=${node:-${prefix:-$other_prefix}} size=${count:-${other_count:-1}}
  [ -n "$label" ] ||
    fail "--name must be free or that of a pod made by this launcher, got $name, which has no label jaxlm_run; choose another name, or delete that pod with gcloud"
  mine=${mine:-$label}
  ours || fail "--run must be the run that pod $name was made for, got $run; choose another --name"
  [ "$command" = create ] || return 0
  case "$kind $size" in
    "$type $slices" | " $size") ;; # or the type is missing from gcloud's answer
    *) fail "pod $name exists with $size x $kind, not $slices x $type: delete it, or choose another --name" ;;
  esac
  [ "${named:-$name}" = "$name" ] ||
    fail "pod $name exists with the node $named, not $name: choose another --name"
}

gone() { code=1 fail "pod $name was deleted, or given back by another launcher; no new one is requested"; }

# Read the request, and end if it must not be followed, or no longer.
look() {
  ask
  case "$state" in
    NONE) [ -z "$held" ] || gone ;;
    UNKNOWN) ;;
    *)
      if [ -z "$held$made$ready" ]; then
        check_pod
        held=1
      fi
      ours || code=1 fail "pod $name now belongs to another request; it is left alone"
      ;;
  esac
}

# drop [STATE]: delete the request if it is still ours and still in STATE. Fails if it may still exist.
drop() {
  if [ -z "$dry" ]; then
    ask
    case "$state" in
      NONE) return 0 ;;
      UNKNOWN) cat "$scratch/said" >&2 && return 1 ;;
    esac
    { ours && [ "$state" = "${1:-$state}" ]; } || return 0
    held=''
  fi
  exists=${exists:+may}
  if queued delete "$name" --quiet --force 2>"$scratch/said"; then
    exists=''
    return
  fi
  cat "$scratch/said" >&2
  ! grep -q NOT_FOUND "$scratch/said" || held=1 # somebody else deleted it first
  return 1
}

# Tell other launchers on this machine, one of which may be without a pod at this moment, not to request one.
mark_deleted() { mkdir -p "${deleted%/*}" && touch "$deleted" || true; }

give_back() {
  local since
  since=$(now)
  held=''
  until drop; do
    [ "$command" = create ] && [ $(($(now) - since)) -lt "$patience" ] ||
      code=1 fail "pod $name was not deleted (gcloud says why above): it may still cost money; launch/tpu_pod.sh delete"
    sleep "$poll"
  done
}

request() {
  local flags=(--accelerator-type "$type" --runtime-version "$image")
  if [ "$slices" -gt 1 ]; then
    flags+=(--node-prefix "$name" --node-count "$slices")
  else
    flags+=(--node-id "$name")
  fi
  [ "$tier" = 'on demand' ] || flags+=("--$tier")
  say "asking for $slices x $type, $tier: THIS COSTS MONEY from the moment it is ACTIVE until it is deleted"
  exists=may
  queued create "$name" "${flags[@]}" --labels "jaxlm_run=$mine"
}

refusals=0 # consecutive refused or failed requests since the pod was last ready

# refused MESSAGE ADVICE: count a refused request. The first request is not retried, later ones are, with back-off.
refused() {
  [ -n "$ready" ] || code=1 fail "$1: $2"
  refusals=$((refusals + 1))
  [ "$refusals" -le "$retries" ] || code=1 fail "$1, $refusals times: $2"
  say "$1; it will be repeated"
  sleep $((poll << (refusals < 7 ? refusals : 7)))
}

# Request the pod if it does not exist, and wait until it is ready.
obtain() {
  local found last=''
  if [ -n "$dry" ]; then
    request
    return
  fi
  while :; do
    look
    if [ "$deleted" -nt "$scratch/begun" ]; then # also if it was touched between the check and the request
      give_back
      gone
    fi
    if [ -n "$asked" ] && [ "$state" != UNKNOWN ] && [ "$state" != NONE ]; then
      asked='' made=1 held=1 # its answer was lost
    fi
    [ "$state" = "$last" ] || say "pod $name: $state"
    last=$state
    case "$state" in
      UNKNOWN)
        [ -n "$held$made$ready$asked" ] || code=1 fail "gcloud cannot read the state of pod $name: $(tail -n 1 "$scratch/said")"
        [ -z "$asked" ] || [ $(($(now) - asked)) -lt "$patience" ] ||
          code=1 fail "gcloud cannot tell whether the request was made: $(tail -n 1 "$scratch/said"); pod $name may exist and cost money: ${delete_line% }"
        ;;
      NONE)
        if [ -z "$asked" ]; then
          if request; then made=1 held=1; else asked=$(now); fi
          continue
        elif [ $(($(now) - asked)) -ge "$poll" ]; then # asked twice, as it may appear late
          asked=''
          refused "the request was refused (gcloud gives the reason above)" "correct it, or request the quota"
          continue
        fi
        ;;
      ACTIVE)
        found=$(state_of_nodes)
        case "$found" in
          READY)
            ready=1 refusals=0 held=1
            return
            ;;
          PREEMPTED | TERMINATED | STOPPED | NONE)
            [ "$found" != NONE ] || [ -n "$made$ready" ] ||
              fail "pod $name is ACTIVE without its node ${nodes[0]}; check it, then launch/tpu_pod.sh delete"
            say "pod $name: $found, so it is given back"
            ready=1
            drop ACTIVE || true # the next iteration checks it again
            ;;
        esac
        ;;
      SUSPENDED)
        ready=1
        drop SUSPENDED || true
        ;;
      FAILED)
        refused "the request failed" "gcloud compute tpus queued-resources describe $name ${place[*]} gives the reason; delete it and try again"
        drop FAILED || true
        ;;
    esac
    sleep "$poll"
  done
}
