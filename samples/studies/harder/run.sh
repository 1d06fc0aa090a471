#!/bin/sh
# Makes the rows again, into the folder of the first argument (default: ./again): about 11 minutes of CPU time for
# `harder`, 4 for natural backdrops, 7 for centres of 32 bits, 3 for `decay`, 14 for `order`, 20 for `time`, at most 22
# for `hour`, 15 for its middle, 6 for the full cache over an hour, 30 for `long-budget`, 28 for
# the shared past. The same command
# continues an interrupted run. Each part first says how long it will take.
set -eu
root=$(cd "$(dirname "$0")/../../.." && pwd)
out=${1:-again}
mkdir -p "$out"
worlds() {
  PYTHONPATH="$root" python -m samples.worlds "$@"
}
replay() {
  worlds "$@" --dry-run
  worlds "$@" --json > /dev/null
}
replay harder -o "$out/harder.jsonl"
replay harder --memory last-frames --budget 18 -o "$out/last.jsonl"
replay harder --backdrop natural --worlds 5002500:16 --budget 173,43,22 \
  --memory full,durable,infinipot-v,sliding-window,first-tokens,random -o "$out/natural.jsonl"
replay harder --memory durable --set center_bits=32 -o "$out/bits.jsonl"
replay harder --backdrop natural --worlds 5002500:16 --budget 173,43,22 --memory durable \
  --set center_bits=32 -o "$out/bits-natural.jsonl"
what_else=samples.studies.harder.ablation:DroppedConfig,samples.studies.harder.ablation:CountedConfig
replay harder --memory $what_else --budget 11 --worlds 5002000:12 -o "$out/ablation.jsonl"
replay harder --backdrop natural --worlds 5002500:6 --budget 22 --memory $what_else -o "$out/ablation-natural.jsonl"
replay time --budget 22 --worlds 5002724:6 --memory $what_else -o "$out/ablation-time.jsonl"
replay decay -o "$out/decay.jsonl"
replay hour -o "$out/hour.jsonl"
replay hour --before 30m --delays 0,10m,28m -o "$out/hour-middle.jsonl"
replay hour --memory full -o "$out/hour-full.jsonl"
replay long-budget -o "$out/long-budget.jsonl"
replay long-budget --memory full --before 1m --length 200 --delays 0,2m -o "$out/long-budget-alone.jsonl"
replay long-budget --length 11130 --before 165m --memory durable,sliding-window,infinipot-v --set positions=compact \
  --set infinipot-v.kept_share=0.95 --set infinipot-v.redundancy_share=1 --set infinipot-v.recent_share=0.125 \
  -o "$out/long-budget-100.jsonl"
replay long-budget --worlds 5004000:2 --length 22230 --before 350m --memory durable --set positions=compact \
  -o "$out/long-budget-200.jsonl"
replay long-budget --budget 311 --memory durable,infinipot-v --set positions=compact --set infinipot-v.kept_share=0.95 \
  --set infinipot-v.redundancy_share=1 --set infinipot-v.recent_share=0.125 -o "$out/long-budget-311.jsonl"
for seed in 5004091 5004192 5004347 5004363 5004379 5004398 5004580 5004611; do
  replay long-budget --memory full --before 1m --length 200 --delays 0,2m --worlds "$seed:1" -o "$out/shared-past-alone.jsonl"
done
PYTHONPATH="$root" python "$root/samples/studies/harder/shared_past.py" "$out/shared-past.jsonl" "$out/shared-past"
replay order -o "$out/order.jsonl"
replay time -o "$out/time.jsonl"
worlds --report "$out/harder.jsonl"
