# What measured the folders beside this file; each command writes into outputs/FOLDER.
# Linux with iproute2, as root, two cores with nothing else running. dear-bench must be on the path.

python -m tests.benchmarks.codecs --raw codecs.csv

dear-bench cluster=emulated cluster.num_hosts=4 cluster.rate_mbit=100 model.profile=resnet50 model.scale=20 \
  model.compute_s=0.15 optimizer=sgd_plain rounds=30 steps=6 warm_up_steps=3 hydra.run.dir=outputs/mergecomp_100mbit \
  sweep='{compressor: [topk,int8,fp16,efsignsgd,onebit,int4,dgc,qsgd,loco,bf16,signsgd,signum,terngrad,natural,randomk]}' \
  entries='[{name: exact, strategy: dear, fusion: mergecomp, tuning_steps: 60},{name: heuristic, strategy: dear, fusion: mergecomp_heuristic, tuning_steps: 14},{name: single, strategy: dear, fusion: single},{name: layerwise, strategy: dear, fusion: none, rounds: 5},{name: bf16, strategy: dear, compressor: bf16, rounds: 5}]'

python -m tests.benchmarks.claims outputs/mergecomp_100mbit --entry exact --others layerwise single heuristic

dear-bench cluster=emulated cluster.num_hosts=8 cluster.rate_mbit=100 model.profile=bert_base model.scale=4 ratio=5 \
  model.gradient_seed=1 num_batches=128 optimizer=sgd_plain rounds=5 steps=8 warm_up_steps=3 grid_rounds=1 grid_steps=1 \
  hydra.run.dir=outputs/oktopk_speed/p8_r5 \
  entries='[{name: oktopk, strategy: dear, compressor: oktopk, model.encoding_scale: 4, fusion.bucket_cap_mb: 120, warm_up_steps: 70, model.quick_batches: 68},{name: topka, strategy: dear, compressor: topka, model.encoding_scale: 4, fusion.bucket_cap_mb: 60, warm_up_steps: 70, model.quick_batches: 68},{name: gaussiank, strategy: dear, compressor: gaussiank, model.encoding_scale: 4, fusion.bucket_cap_mb: 60, warm_up_steps: 70, model.quick_batches: 68},{name: topkdsa, strategy: dear, compressor: topkdsa, model.encoding_scale: 4, fusion.bucket_cap_mb: 120, warm_up_steps: 40, model.quick_batches: 38, rounds: 2},{name: gtopk, strategy: dear, compressor: gtopk, model.encoding_scale: 4, fusion.bucket_cap_mb: 120, warm_up_steps: 40, model.quick_batches: 38, rounds: 2},{name: oktopk_uncharged, strategy: dear, compressor: oktopk, fusion.bucket_cap_mb: 120, warm_up_steps: 70, model.quick_batches: 68, rounds: 1},{name: bf16, strategy: dear, compressor: bf16, rounds: 1},{name: ddp, strategy: ddp, rounds: 1},{name: ddp_tuned, strategy: ddp_tuned, grid: {strategy.bucket_cap_mb: [10, 100]}, rounds: 1}]'

# The same with ratio=10 measured p8_r10; DDP's hook and dear beside it:
dear-bench cluster=emulated cluster.num_hosts=8 cluster.rate_mbit=100 model.profile=bert_base model.scale=4 ratio=10 \
  model.gradient_seed=1 num_batches=128 optimizer=sgd_plain rounds=1 steps=8 warm_up_steps=3 \
  hydra.run.dir=outputs/oktopk_speed/p8_r10_hook entries=[ddp,ddp_bf16,dear]

