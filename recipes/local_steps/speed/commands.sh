# What measured the CSV files beside this file, on Linux as root with iproute2. dear-bench must be on the path.
pip install 'opentelemetry-api>=1.39' 'opentelemetry-sdk>=1.39' 'opentelemetry-exporter-otlp-proto-http>=1.39'
pip install --no-deps torchft==0.2.0

# local_steps NAME STRATEGY H DELAY [OVERRIDES]: an entry with H local steps.
local_steps() {
  echo "{name: $1, strategy: $2, strategy.local_steps: {_target_: lightning_dear.local_steps.LocalSteps, every: $3, fragments: 4, delay: $4}${5:+, $5}}"
}
bench() {
  dear-bench cluster=emulated cluster.num_hosts=4 cluster.rate_mbit=5 cluster.delay_ms=50 model.profile=bert_base \
    model=replay model.scale=115 model.compute_s=0.3 model.gradient_seed=1 optimizer=adamw warm_up_steps=3 "$@"
}

# Ended after four rounds: 25 minutes.
bench hydra.run.dir=outputs/speed rounds=6 steps=8 entries="[{name: ddp, strategy: ddp, strategy.bucket_cap_mb: null, rounds: 3},\
$(local_steps 'int8 32' dear 32 6 'compressor: int8'),$(local_steps 'torchft 32' torchft 32 7),\
$(local_steps 'none 64' dear 64 14),$(local_steps 'torchft 64' torchft 64 15),\
$(local_steps 'int8 32 delay 4' dear 32 4 'compressor: int8, rounds: 2'),$(local_steps 'torchft 32 delay 4' torchft 32 4 'rounds: 1')]"

# Shorter rounds. Ended in the second round, after 9 minutes.
bench hydra.run.dir=outputs/sweep rounds=3 steps=32 entries="[$(local_steps 'int8 16' dear 16 7 'compressor: int8'),\
$(local_steps 'torchft 16' torchft 16 3),$(local_steps 'int8 8' dear 8 6 'compressor: int8'),\
$(local_steps 'torchft 8' torchft 8 1),$(local_steps 'none 32' dear 32 14),$(local_steps 'torchft 32' torchft 32 7 'rounds: 1')]"

# One bucket, or one a fragment: caps are divided by model.scale. 5 minutes.
bench hydra.run.dir=outputs/whole rounds=1 steps=3 entries="[{name: ddp whole, strategy: ddp, strategy.bucket_cap_mb: 2875},\
$(local_steps 'none 32 whole' dear 32 14 'fusion.bucket_cap_mb: 2875'),\
$(local_steps 'int8 32 whole' dear 32 6 'compressor: int8, fusion.bucket_cap_mb: 2875'),\
$(local_steps 'none 64 whole' dear 64 14 'fusion.bucket_cap_mb: 2875')]"
