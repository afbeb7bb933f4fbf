"""Starting one process per device under Hydra, also inside a sweep.

Lightning starts child ranks by running the command line again. In a Hydra sweep that line names
the whole sweep, so that each child runs all of it in a folder of its own. Here a child is given
the overrides of the one job that is running, and that job's folder. It ends with its job, and the
next one starts ranks of its own.
"""

from __future__ import annotations

import atexit
import logging
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from lightning.fabric.plugins import ClusterEnvironment
from lightning.fabric.utilities import distributed
from lightning.pytorch.strategies import Strategy
from lightning.pytorch.strategies import launchers as lightning_launchers
from lightning.pytorch.strategies.launchers import subprocess_script
from lightning.pytorch.utilities import exceptions
from typing_extensions import override

from lightning_dear import private_names
from lightning_dear.collectives.factory import leave_process_groups
from lightning_dear.strategy import failures

if TYPE_CHECKING:
    from hydra.conf import HydraConf

log = logging.getLogger(__name__)

_MultiProcessingLauncher: Any = private_names.TRAINER_LAUNCHER.of(lightning_launchers)
_SubprocessScriptLauncher: Any = private_names.SCRIPT_LAUNCHER.of(lightning_launchers)
_TunerExitException: Any = private_names.TUNER_EXIT.of(exceptions)

POLL_S = 0.2
"""Seconds between two looks at the child processes."""

GRACE_S = 5.0
"""Seconds the other ranks have to end by themselves once one rank has failed."""

END_S = 60.0
"""Seconds the other ranks have to end once rank 0 has ended in good order."""

BLOCKED_S = 30.0
"""Seconds after which a Ctrl-C or SIGTERM that has no effect on rank 0 ends the other ranks. It has
one when a batch has ended."""

PARENT_VARIABLE = "LIGHTNING_DEAR_PARENT"
"""Tells a child rank the process number of rank 0."""

_REPLACED = re.compile(
    r"[+~]*hydra(\.(mode|run\.|sweep\.|sweeper|launcher|output_subdir|job\.(name|num|id))"
    r"|/(sweeper|launcher))"
)
"""Beginnings of Hydra's own overrides that a child is given anew, or must not have."""

_VARIABLES = ("MASTER_ADDR", "MASTER_PORT", "NODE_RANK", "LOCAL_RANK", "WORLD_SIZE")
"""Tell Lightning and torch of the ranks that were started, and stay in the environment."""

_launched: list[JobLauncher] = []
"""Those whose children belong to the present job."""


def configure_launcher(strategy: Strategy) -> None:
    """Make ``strategy`` start its child ranks through a launcher of this package.

    Replaces the strategy's launcher in place: one that starts a script by :class:`JobLauncher`, one
    that spawns or forks by :class:`ReportingLauncher`, if the strategy has `report_failure`. A
    strategy without either (one device, processes started by torchrun or SLURM) keeps what it has.
    With one script in all there is nothing to start, and the strategy is left without a launcher.

    Args:
        strategy: A strategy that already knows its devices: one a Trainer was built with.
    """
    launcher = private_names.LAUNCHER.of(strategy)
    if isinstance(launcher, _MultiProcessingLauncher) and hasattr(strategy, "report_failure"):
        launched = private_names.LAUNCHED_STRATEGY.of(launcher)
        started = ReportingLauncher(launched, private_names.START_METHOD.of(launcher))
        private_names.LAUNCHER.replace_in(strategy, started)
    if not isinstance(launcher, _SubprocessScriptLauncher) or isinstance(launcher, JobLauncher):
        return
    if not launcher.cluster_environment.creates_processes_externally:
        _part_jobs()
    if launcher.num_processes * launcher.num_nodes == 1:
        private_names.LAUNCHER.replace_in(strategy, None)
        return
    place = launcher.cluster_environment, launcher.num_processes, launcher.num_nodes
    private_names.LAUNCHER.replace_in(strategy, JobLauncher(*place))


def _part_jobs() -> None:
    """In a sweep, has each later job of it begin as this one does. Elsewhere a no-op."""
    hydra = sys.modules.get("hydra.core.hydra_config")
    if hydra is None or not hydra.HydraConfig.initialized():
        return
    holder, number = hydra.HydraConfig.instance(), hydra.HydraConfig.get().job.get("num")
    if number is None or "set_config" in vars(holder):
        return
    end = job_end()

    def set_config(config: Any) -> None:
        nonlocal number
        type(holder).set_config(holder, config)
        before, number = number, hydra.HydraConfig.get().job.get("num", number)
        if number != before:
            end()

    # Hydra tells nobody that a job is over, unless its config says so; but this is how the next one
    # begins, whatever its strategy.
    holder.set_config = set_config
    # Children of other strategies must not repeat this sweep either: some of its jobs are over.
    private_names.SUBPROCESS_COMMAND.replace_in(subprocess_script, child_command)


