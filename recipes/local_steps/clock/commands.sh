# What measured the CSV files beside this file, in this folder, on Linux as root with iproute2.
pip install 'opentelemetry-api>=1.39' 'opentelemetry-sdk>=1.39' 'opentelemetry-exporter-otlp-proto-http>=1.39'
pip install --no-deps torchft==0.2.0

# entry NAME STEPS STRATEGY H DELAY [OVERRIDES [OUTER [MIX]]]: a training with H local steps.
entry() {
  echo "{name: $1, trainer.max_steps: $2, strategy: $3, strategy.local_steps: {_target_: lightning_dear.local_steps.LocalSteps,\
 every: $4, fragments: 4, delay: $5, mix: ${8:-0.5}${7:+, outer: $7}}${6:+, $6}}"
}
int8='strategy.compressor: int8'
published='{_target_: torch.optim.SGD, _partial_: true, lr: 0.7, momentum: 0.9, nesterov: true}'

gpt() { python -m lightning_dear.apps.converge experiment=converge_local_steps '~buckets.layer-wise' model.net.std=0.02 seeds=[1,2] "$@"; }
digits() {
  python -m lightning_dear.apps.converge experiment=converge_digits '~buckets.layer-wise' data.batch_size=16 tuning_seeds=[] \
    reference_lr_factors=[1] lr_factors=[1] dense_shares=[0] "$@"
}

# 1. How many steps each needs: on this machine without links, a few minutes. Losses are the same as on the link.
for lr in 1e-3 1.5e-3 2e-3 3e-3 6e-3; do
  gpt model.net.width=136 optimizer.lr=$lr hydra.run.dir=outputs/steps_$lr entries="[{name: ddp, strategy: ddp, trainer.max_steps: 192}]"
done
gpt model.net.width=136 optimizer.lr=1.5e-3 hydra.run.dir=outputs/steps_1.5e-3 entries="[\
$(entry 'int8 32' 352 dear 32 4 "$int8"),$(entry 'int8 32 delay 6' 352 dear 32 6 "$int8"),\
$(entry 'int8 16' 336 dear 16 4 "$int8"),$(entry 'int8 16 delay 7' 336 dear 16 7 "$int8"),$(entry 'int8 16 delay 2' 320 dear 16 2 "$int8"),\
$(entry 'int8 16 momentum 0' 336 dear 16 4 "$int8" '{_target_: torch.optim.SGD, _partial_: true, lr: 1}'),\
$(entry 'int8 8 delay 3' 272 dear 8 3 "$int8"),$(entry 'int8 8' 288 dear 8 6 "$int8"),\
$(entry 'int8 16 published' 320 dear 16 4 "$int8" "$published"),$(entry 'int8 16 published 304' 304 dear 16 4 "$int8" "$published"),\
$(entry 'none 32 published' 352 dear 32 7 '' "$published"),$(entry 'none 32 published 336' 336 dear 32 7 '' "$published"),\
$(entry 'none 16 published' 320 dear 16 3 '' "$published"),$(entry 'none 64 published' 416 dear 64 15 '' "$published"),$(entry 'none 64 published 384' 384 dear 64 15 '' "$published"),\
$(entry 'int8 32 mix 0.125' 352 dear 32 4 "$int8" '' 0.125),$(entry 'int8 16 mix 0.25' 320 dear 16 4 "$int8" '' 0.25)]"
digits cluster.devices=4 seeds=[1,2,3] hydra.run.dir=outputs/steps_digits entries="[{name: ddp, strategy: ddp, trainer.max_steps: 45},\
$(entry 'int8 8' 64 dear 8 3 "$int8"),$(entry 'int8 16' 80 dear 16 3 "$int8"),$(entry 'int8 16 delay 6' 80 dear 16 6 "$int8"),$(entry 'int8 32' 96 dear 32 4 "$int8")]"

# 2. By the clock: a step computes 0.3 s (0.28 s in DDP's GPT run: a fixed sleep). Ended after the first seed of each entry.
link=(cluster=emulated cluster.num_hosts=4 cluster.rate_mbit=5 cluster.delay_ms=50 curve_steps=1
  model.net._target_=padded.padded +model.net.seconds=0.3)
wire_gpt() {
  gpt "${link[@]}" cluster.devices=1 +model.net.network=lightning_dear.workloads.nets.GPT model.net.width=136 optimizer.lr=1.5e-3 \
    entries="[$1]"
}
wire_digits() { digits "${link[@]}" +model.net.network=lightning_dear.workloads.nets.ResNet seeds=[1,2] entries="[$1]"; }
wire_gpt '{name: ddp 192, strategy: ddp, trainer.max_steps: 192}' # 35 minutes
wire_gpt "$(entry 'int8 16 published' 320 dear 16 4 "$int8" "$published")"
wire_gpt "$(entry 'int8 16' 320 dear 16 4 "$int8" '' 0.25)" # on an Intel Xeon
wire_gpt "$(entry 'int8 32' 352 dear 32 4 "$int8")"
wire_gpt "$(entry 'torchft 32 published' 352 torchft 32 7 '' "$published")"
wire_gpt "$(entry 'torchft 64 published' 416 torchft 64 15 '' "$published")"
wire_gpt "$(entry 'torchft 16 published' 96 torchft 16 3 '' "$published")"
wire_digits '{name: ddp 12, strategy: ddp, trainer.max_steps: 12}'
wire_digits "$(entry 'int8 8' 64 dear 8 3 "$int8")"
wire_digits "$(entry 'int8 16' 80 dear 16 3 "$int8")"

# At 100 Mb/s without delay: seconds a step.
link=("${link[@]/rate_mbit=5/rate_mbit=100}")
link=("${link[@]/delay_ms=50/delay_ms=0}")
wire_gpt "{name: ddp 48, strategy: ddp, trainer.max_steps: 48},{name: int8 48, strategy: dear, trainer.max_steps: 48, $int8},\
$(entry 'published 32' 64 dear 32 0 '' "$published")"

# 3. seconds.csv: train_s of each raw.csv, and loss and step of its seed 1. Of DDP, which ran before train_s left out the
# set-up: when its last loss was there, and one more step. loss_over_time.csv: means of 8 steps. The picture:
python - <<'PICTURE'
import csv
from pathlib import Path

import numpy as np

from lightning_dear.studies.plot import picture

rows = [row for row in csv.DictReader(open("loss_over_time.csv")) if row["model"] == "gpt"]
ends = {row["entry"]: row for row in csv.DictReader(open("seconds.csv"))}
with picture(Path("clock.png"), [10]) as (axis,):
    for entry in dict.fromkeys(row["entry"] for row in rows):
        own = np.array([[float(row["time_s"]), float(row["train_loss"])] for row in rows if row["entry"] == entry])
        means = np.convolve(own[:, 1], np.ones(3) / 3, "valid")
        (line,) = axis.plot(own[2:, 0], means, linewidth=1, label=entry)
        if int(ends[entry]["steps"]) > 96:
            axis.plot(float(ends[entry]["seconds"]), float(ends[entry]["metric"]), "o", color=line.get_color())
    axis.axhline(float(ends["ddp 192"]["metric"]), color="black", linewidth=0.8, linestyle="--", label="DDP's loss")
    axis.set(xscale="log", xlim=(10, 3000), ylim=(3.6, 2.2), xlabel="seconds since the first step began", ylabel="loss")
PICTURE
