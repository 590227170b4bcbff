#!/bin/bash
# Runs the mixers that no GPU has run yet, in three processes on one GPU: $1 is a folder for results.
out=${1:?folder}; mkdir -p "$out"
run() { timeout 145 .venv/bin/python -m bench.families "${@:2}" --gpu-memory-utilization 0.28 --output "$out/families_mixers_$1.json" >"$out/mixers_$1.log" 2>&1 & }
run a lfm2 mamba-codestral granite-4.0 opt-350m minicpm3 gemma-2-2b laguna longcat
run b falcon-mamba falcon-h1 ring-mini falcon-rw diffllama mimo-v2 jetmoe
run c minimax-text nemotron-nano llama-4-scout ling-3 jamba olmo-hybrid gemma-3n
wait
grep -h "median" "$out"/mixers_?.log
