"""Entry points of the programs; `--help` prints their docstrings."""

import runpy
import sys
from inspect import cleandoc

from lightning_dear.apps.program import Program
from lightning_dear.names import is_meant
from lightning_dear.paths import recipes_dir


def train() -> None:
    """Trains one job, tests it, and says what a step cost.

      dear-train                                         digits, a small ResNet, two processes
      dear-train strategy=ddp                            the same job under DDP
      dear-train experiment=lm compressor=int8           a small GPT; gradients travel in 8 bits
      dear-train -m strategy=ddp,dear                    one job after another, and a table of all
      dear-train doctor=true                             trains nothing: would DDP do here?
      dear-train eval=true ckpt_path=FILE                trains nothing: tests a checkpoint

    Options are those of the config: GROUP=NAME chooses a file, GROUP.OPTION=VALUE changes it.
    """
    # `trains`: Lightning itself ends a training at a signal.
    Program("dear-train", "train", "train.train", train.__doc__, trains=True).main()


def bench() -> None:
    """Compares strategies side by side: block after block on the same ranks.

      dear-bench                                         ddp, ddp_bf16, dear, int8 on emulated links
      dear-bench entries=[ddp,dear] cluster.rate_mbit=50 others, on slower links
      dear-bench model=resnet data=digits cluster=local  a model that computes, without links
      dear-bench report FOLDER                           table and picture of a run again

    Links are emulated on Linux, with iproute2. A run that was interrupted goes on with
    hydra.run.dir=FOLDER.
    """
    Program("dear-bench", "bench", "bench.run", bench.__doc__, "comparison").main()


def converge() -> None:
    """Trains under each compressor and densely, on several seeds; compares how they end.

      dear-converge                                      compressors beside dense training
      dear-converge entries=[dense,int8] seeds=[1,2,3]   one of them
      dear-converge experiment=converge_gpt              a small GPT instead of the digits
      dear-converge report FOLDER                        table and picture of a run again

    A run that was interrupted goes on with hydra.run.dir=FOLDER.
    """
    Program("dear-converge", "converge", "converge.run", converge.__doc__, "convergence").main()


def plan() -> None:
    """Predicts a step of a model on a cluster for each strategy; starts no process.

      dear-plan profile=bert_base cluster=ethernet_10g   a known model on a known cluster
      dear-plan cluster.num_hosts=8 compute_s=0.25       8 hosts; seconds of forward and backward
      dear-plan compressors=[int8] strategies=[ddp,dear] some rows of the table alone
      dear-plan need=0.9                                 which rate makes 90 % of a step computing
      dear-plan world_sizes=[8,64]                       curves for 8 and 64 ranks; null: eight
      dear-plan calibrate model=resnet data=digits       measures this cluster and a model first

    `dear-plan calibrate --help` says more of the last one, which prints the command to go on with.
    profile is bert_base, bert_large, densenet201, inception_v4, lstm, mask_rcnn, resnet101,
    resnet50, vgg16, or a .json file of your model. Seconds of these are computed for a GPU of
    7 TFLOP/s and 500 GB/s, half an RTX 2080 Ti's peak. compute_s=... sets those of your GPU.
    """
    if sys.argv[1:2] == ["calibrate"]:
        # Run as `python -m`, so that its ranks can be started with the same command.
        sys.argv.pop(1)
        runpy.run_module("lightning_dear.apps.calibrate", run_name="__main__", alter_sys=True)
    else:
        Program("dear-plan", "plan", "plan.report", plan.__doc__).main()


def calibrate() -> None:
    """Measures this cluster and a model, for `dear-plan` to predict with. Trains some steps.

      dear-plan calibrate model=resnet data=digits       on this machine, with two processes
      dear-plan calibrate experiment=replay cluster=emulated cluster.rate_mbit=125
      dear-plan calibrate compressor=int8                also what encoding takes

    Prints the command that predicts with what was measured.
    """
    Program("dear-plan calibrate", "calibrate", "calibrate.calibrate", calibrate.__doc__).main()


def recipe() -> None:
    """Runs a published claim again: what comes out here, and what must be true for it.

      dear-recipe dear_64gpu                             simulated: in a minute, on any machine
      dear-recipe dear_64gpu --cfg job                   its options: cluster=, models=, ...
      dear-recipe dear_64gpu measure=true                small siblings are measured again, too

    Simulated claims take about a minute.
    """
    name = sys.argv[1] if len(sys.argv) > 1 else ""
    known = {one.parent.name: one for one in sorted(recipes_dir().glob("*/make.py"))}
    if name in known:
        sys.argv.pop(1)
        Program("dear-recipe", f"recipe/{name}", "recipe.run", recipe.__doc__).main()
        return
    asks = name in ("", "-h", "--help")
    pages = {one: make.with_name("README.md").read_text() for one, make in known.items()}
    names = [f"  {one:<18} {page.splitlines()[0].lstrip('# ')}" for one, page in pages.items()]
    unknown = "" if asks else f"Unknown recipe {name!r}.{is_meant(name, known)}\n"
    usage = f"{unknown}dear-recipe NAME: {cleandoc(recipe.__doc__ or '')}\n\nNAME is one of"
    print(usage, *names, sep="\n", file=sys.stderr if unknown else None)
    raise SystemExit(bool(unknown))
