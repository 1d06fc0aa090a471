#!/bin/sh
# Searches settings of each peer, and runs the studies with those that were found, into the folder of the first argument
# (default: ./again). InfiniPot-V: about 25 minutes of one CPU core for the search and as much for the studies; the other
# three: 45 and 35 minutes, of a core that did other work too. The same command continues an interrupted run.
set -eu
root=$(cd "$(dirname "$0")/../../.." && pwd)
out=${1:-again}
mkdir -p "$out"
worlds() {
  PYTHONPATH="$root" python -m samples.worlds "$@"
}
replay() {
  worlds "$@" --json > /dev/null
}
delay() {
  replay quick --length 7m --evidence 16s --before 0 --per-type 3 --distractor-rate 20 --cuts 6:20 "$@"
}
content=colour,shape,where,at,whether
# The search, on worlds that no table uses: the name of its files, the worlds of each kind, the settings.
search() {
  part=$1
  count=$2
  shift 2
  delay --worlds "7000000:$count" --delays 2m,400s --budget 151,38 -o "$out/search-delay-$part.jsonl" "$@"
  replay quick --worlds "7001000:$count" --length 8m --evidence 16s --per-type 3 --distractor-rate 20 \
    --distractor-similarity 0.5 --cuts 6:20 --delays 60,220 --budget 173,43 \
    -o "$out/search-harder-$part.jsonl" "$@"
}
# The first part finds two settings of InfiniPot-V, the second the third.
search 1 8 --memory infinipot-v --set kept_share=0.75,0.9,0.95 --set redundancy_share=0.5,0.75,1
search 2 8 --memory infinipot-v --set redundancy_share=1 --set kept_share=0.95,0.98 --set recent_share=0.05,0.125,0.5
search rekv 8 --memory rekv --types $content --set positions=compact,stream
search dycoke 8 --memory dycoke --types $content --set merge_share=0,0.25,0.5,0.6,0.7,0.8,0.9
# HERMES: the bands on half of the worlds, then the share that a compression keeps; the published and the best on all.
hermes() {
  count=$1 kept=$2 shallow=$3 deep=$4
  search hermes "$count" --memory hermes --types $content --set "kept_share=$kept" --set "shallow_share=$shallow" \
    --set "deep_share=$deep"
}
hermes 8 0.75 0.1 0.3
hermes 4 0.75 0 0,0.25,0.75,1
hermes 4 0.75 0.25 0.25,0.5,0.75
hermes 4 0.75 0.5 0.5
hermes 4 0.5,0.9,0.95 0 1
hermes 4 0.5,0.9 0.1 0.3
hermes 8 0.9 0 1
# The studies, on their own worlds: InfiniPot-V.
set -- --memory infinipot-v --set redundancy_share=1 --set kept_share=0.95 --set recent_share=0.125
delay --worlds 5000000:16 --delays 0,30s,2m,5m,400s --budget 151,75,38 -o "$out/delay.jsonl" "$@"
replay harder --budget 173,43,22,11 -o "$out/harder.jsonl" "$@"
replay harder --backdrop natural --worlds 5002500:16 --budget 173,43,22 \
  -o "$out/natural.jsonl" "$@"
replay order -o "$out/order.jsonl" "$@"
replay time --budget 173,43,22,11 -o "$out/time.jsonl" "$@"
# The others, at the longest delay, on the first eight worlds of each study.
others() {
  study=$1
  shift
  case $study in
    delay) delay --worlds 5000000:8 --delays 400s --types $content -o "$out/peers-delay.jsonl" "$@" ;;
    harder) set -- harder --worlds 5002000:8 --delays 220 "$@" ;;
    natural) set -- harder --backdrop natural --worlds 5002500:8 --delays 220 "$@" ;;
    order) set -- order --worlds 5002400:8 --delays 150 "$@" ;;
    time) set -- time --worlds 5002724:8 --delays 220 "$@" ;;
  esac
  [ "$study" = delay ] || replay -o "$out/peers-$study.jsonl" "$@"
}
best="--set kept_share=0.9 --set shallow_share=0 --set deep_share=1"
for settings in "" "$best"; do
  # shellcheck disable=SC2086
  others delay --memory hermes --budget 151,75,38 $settings
  for study in harder natural time; do
    # shellcheck disable=SC2086
    others $study --memory hermes --budget 173,43 $settings
  done
  # shellcheck disable=SC2086
  others order --memory hermes --budget 130,43 $settings
done
for study in harder natural order time; do
  # shellcheck disable=SC2086
  others $study --memory hermes --budget 22 $best
done
for study in harder time; do
  # shellcheck disable=SC2086
  others $study --memory hermes --budget 11 $best
done
others natural --memory rekv --budget 173,43
for study in harder natural time; do
  others $study --memory dycoke --budget 173
done
others order --memory dycoke --budget 130
