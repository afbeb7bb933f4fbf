"""Running a Hydra application on an emulated cluster: it starts itself again, once per rank."""

import os
import sys
from inspect import signature

from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig

from lightning_dear import emulation
from lightning_dear.apps import job
from lightning_dear.emulation.launch import HOST_VARIABLE
from lightning_dear.strategy.launchers import job_arguments
from lightning_dear.studies.interrupts import INTERRUPTS

OPTIONS = tuple(signature(emulation.EmulatedCluster).parameters)
"""What conf/cluster/emulated.yaml says of the hosts and their links."""


def restart_on_cluster(cfg: DictConfig, module: str) -> bool:
    """Run the Hydra job ``cfg`` on the cluster it describes, if that is an emulated one.

    Makes the hosts, runs ``python -m module`` on each with this job's overrides and output
    folder, blocks until all ranks have ended, and removes the hosts. Without root all this is done
    in namespaces of the user's own.

    Args:
        cfg: The job; ``cfg.cluster`` is one of conf/cluster.
        module: Module whose Hydra ``main`` runs the job; calls this function as well.

    Returns:
        Whether the job was done there. If not, this process is to do it itself: the cluster is not
        emulated, or this is one of its ranks.

    Raises:
        SystemExit: With what ``run_on_cluster`` returns, if that is not 0; with 130
            after Ctrl-C, 143 after SIGTERM.
        EmulationUnavailable: This machine cannot emulate hosts; the message says why.
        ValueError: An option of the cluster is out of range.
    """
    if "num_hosts" not in cfg.cluster or HOST_VARIABLE in os.environ:
        return False
    if cfg.get("optimized_metric"):
        raise ValueError(
            "cluster=emulated returns no metric to a sweeper: leave out optimized_metric,"
            " or sweep on cluster=local."
        )
    try:
        if reason := emulation.why_unavailable(as_own_root=True):
            raise emulation.EmulationUnavailable(reason)
        code = _run(cfg, module) if os.geteuid() == 0 else _run_as_own_root(module)
    except KeyboardInterrupt as interrupt:
        code = next(iter(interrupt.args), 130)
    except emulation.EmulationUnavailable as error:
        raise emulation.EmulationUnavailable(
            f"{error}. Without emulated hosts: cluster=local"
        ) from None
    if code:
        raise SystemExit(code)
    return True


def _run(cfg: DictConfig, module: str) -> int:
    node, config = cfg.cluster, HydraConfig.get()
    arguments = job_arguments(config, 0)
    # A log file for each rank, by a name that each rank resolves for itself.
    arguments.append(f"hydra.job.name='{config.job.name}_rank${{oc.env:RANK}}'")
    if node.beta_s_per_byte is None and node.rate_mbit is not None:
        arguments.append(f"cluster.beta_s_per_byte={8e-6 / node.rate_mbit:.6g}")
    hosts = emulation.EmulatedCluster(**{name: node[name] for name in OPTIONS})
    with INTERRUPTS.raised(), hosts as cluster:
        return emulation.run_on_cluster(
            cluster,
            [sys.executable, "-m", module, *arguments],
            ranks_per_host=node.ranks_per_host,
            cwd=config.runtime.cwd,
        )


def _run_as_own_root(module: str) -> int:
    """Starts this job again, as root of namespaces of its own, and waits for it."""
    config = HydraConfig.get()
    argv = [sys.executable, "-m", module, *job_arguments(config, 0)]
    # Whoever kills this process ends that one.
    command = [*emulation.AS_OWN_ROOT, "setpriv", "--pdeathsig", "TERM", *argv]
    # Interrupted, it ends its ranks, and says how far it came.
    return job.run_child(command, cwd=config.runtime.cwd)
