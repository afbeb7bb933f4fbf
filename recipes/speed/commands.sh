# What measured the folders beside this file, one command each; each writes into outputs/FOLDER.
# Linux with iproute2, as root, two cores with nothing else running. dear-bench must be on the path.

# One dear-bench a layout and rate was run, into outputs/hosts/LAYOUT-RATE/bench; this makes all six.
dear-bench cluster=emulated optimizer=sgd_plain model.profile=bert_base model.scale=80 model.compute_s=1.2 \
  rounds=2 steps=4 warm_up_steps=3 hydra.run.dir=outputs/hosts \
  entries='[ddp,ddp_bf16,fsdp2,dear_paper,dear,{name: bf16, strategy: dear, compressor: bf16},{name: int8, strategy: dear, compressor: int8},{name: topk, strategy: dear, compressor: topk, compressor.density: 0.01},{name: oktopk, strategy: dear, compressor: oktopk}]' \
  points='[{cluster.num_hosts: 4, cluster.rate_mbit: 31.25},{cluster.num_hosts: 4, cluster.rate_mbit: 125},{cluster.num_hosts: 2, cluster.ranks_per_host: 2, cluster.rate_mbit: 31.25},{cluster.num_hosts: 2, cluster.ranks_per_host: 2, cluster.rate_mbit: 125},{cluster.num_hosts: 2, cluster.ranks_per_host: 4, cluster.rate_mbit: 31.25},{cluster.num_hosts: 2, cluster.ranks_per_host: 4, cluster.rate_mbit: 125}]'

# What dear-plan is told of them: int8 at both rates, bf16 and topk at 125 Mb/s.
for hosts in 4:1 2:2 2:4; do for how in 31.25:int8 125:int8 125:bf16 125:topk; do
  dear-plan calibrate experiment=replay optimizer=sgd_plain model.profile=bert_base model.scale=80 model.compute_s=1.2 \
    cluster=emulated cluster.num_hosts=${hosts%:*} cluster.ranks_per_host=${hosts#*:} cluster.rate_mbit=${how%:*} \
    compressor=${how#*:} hydra.run.dir=outputs/hosts/${hosts%:*}x${hosts#*:}-${how%:*}/${how#*:}
done; done
python -m tests.benchmarks.hosts_accuracy recipes/speed/hosts/*

OMP_NUM_THREADS=1 dear-bench warm_up_steps=5 cluster=emulated cluster.num_hosts=2 cluster.rate_mbit=1000 \
  rounds=5 steps=15 hydra.run.dir=outputs/real_digits model=resnet data=digits \
  entries='[ddp,ddp_zero,fsdp2,{name: dear, strategy: dear, fusion: small},dear_auto]'

OMP_NUM_THREADS=1 dear-bench warm_up_steps=5 cluster=emulated cluster.num_hosts=2 cluster.rate_mbit=1000 \
  rounds=4 steps=8 hydra.run.dir=outputs/real_gpt model=gpt data=source_corpus optimizer=adamw \
  entries='[ddp,ddp_zero,fsdp2,dear,dear_auto]'

OMP_NUM_THREADS=1 dear-bench warm_up_steps=5 cluster=emulated cluster.num_hosts=2 cluster.rate_mbit=1000 \
  rounds=4 steps=8 hydra.run.dir=outputs/real_mlp model=mlp data=digits \
  entries='[ddp,ddp_zero,fsdp2,dear,dear_auto]'

dear-bench cluster=emulated cluster.num_hosts=4 cluster.rate_mbit=125 model.scale=20 optimizer=sgd_plain \
  rounds=2 steps=4 warm_up_steps=3 grid_rounds=1 grid_steps=3 hydra.run.dir=outputs/five_p4_2500 \
  entries='[ddp,{name: ddp_tuned, strategy: ddp_tuned, grid: {strategy.bucket_cap_mb: [4, 8, 16, 25]}},ddp_zero,fsdp2,wfbp,mgwfbp,dear_paper,dear,dear_grid,dear_auto]' \
  sweep='{model.profile: [resnet50, densenet201, inception_v4, bert_base, bert_large]}'

dear-bench cluster=emulated cluster.num_hosts=8 cluster.rate_mbit=125 model.scale=20 optimizer=sgd_plain \
  rounds=2 steps=4 warm_up_steps=3 grid_rounds=1 grid_steps=3 hydra.run.dir=outputs/five_p8_2500 \
  entries='[ddp,{name: ddp_tuned, strategy: ddp_tuned, grid: {strategy.bucket_cap_mb: [4, 8, 16, 25]}},ddp_zero,fsdp2,wfbp,mgwfbp,dear_paper,dear,dear_auto]' \
  sweep='{model.profile: [resnet50, densenet201, inception_v4, bert_base, bert_large]}'

dear-bench warm_up_steps=5 cluster=emulated cluster.num_hosts=4 cluster.rate_mbit=1000 model.scale=10 optimizer=sgd_plain \
  rounds=2 steps=5 hydra.run.dir=outputs/five_models \
  entries='[ddp,ddp_tuned,ddp_zero,fsdp2,wfbp,mgwfbp,dear_paper,dear,dear_grid,dear_auto]' \
  sweep='{model.profile: [resnet50, densenet201, inception_v4, bert_base, bert_large]}'

dear-bench warm_up_steps=5 cluster=emulated cluster.num_hosts=8 cluster.rate_mbit=500 model.scale=20 optimizer=sgd_plain \
  rounds=2 steps=5 hydra.run.dir=outputs/five_p8 entries='[ddp,dear,dear_auto]' \
  sweep='{model.profile: [resnet50, densenet201, bert_base]}'

# The tables of docs/clusters.md, on hosts of several ranks; ratio=50 on the link of 1 Gb/s.
dear-bench cluster=emulated cluster.num_hosts=2 cluster.ranks_per_host=2 cluster.rate_mbit=100 model.profile=bert_base \
  model.scale=16 ratio=10 optimizer=sgd_plain rounds=3 steps=3 warm_up_steps=3 \
  entries='[ddp,dear,{name: int8 1 hop, strategy: dear, compressor: int8, strategy.hops: 1},{name: int8, strategy: dear, compressor: int8}]'

dear-bench cluster=emulated cluster.num_hosts=2 cluster.ranks_per_host=4 cluster.rate_mbit=200 model.profile=bert_base \
  model.scale=4 ratio=10 optimizer=sgd_plain rounds=3 steps=3 warm_up_steps=3 \
  entries='[ddp_bf16,dear,{name: int8, strategy: dear, compressor: int8}]'
