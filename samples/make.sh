#!/bin/sh
# Renders the three sample videos and writes their questions. The pictures depend on the seeds alone; the bytes of a
# file also depend on the version of the encoder.
set -eu
cd "$(dirname "$0")/.."
render="${PYTHON:-python3} -m samples.render"
$render --seed 705 --seconds 10 --rate 14 --cuts 4 6 -o samples/short/video.mp4 --questions samples/short/questions.jsonl
$render --seed 700 --seconds 60 --rate 4 --cuts 6 14 -o samples/minute/video.mp4 --questions samples/minute/questions.jsonl
$render --seed 700 --seconds 600 --evidence 4 --rate 6 --per-type 4 \
  -o samples/long/video.mp4 --questions samples/long/questions.jsonl