def job_end() -> Callable[[], None]:
    """Returns what to call between two jobs of one process; make it before ranks start.

    Lightning leaves variables and the process group behind, and takes them, at the next Trainer,
    for a sign that somebody else has started the ranks.

    Returns:
        Waits for the children of this job, ends all process groups, and removes what has come into
        the environment.
    """
    absent = {*_VARIABLES, "OMP_NUM_THREADS"} - os.environ.keys()
    num_threads = torch.get_num_threads()

    def end() -> None:
        while _launched:
            _launched.pop().part()
        leave_process_groups()
        for name in absent:
            os.environ.pop(name, None)
        torch.set_num_threads(num_threads)

    return end


class JobLauncher(_SubprocessScriptLauncher):  # type: ignore[misc]
    """Starts ranks 1, 2, ... of this host as child processes and ends all when one fails.

    Outside Hydra the children repeat the command line, as with Lightning's own launcher. None of
    them outlives rank 0: at its end they have ``END_S`` seconds, after a failure ``GRACE_S``; when
    rank 0 is killed, they end within ``GRACE_S``.

    Args:
        cluster_environment: Knows the main address, its port and this host's number.
        num_processes: Ranks on this host.
        num_nodes: Hosts.

    Attributes:
        has_heard_signal: To be set by whoever ends this rank's run.
    """

    def __init__(
        self, cluster_environment: ClusterEnvironment, num_processes: int, num_nodes: int
    ) -> None:
        super().__init__(cluster_environment, num_processes, num_nodes)
        self._is_failing = threading.Event()
        self.has_heard_signal = threading.Event()
        self._watcher: threading.Thread | None = None
        watch_parent()

    @override
    def launch(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Start the children once, then call ``function`` on this rank and return its result.

        Blocks as long as ``function`` does. If it raises, the children live until this process
        ends, so that all ranks can still save what they save after an exception.
        """
        kwargs.pop("trainer", None)
        # Of this launch: one before may have failed, or been interrupted, and been survived.
        self._is_failing.clear()
        self.has_heard_signal = threading.Event()
        self.cluster_environment.validate_settings(
            num_devices=self.num_processes, num_nodes=self.num_nodes
        )
        if not self.cluster_environment.creates_processes_externally:
            self._call_children_scripts()
            atexit.register(self._end_children)
            _launched.append(self)
        self._watch_children()
        private_names.SET_NUM_THREADS.of(distributed)(num_processes=self.num_processes)
        try:
            with call_if_unheard(self.has_heard_signal, BLOCKED_S, self._end_deaf_children):
                return function(*args, **kwargs)
        except _TunerExitException:
            # Not a failure: the tuner leaves its trial fit this way, on every rank.
            raise
        except BaseException:
            self._is_failing.set()
            raise

    @override
    def kill(self, signum: signal.Signals | int) -> None:
        """Send a signal to the children; Lightning's own handler of SIGTERM does so."""
        self.has_heard_signal.set()
        super().kill(signum)

    def _end_deaf_children(self) -> None:
        if self.procs:
            log.error("Rank 0 cannot be interrupted while it waits for others: ending those.")
            end_processes(self.procs, 0.0)

    @override
    def _call_children_scripts(self) -> None:
        self._check_can_spawn_children()
        environment = self.cluster_environment
        os.environ["MASTER_ADDR"] = environment.main_address
        os.environ["MASTER_PORT"] = str(environment.main_port)
        os.environ["NODE_RANK"] = str(environment.node_rank())
        os.environ["LOCAL_RANK"] = str(environment.local_rank())
        os.environ["WORLD_SIZE"] = str(self.num_processes * self.num_nodes)
        self.procs = [self._start(local_rank) for local_rank in range(1, self.num_processes)]

    def _start(self, local_rank: int) -> subprocess.Popen[bytes]:
        command, cwd = child_command(local_rank)
        own = {"LOCAL_RANK": str(local_rank), PARENT_VARIABLE: str(os.getpid())}
        return subprocess.Popen(command, env={**os.environ, **own}, cwd=cwd)

    def _watch_children(self) -> None:
        # It ends when a launch fails, after which there may be another one.
        if self.procs and not (self._watcher and self._watcher.is_alive()):
            self._watcher = threading.Thread(target=self._end_all_when_one_fails, daemon=True)
            self._watcher.start()

    def _end_all_when_one_fails(self) -> None:
        while not any(codes := [process.poll() for process in self.procs]):
            if None not in codes:
                return
            time.sleep(POLL_S)
        # The main thread now usually fails in a collective and ends in good order. One that
        # cannot, since its loop never communicates, must not keep the job alive.
        if self._is_failing.wait(GRACE_S):
            return
        failures.dump_stacks()
        self._end_at_once(f"Local rank {first_ending(codes)}, which rank 0 has not noticed")

    def part(self) -> None:
        """Ends the children of a job that is over, while this process goes on. Blocks until then.

        If one fails although rank 0 was done, this process will end as if there were no other jobs.
        """
        atexit.unregister(self._end_children)
        self._end_children(lambda said: atexit.register(self._end_at_once, said))

    def _end_children(self, end: Callable[[str], Any] | None = None) -> None:
        """Runs when this process ends, after its traceback has been printed."""
        is_failing = self._is_failing.is_set()
        codes = end_processes(self.procs, GRACE_S if is_failing else END_S)
        # Nobody is left to be watched.
        self._is_failing.set()
        if is_failing:
            print_first_failure()
        elif any(codes):
            (end or self._end_at_once)(f"Rank 0 was done, but local rank {first_ending(codes)}")

    def _end_at_once(self, reason: str) -> None:
        log.error("%s: ending all ranks.", reason)
        end_processes(self.procs, 0.0)
        print_first_failure()
        # `sys.exit` does not end a process from a thread, or at exit; `os._exit` flushes nothing.
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        os._exit(1)


@contextmanager
def call_if_unheard(
    heard: threading.Event, after_s: float, act: Callable[[], None]
) -> Iterator[None]:
    """Calls `act` if, within the block, the first SIGINT or SIGTERM goes unheard.

    Python runs a signal's handler in the main thread, once that thread runs Python again: never, if
    it waits in a collective for a rank that hangs. Does nothing outside the main thread, or where
    somebody else uses `signal.set_wakeup_fd`, such as asyncio.

    Args:
        heard: Set by what the handlers do.
        after_s: Seconds that they have for it.
        act: Called once, in a thread of its own.
    """
    if threading.current_thread() is not threading.main_thread() or _is_wakeup_taken():
        yield
        return
    read_end, write_end = os.pipe()
    # `set_wakeup_fd` refuses a descriptor that blocks.
    os.set_blocking(write_end, False)
    signal.set_wakeup_fd(write_end, warn_on_full_buffer=False)

    def listen() -> None:
        has_waited = False
        # Read to the end: whoever writes into a pipe that nobody reads is told so on stderr.
        with os.fdopen(read_end, "rb", buffering=0) as signals:
            while number := signals.read(1):
                if not has_waited and number[0] in (signal.SIGINT, signal.SIGTERM):
                    has_waited = True
                    if not heard.wait(after_s):
                        act()

    threading.Thread(target=listen, daemon=True).start()
    try:
        yield
    finally:
        signal.set_wakeup_fd(-1)
        heard.set()
        os.close(write_end)


def _is_wakeup_taken() -> bool:
    # To be asked only by setting it.
    before = signal.set_wakeup_fd(-1)
    signal.set_wakeup_fd(before)
    return before != -1


def print_first_failure() -> None:
    """Print which rank failed first and of what, if this rank knows."""
    if (failure := failures.first_failure()) is not None:
        print(failure, file=sys.stderr, flush=True)


def watch_parent() -> None:
    """Begins to watch rank 0 in a child rank, and ends soon after it; elsewhere a no-op.

    The kernel's own signal for this, PR_SET_PDEATHSIG, comes when the *thread* that started the
    children ends, and so would end them while rank 0 lives.
    """
    # Removed, so that processes which this rank starts do not take themselves for ranks.
    parent = os.environ.pop(PARENT_VARIABLE, None)
    if parent is not None:
        threading.Thread(target=_end_after, args=(int(parent),), daemon=True).start()


def _end_after(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(POLL_S)
    # Rank 0 waits for its children when it ends in good order, so it was killed.
    time.sleep(GRACE_S)
    failures.dump_stacks()
    log.error("Rank 0 was killed, and this rank, which has not noticed, is ended.")
    os._exit(1)


def child_command(local_rank: int) -> tuple[list[str], str | None]:
    """Return the command line of a child rank and the folder to start it in (None: this one).

    Args:
        local_rank: The child's rank on this host; only the name of its log file depends on it.
    """
    # Not imported: where no one has loaded Hydra, no job of its runs.
    hydra = sys.modules.get("hydra.core.hydra_config")
    config = hydra.HydraConfig.get() if hydra and hydra.HydraConfig.initialized() else None
    # Without a folder it was composed by a script of which Hydra has started no job.
    if config is None or not config.runtime.get("output_dir"):
        return [*_program(Path.cwd()), *sys.argv[1:]], None
    cwd = config.runtime.cwd
    return [*_program(Path(cwd)), *job_arguments(config, local_rank)], cwd


def job_arguments(config: HydraConf, local_rank: int) -> list[str]:
    """Return Hydra arguments that repeat exactly the job described by ``config``.

    Args:
        config: The ``hydra`` node of the running job.
        local_rank: The child's rank on this host.
    """
    from omegaconf import OmegaConf

    # As they were given: a child looks up for itself what they refer to.
    overrides: Any = OmegaConf.to_container(config.overrides)
    arguments = [] if config.job.config_name is None else ["--config-name", config.job.config_name]
    for flag, provider in (("--config-path", "main"), ("--config-dir", "command-line")):
        for source in config.runtime.config_sources:
            if source.provider == provider:
                prefix = "pkg://" if source.schema == "pkg" else ""
                arguments += [flag, f"{prefix}{source.path}"]
    arguments += overrides["task"]
    arguments += [item for item in overrides["hydra"] if not _REPLACED.match(item)]
    arguments += [
        "hydra.mode=RUN",
        f"hydra.run.dir={_quoted(config.runtime.output_dir)}",
        # Rank 0 wrote the composed config; two writers would race.
        "hydra.output_subdir=null",
        f"hydra.job.name={_quoted(f'{config.job.name}_rank{local_rank}')}",
    ]
    if config.mode is not None and config.mode.name == "MULTIRUN":
        arguments += [f"hydra.job.num={config.job.num}", f"hydra.job.id={_quoted(config.job.id)}"]
    return arguments


def end_processes(processes: Sequence[subprocess.Popen[bytes]], grace_s: float) -> list[int]:
    """Wait for the processes, kill those that outlive ``grace_s`` seconds, return exit codes.

    Args:
        processes: Child processes of this one.
        grace_s: Seconds to wait for all of them together.
    """
    deadline = time.monotonic() + grace_s
    for process in processes:
        try:
            process.wait(timeout=max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
    return [process.wait() for process in processes]


def first_ending(codes: Sequence[int | None]) -> str:
    """Returns the number of the first rank to fail, and how, by the exit codes of 1, 2, ..."""
    rank, code = next((rank, code) for rank, code in enumerate(codes, start=1) if code)
    how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"exited with code {code}"
    return f"{rank} {how}"


def _program(cwd: Path) -> list[str]:
    import __main__

    # Set under `python -m package.module`, None for a script and for a console script.
    spec = __main__.__spec__
    if spec is not None:
        return [sys.executable, "-m", spec.name.removesuffix(".__main__")]
    script = cwd / sys.argv[0]
    if not script.is_file():
        raise RuntimeError(
            f"Cannot start the other ranks: {sys.argv[0]!r} is not a script that can be run again. "
            "Start from a file, a console script or `python -m`, or use torchrun."
        )
    return [sys.executable, str(script)]


def _quoted(value: str) -> str:
    escaped = str(value).replace("\\", "\\\\").replace("'", "\\'")
    return f"'{escaped}'"


class ReportingLauncher(_MultiProcessingLauncher):  # type: ignore[misc]
    """Launches as Lightning does, with ranks that say who failed first.

    Lightning hands an exception to callbacks and strategy in the process that started the ranks,
    where nothing is known of it but the traceback of the rank that ended first.
    """

    @override
    def launch(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Calls `function` on all ranks; returns rank 0's result. Blocks until all have ended.

        Raises:
            SystemExit: Where all ranks have ended since one was asked to stop.
        """
        strategy = private_names.LAUNCHED_STRATEGY.of(self)
        reporting = partial(_reporting, strategy.report_failure, function)
        result = super().launch(reporting, *args, **kwargs)
        if isinstance(result, SystemExit):
            raise result
        return result


def _reporting(
    report: Callable[[BaseException], None], function: Callable[..., Any], *args: Any, **kwargs: Any
) -> Any:
    try:
        return function(*args, **kwargs)
    except exceptions.SIGTERMException as end:
        report(end)
        # Raised in a rank, it would leave the process that started it waiting for a result.
        return SystemExit(end.code)
    except BaseException as exception:
        report(exception)
        if failures.is_consequence(exception):
            # torch shows the user the error of the rank that ends first, and ends the others.
            time.sleep(failures.REPORT_WAIT_S)
        raise
