# What measured the folders beside this file; each command writes into outputs/FOLDER.
# Linux with iproute2, as root, two cores with nothing else running. dear-bench must be on the path.

dear-bench cluster=emulated cluster.num_hosts=2 optimizer=sgd_plain rounds=1 steps=12 warm_up_steps=4 grid_rounds=1 grid_steps=3 num_batches=32 hydra.run.dir=outputs/a2 \
  entries='[ddp,wfbp,mgwfbp,fsdp2,dear,{name: oktopk, strategy: dear, compressor: oktopk, model.gradient_seed: 1, model.quick_batches: 66, warm_up_steps: 70},{name: ddp_tuned, strategy: ddp_tuned, grid: {strategy.bucket_cap_mb: [8, 100]}}]' \
  points='[{cluster.rate_mbit: 100, model.profile: resnet50, model.scale: 16},{cluster.rate_mbit: 1000, model.profile: resnet50, model.scale: 16},{cluster.rate_mbit: 100, model.profile: bert_base, model.scale: 64},{cluster.rate_mbit: 1000, model.profile: bert_base, model.scale: 64}]'

dear-bench cluster=emulated cluster.num_hosts=2 optimizer=sgd_plain rounds=1 steps=12 warm_up_steps=4 grid_rounds=1 grid_steps=3 num_batches=32 hydra.run.dir=outputs/b2 \
  entries='[ddp,wfbp,mgwfbp,fsdp2,dear,{name: oktopk, strategy: dear, compressor: oktopk, model.gradient_seed: 1, model.quick_batches: 66, warm_up_steps: 70}]' \
  points='[{cluster.rate_mbit: 100, model.profile: densenet201, model.scale: 16},{cluster.rate_mbit: 1000, model.profile: densenet201, model.scale: 16},{cluster.rate_mbit: 100, model.profile: inception_v4, model.scale: 32},{cluster.rate_mbit: 1000, model.profile: inception_v4, model.scale: 32},{cluster.rate_mbit: 100, model.profile: bert_large, model.scale: 128},{cluster.rate_mbit: 1000, model.profile: bert_large, model.scale: 128}]'

for model in resnet50:16 bert_base:64 densenet201:16 bert_large:128; do for ranks in 2 4; do for rate in 100 1000; do
  dear-plan calibrate experiment=replay model.profile=${model%:*} model.scale=${model#*:} cluster=emulated cluster.num_hosts=$ranks cluster.rate_mbit=$rate \
    hydra.run.dir=outputs/${model%:*}_p${ranks}_$rate
done; done; done
files=$(cd recipes/simulator/calibrated; for file in *.yaml; do echo "${file##*_}:${file%_p*}=recipes/simulator/calibrated/$file"; done | sed 's/[.]yaml:/:/')
python -m tests.benchmarks.simulator_accuracy recipes/simulator/{a2,a4,a8,b2,b4,b8,r2,r4} --clusters $files

OMP_NUM_THREADS=1 dear-plan calibrate cluster=emulated cluster.num_hosts=2 cluster.rate_mbit=1000 model=resnet data=digits hydra.run.dir=outputs/calibrated_digits
dear-plan --config-dir=outputs/calibrated_digits cluster=measured profile=outputs/calibrated_digits/model.json strategies='[ddp,fsdp2,dear]' world_sizes='[2]'

OMP_NUM_THREADS=1 dear-bench warm_up_steps=5 cluster=emulated cluster.num_hosts=2 cluster.rate_mbit=1000 rounds=2 steps=12 hydra.run.dir=outputs/real_digits \
  entries='[ddp,fsdp2,dear]' model=resnet data=digits

python -m tests.benchmarks.nccl_cross_check --csv rows.csv
