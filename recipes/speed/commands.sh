# What measured the folders beside this file, one command each; each writes into outputs/FOLDER.
# Linux with iproute2, as root, two cores with nothing else running. dear-bench must be on the path.

dear-bench cluster=emulated cluster.num_hosts=2 cluster.rate_mbit=125 model.profile=bert_base model.scale=8 \
  optimizer=sgd_plain rounds=2 steps=5 warm_up_steps=3 hydra.run.dir=outputs/bert_1gbit_p2 \
  entries='[ddp,dear_paper,dear,dear_auto]' sweep='{ratio: [0.5, 1, 1.33, 2, 4]}'

dear-bench cluster=emulated cluster.num_hosts=4 cluster.rate_mbit=125 model.profile=bert_base model.scale=8 \
  optimizer=sgd_plain rounds=2 steps=5 warm_up_steps=3 hydra.run.dir=outputs/bert_1gbit_p4 \
  entries='[ddp,dear_paper,dear,dear_auto]' sweep='{ratio: [0.5, 1, 1.33, 2, 4]}'

dear-bench cluster=emulated cluster.num_hosts=2 cluster.rate_mbit=25 model.profile=bert_base model.scale=8 \
  optimizer=sgd_plain rounds=1 steps=4 warm_up_steps=3 hydra.run.dir=outputs/bert_200mbit_p2 \
  entries='[ddp,dear_paper,dear,dear_mergecomp]' sweep='{ratio: [0.5, 1, 1.33, 2, 4]}'

dear-bench cluster=emulated cluster.num_hosts=4 cluster.rate_mbit=25 model.profile=bert_base model.scale=8 \
  optimizer=sgd_plain rounds=1 steps=4 warm_up_steps=3 hydra.run.dir=outputs/bert_200mbit_p4 \
  entries='[ddp,dear_paper,dear,dear_mergecomp]' sweep='{ratio: [0.5, 1, 1.33, 2, 4]}'

dear-bench warm_up_steps=5 cluster=emulated cluster.num_hosts=2 cluster.rate_mbit=1000 model.profile=bert_base model.scale=8 \
  optimizer=sgd_plain rounds=2 steps=6 hydra.run.dir=outputs/bert_p2 \
  entries='[ddp,dear_paper,dear,dear_auto]' sweep='{ratio: [0.5, 1, 1.33, 2, 4]}'

dear-bench warm_up_steps=5 cluster=emulated cluster.num_hosts=4 cluster.rate_mbit=1000 model.profile=bert_base model.scale=8 \
  optimizer=sgd_plain rounds=2 steps=6 hydra.run.dir=outputs/bert_p4 \
  entries='[ddp,dear_paper,dear,dear_auto]' sweep='{ratio: [0.5, 1, 1.33, 2, 4]}'

dear-bench warm_up_steps=5 cluster=emulated cluster.num_hosts=2 cluster.rate_mbit=1000 model.profile=resnet50 model.scale=2 \
  optimizer=sgd_plain rounds=2 steps=6 hydra.run.dir=outputs/resnet_p2 \
  entries='[ddp,dear_paper,dear,dear_auto]' sweep='{ratio: [1, 1.33]}'

dear-bench warm_up_steps=5 cluster=emulated cluster.num_hosts=2 model.profile=bert_base ratio=1.33 optimizer=sgd_plain \
  rounds=2 steps=6 hydra.run.dir=outputs/two_scales entries='[ddp,dear]' \
  points='[{model.scale: 8, cluster.rate_mbit: 1000}, {model.scale: 16, cluster.rate_mbit: 500}]'

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