python -m tests.benchmarks.sparse_volumes --compressors oktopk --check --raw oktopk.csv
python -m tests.benchmarks.sparse_volumes --compressors oktopk --check --ranks 8 --hosts emulated --raw oktopk8.csv
python -m tests.benchmarks.sparse_volumes --steps 50 --densities 0.01 --gradients digits gpt --raw all.csv
python -m tests.benchmarks.sparse_volumes --steps 50 --densities 0.01 --gradients digits gpt --ranks 8 --hosts emulated --raw all8.csv
python -m tests.benchmarks.sparse_volumes --compressors oktopk --check --steps 70 --numel 1000000 --gradients skewed one_rank --ranks 2 4 --densities 0.01 --raw million.csv

OMP_NUM_THREADS=1 dear-converge hydra.run.dir=outputs/converge_digits
OMP_NUM_THREADS=1 dear-converge experiment=converge_gpt hydra.run.dir=outputs/converge_gpt

OMP_NUM_THREADS=1 dear-converge hydra.run.dir=outputs/converge_oktopk \
  entries='[dense,{name: oktopk_2, compressor: oktopk, compressor.density: 0.02},{name: oktopk_1, compressor: oktopk, compressor.density: 0.01},{name: oktopk_no_residual, compressor: oktopk, compressor.density: 0.01, compressor.error_feedback: false, control: true}]'

OMP_NUM_THREADS=1 dear-converge hydra.run.dir=outputs/residual_off trainer.max_steps=360 \
  model.label_smoothing=0 optimizer.weight_decay=0 optimizer.lr=0.01 '~buckets.layer-wise' \
  lr_factors=[1] dense_shares=[0] reference_lr_factors=[1] \
  entries='[dense,{name: oktopk_1, compressor: oktopk, compressor.density: 0.01},{name: oktopk_no_residual, compressor: oktopk, compressor.density: 0.01, compressor.error_feedback: false, control: true}]'

OMP_NUM_THREADS=1 dear-converge experiment=converge_gpt hydra.run.dir=outputs/converge_gpt_10_seeds seeds=[11,12,13,14,15,16,17,18,19,20] \
  entries='[dense,{name: int4_10, compressor: int4},{name: powersgd_16, compressor: powersgd, compressor.rank: 16, compressor.min_saving: 1}]'

OMP_NUM_THREADS=1 dear-converge experiment=converge_gpt_long hydra.run.dir=outputs/converge_gpt_long

OMP_NUM_THREADS=1 dear-converge experiment=converge_gpt_long hydra.run.dir=outputs/converge_gpt_oktopk \
  entries='[dense,{name: oktopk_2, compressor: oktopk, compressor.density: 0.02}]'

OMP_NUM_THREADS=1 dear-converge experiment=converge_gpt_sgd hydra.run.dir=outputs/converge_gpt_sgd_oktopk \
  entries='[dense,{name: oktopk_2, compressor: oktopk, compressor.density: 0.02, compressor.momentum: 0.9, optimizer: sgd_plain}]'

OMP_NUM_THREADS=1 dear-converge experiment=converge_gpt_sgd hydra.run.dir=outputs/converge_gpt_sgd

OMP_NUM_THREADS=1 dear-converge hydra.run.dir=outputs/converge_digits_p8 cluster.devices=8 data.batch_size=8 '~buckets.layer-wise' \
  tuning_seeds=[] reference_lr_factors=[1] lr_factors=[1] dense_shares=[0.1] seeds=[11,12,13,14,15] \
  entries='[dense,bf16,int8,int4,{name: topk, compressor: topk, compressor.density: 0.01},{name: oktopk_1, compressor: oktopk, compressor.density: 0.01},powersgd,efsignsgd]'

OMP_NUM_THREADS=1 dear-converge hydra.run.dir=outputs/converge_randomk '~buckets.layer-wise' \
  tuning_seeds=[] reference_lr_factors=[1] lr_factors=[1] dense_shares=[0] \
  entries='[dense,{name: randomk, compressor: randomk, below: 1.0},{name: randomk_plain, compressor: randomk, compressor.decay: 1.0, below: 1.0}]'

python -m tests.benchmarks.waiting
