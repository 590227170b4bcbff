# cpu63: prompt steps on one H200 with padding rows that point to the step's last token (new), and to the last real one
# (old); then the fitted costs of a host tier, which are now measured on prompts instead of padding. Results under $OUT.
export PYTHONUNBUFFERED=1 PYTHONPATH=$PWD
PY=$([ -x .venv/bin/python ] && echo .venv/bin/python || echo python3)
RUN="$PY -m bench.step --commit x --only ttft --prompts 100 512 3000 --config bench/shapes/qwen3-4b/config.json"
timeout 45 $RUN --output $OUT/new.json > $OUT/new.log 2>&1; tail -3 $OUT/new.log
cp jaxinfer/exec/step/batch.py $OUT/batch.py
sed -i 's/jnp.where(is_row, starts\[1:\], bucket.num_prefill_tokens)/jnp.maximum(starts[1:], 1)/' jaxinfer/exec/step/batch.py
timeout 45 $RUN --output $OUT/old.json > $OUT/old.log 2>&1; tail -3 $OUT/old.log
cp $OUT/batch.py jaxinfer/exec/step/batch.py
timeout 40 $PY -m jaxinfer generate --model bench/shapes/qwen3-4b/config.json --load-format dummy --skip-tokenizer-init \
    --kv-offloading-size 4 --max-tokens 2 --no-chat "1 2 3" > $OUT/tiers.log 2>&1; grep "host tier" $OUT/tiers.log
