"""Starts a host's ranks as child processes, also in jobs and sweeps of Hydra.

Lightning starts child ranks by running the command line again. In a Hydra sweep that command line
names the whole sweep, so that each child would run all jobs, in a folder of its own. Here a child
gets the overrides and the folder of the job that is running. Children end with their job, and the
next job starts its own ranks.
"""

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
from lightning.fabric.utilities import distributed
from lightning.pytorch import strategies
from lightning.pytorch.utilities import exceptions
from typing_extensions import override

from lightning_dear import private_names
from lightning_dear.collectives import factory, store
from lightning_dear.strategy import failure_watch, failures

if TYPE_CHECKING:
    from hydra.conf import HydraConf

log = logging.getLogger(__name__)

_MultiProcessingLauncher: Any = private_names.TRAINER_LAUNCHER.of(strategies.launchers)
_SubprocessScriptLauncher: Any = private_names.SCRIPT_LAUNCHER.of(strategies.launchers)
_TunerExitException: Any = private_names.TUNER_EXIT.of(exceptions)

POLL_S = 0.2
"""Seconds between two checks of the child processes."""

GRACE_S = 5.0
"""Seconds from the failure of a rank until other ranks of the host that still run are killed."""

END_S = 60.0
"""Seconds for which rank 0, when it has ended without a failure, waits before it kills others."""

BLOCKED_S = 30.0
"""Seconds from a Ctrl-C or SIGTERM to rank 0 until it kills the other ranks, unless it has begun to
stop itself by then. It normally stops at the end of a batch."""

PARENT_VARIABLE = "LIGHTNING_DEAR_PARENT"
"""Environment variable that tells a child rank the process id of rank 0."""

_REPLACED = re.compile(
    r"[+~]*hydra(\.(mode|run\.|sweep\.|sweeper|launcher|output_subdir|job\.(name|num|id))"
    r"|/(sweeper|launcher))"
)
"""Matches overrides of Hydra's own config that a child gets with other values, or not at all."""

_VARIABLES = ("MASTER_ADDR", "MASTER_PORT", "NODE_RANK", "LOCAL_RANK", "WORLD_SIZE")
"""Variables that tell Lightning and torch which ranks were started. `job_end` removes them."""

_launched: "list[JobLauncher]" = []
"""Launchers that have started children in the present job, which `job_end` waits for."""


def configure_launcher(strategy: strategies.Strategy) -> None:
    """Replaces the launcher of `strategy`. In a Hydra sweep, each job then starts its own ranks.

    A launcher that runs the script again is replaced by a `JobLauncher`, or removed if there is
    only one rank. A launcher that spawns or forks is replaced by a `ReportingLauncher`, if the
    strategy has a method `report_failure`. A strategy without a launcher stays as it is.

    Args:
        strategy: A strategy that knows its devices, since a Trainer was made with it. Mutated.
    """
    launcher = private_names.LAUNCHER.of(strategy)
    if isinstance(launcher, _MultiProcessingLauncher) and hasattr(strategy, "report_failure"):
        launched = private_names.LAUNCHED_STRATEGY.of(launcher)
        started = ReportingLauncher(launched, private_names.START_METHOD.of(launcher))
        private_names.LAUNCHER.replace_in(strategy, started)
    if not isinstance(launcher, _SubprocessScriptLauncher) or isinstance(launcher, JobLauncher):
        return
    if not launcher.cluster_environment.creates_processes_externally:
        _end_ranks_between_jobs()
    is_alone = launcher.num_processes * launcher.num_nodes == 1
    place = launcher.cluster_environment, launcher.num_processes, launcher.num_nodes
    private_names.LAUNCHER.replace_in(strategy, None if is_alone else JobLauncher(*place))


def _end_ranks_between_jobs() -> None:
    """In a Hydra sweep, lets the ranks of each job end before the next. Otherwise does nothing."""
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

    # Hydra has no hook for the end of a job that needs no config, but every job of a sweep begins
    # with this call.
    holder.set_config = set_config
    # Children that other strategies start later must run one job, too, and not the whole sweep.
    private_names.SUBPROCESS_COMMAND.replace_in(
        strategies.launchers.subprocess_script, child_command
    )


def job_end() -> Callable[[], None]:
    """Returns a function that ends a job's ranks, to be called before the next job.

    Lightning leaves environment variables and the process group behind. The next Trainer would take
    them for a sign that another launcher has started the ranks already. Call this before ranks are
    started, since it stores which variables are not set yet.

    Returns:
        Function that waits for the children of the job, ends all process groups, and removes the
        variables that were set since.
    """
    absent = {*_VARIABLES, "OMP_NUM_THREADS"} - os.environ.keys()
    num_threads = torch.get_num_threads()

    def end() -> None:
        while _launched:
            _launched.pop().end_job()
        factory.leave_process_groups()
        for name in absent:
            os.environ.pop(name, None)
        torch.set_num_threads(num_threads)

    return end


class JobLauncher(_SubprocessScriptLauncher):  # type: ignore[misc]
    """Starts local ranks 1, 2, ... as child processes, and ends all of them if one fails.

    Outside of Hydra the children repeat the command line, as with Lightning's own launcher. No
    child outlives local rank 0, here called rank 0: when it ends, the children have `END_S` seconds
    to end, and after a failure or a kill of rank 0 `GRACE_S` seconds. Then they are ended. If the
    cluster environment starts all ranks (torchrun, SLURM), this launcher starts none.

    Args:
        cluster_environment: Knows the main address and port, and this host's node rank.
        num_processes: Number of ranks on this host.
        num_nodes: Number of hosts.

    Attributes:
        has_heard_signal: Event that is set once this rank's run begins to end, or the launch ends.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._is_failing, self._is_over = threading.Event(), threading.Event()
        self.has_heard_signal = threading.Event()
        self._watcher: threading.Thread | None = None
        watch_parent()

    @override
    def launch(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Starts the children, calls `function` on this rank and returns its result.

        Blocks as long as `function` does. If it raises, the children still live until this process
        ends, so that all ranks can write a checkpoint after the exception.
        """
        kwargs.pop("trainer", None)
        # Reset, because the caller may go on after a launch that has failed or was interrupted.
        self._is_failing.clear()
        self.has_heard_signal = threading.Event()
        environment = self.cluster_environment
        environment.validate_settings(num_devices=self.num_processes, num_nodes=self.num_nodes)
        if not environment.creates_processes_externally:
            self._call_children_scripts()
            atexit.register(self._end_children)
            _launched.append(self)
        # The thread ends after a failed launch, so a second launch needs a new one.
        if self.procs and not (self._watcher and self._watcher.is_alive()):
            self._watcher = threading.Thread(target=self._end_all_when_one_fails, daemon=True)
            self._watcher.start()
        private_names.SET_NUM_THREADS.of(distributed)(num_processes=self.num_processes)
        try:
            with call_if_unheard(self.has_heard_signal, BLOCKED_S, self._end_unheard):
                return function(*args, **kwargs)
        except BaseException as error:
            # Lightning's tuner ends its trial fit with this exception, on every rank: no failure.
            if not isinstance(error, _TunerExitException):
                self._is_failing.set()
                # Started now, since no thread can be started at exit.
                threading.Thread(target=factory.hang_up, args=[self._is_over], daemon=True).start()
            raise

    @override
    def kill(self, signum: signal.Signals | int) -> None:
        """Sends a signal to the children. Lightning's handler of SIGTERM calls it."""
        self.has_heard_signal.set()
        super().kill(signum)

    def _end_unheard(self) -> None:
        if self.procs:
            log.error("Rank 0 has not reacted to a signal. It now ends the other ranks itself.")
            end_processes(self.procs, 0.0)

    @override
    def _call_children_scripts(self) -> None:
        self._check_can_spawn_children()
        own, world_size = self.cluster_environment, self.num_processes * self.num_nodes
        values = own.main_address, own.main_port, own.node_rank(), own.local_rank(), world_size
        os.environ.update(zip(_VARIABLES, map(str, values), strict=True))
        self.procs = [self._start(local_rank) for local_rank in range(1, self.num_processes)]

    def _start(self, local_rank: int) -> subprocess.Popen[bytes]:
        command, cwd = child_command(local_rank)
        own = {"LOCAL_RANK": str(local_rank), PARENT_VARIABLE: str(os.getpid())}
        return subprocess.Popen(command, env={**os.environ, **own}, cwd=cwd)

    def _end_all_when_one_fails(self) -> None:
        while not any(codes := [process.poll() for process in self.procs]):
            if None not in codes:
                return
            time.sleep(POLL_S)
        # Usually the main thread now fails in a collective and ends by itself. If it hangs outside
        # of collectives, this thread must end the process.
        if self._is_failing.wait(GRACE_S):
            return
        failure_watch.dump_stacks()
        self._end_at_once(f"Local rank {first_ending(codes)}, which rank 0 has not noticed")

    def end_job(self) -> None:
        """Ends the children of a job that is over, while this process goes on. Blocks.

        If a child has failed but rank 0 has not, this process exits with code 1 at its end.
        """
        atexit.unregister(self._end_children)
        self._end_children(lambda said: atexit.register(self._end_at_once, said))

    def _end_children(self, end: Callable[[str], Any] | None = None) -> None:
        """Waits for the children, and ends this process if one has failed and rank 0 has not.

        Kills children that do not end in time. Runs at exit and at the end of a job. Calls `end`
        with the reason to end this process. None means that it ends at once.
        """
        is_failing = self._is_failing.is_set()
        # Held until the children have ended: in the store they read which rank failed first.
        _store = store.default_store()
        if is_failing:
            self._is_over.set()
        codes = end_processes(self.procs, GRACE_S if is_failing else END_S)
        # Stops the watching thread, since no child is left.
        self._is_failing.set()
        if is_failing:
            print_first_failure()
        elif any(codes):
            (end or self._end_at_once)(f"Rank 0 was done, but local rank {first_ending(codes)}")

    def _end_at_once(self, reason: str) -> None:
        log.error("%s: ending all ranks.", reason)
        end_processes(self.procs, 0.0)
        print_first_failure()
        # `sys.exit` ends no process from a thread or at exit, and `os._exit` flushes no stream.
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        os._exit(1)


@contextmanager
def call_if_unheard(
    heard: threading.Event, after_s: float, act: Callable[[], None]
) -> Iterator[None]:
    """Calls `act` if the first SIGINT or SIGTERM within the block has no effect.

    Python runs signal handlers in the main thread, once that thread runs Python code again. It
    never does if it waits in a collective for a rank that hangs. Does nothing outside of the main
    thread, or if other code uses `signal.set_wakeup_fd`, as asyncio does.

    Args:
        heard: Event that the caller sets once the signal has taken effect. Set as the block ends.
        after_s: Seconds from the signal until `act` is called, unless `heard` is set by then.
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
        # Read to the end, because Python warns on stderr if a signal finds the pipe closed.
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
    # The present descriptor can be read only by setting another one.
    before = signal.set_wakeup_fd(-1)
    signal.set_wakeup_fd(before)
    return before != -1


def print_first_failure() -> None:
    """Prints to stderr which rank failed first and why. Prints nothing if that is not known."""
    if (failure := failure_watch.first_failure()) is not None:
        print(failure, file=sys.stderr, flush=True)


def watch_parent() -> None:
    """In a child rank, starts a thread that ends this process soon after rank 0 has ended.

    A no-op in other processes. The kernel's signal PR_SET_PDEATHSIG is of no use: it comes when the
    *thread* that started the children ends, while rank 0 may still live.
    """
    # Removed, so that processes that this rank starts are not taken for child ranks.
    parent = os.environ.pop(PARENT_VARIABLE, None)
    if parent is not None:
        threading.Thread(target=_end_after, args=(int(parent),), daemon=True).start()


def _end_after(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(POLL_S)
    # Rank 0 was killed: in all other cases it ends only after its children.
    time.sleep(GRACE_S)
    failure_watch.dump_stacks()
    log.error("Rank 0 was killed, and this rank, which has not noticed, is ended.")
    os._exit(1)


def child_command(local_rank: int) -> tuple[list[str], str | None]:
    """Returns the command line of a child rank, and the folder to start it in.

    None as the folder means the present one. Only the name of the child's log file depends on
    `local_rank`, its rank on this host.
    """
    # Not imported: if Hydra has not been imported, this process runs no job of it.
    hydra = sys.modules.get("hydra.core.hydra_config")
    config = hydra.HydraConfig.get() if hydra and hydra.HydraConfig.initialized() else None
    # Without an output folder, a script has composed the config and runs no job of Hydra.
    if config is None or not config.runtime.get("output_dir"):
        return [*_program(Path.cwd()), *sys.argv[1:]], None
    cwd = config.runtime.cwd
    return [*_program(Path(cwd)), *job_arguments(config, local_rank)], cwd


def job_arguments(config: "HydraConf", local_rank: int) -> list[str]:
    """Returns command-line arguments that make Hydra run the same job again.

    Args:
        config: The `hydra` node of the job's config.
        local_rank: The child's rank on this host.
    """
    from omegaconf import OmegaConf

    # Interpolations stay unresolved, because a child resolves them by itself.
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
        # Rank 0 has written the composed config, and a second writer would race with it.
        "hydra.output_subdir=null",
        f"hydra.job.name={_quoted(f'{config.job.name}_rank{local_rank}')}",
    ]
    if config.mode is not None and config.mode.name == "MULTIRUN":
        arguments += [f"hydra.job.num={config.job.num}", f"hydra.job.id={_quoted(config.job.id)}"]
    return arguments


def end_processes(processes: Sequence[subprocess.Popen[bytes]], grace_s: float) -> list[int]:
    """Waits for child processes, kills those that still run after `grace_s`; returns exit codes.

    `grace_s` is the number of seconds for all of them together.
    """
    deadline = time.monotonic() + grace_s
    for process in processes:
        try:
            process.wait(timeout=max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
    return [process.wait() for process in processes]


def first_ending(codes: Sequence[int | None]) -> str:
    """Returns which local rank has failed and how, such as "1 exited with code 3".

    `codes` are the exit codes of local ranks 1, 2, .... The first that is not 0 counts.
    """
    rank, code = next((rank, code) for rank, code in enumerate(codes, start=1) if code)
    how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"exited with code {code}"
    return f"{rank} {how}"


def _program(cwd: Path) -> list[str]:
    import __main__

    # `__spec__` is set under `python -m package.module`. It is None for scripts.
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
    """Spawns or forks ranks as Lightning does, and lets each rank report its own failure.

    Lightning reports an exception to callbacks and strategy only in the process that started the
    ranks. That process knows only the traceback of the rank that ended first.
    """

    @override
    def launch(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Calls `function` on all ranks, returns rank 0's result. Blocks until all have ended.

        Raises:
            SystemExit: If all ranks have ended because one was asked to stop.
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
        # Returned, because the starting process would wait for ever for the result of a rank that
        # raises SystemExit.
        return SystemExit(end.code)
    except BaseException as exception:
        report(exception)
        if failures.is_consequence(exception):
            # torch shows the error of the rank that ends first. So the rank with the cause must end
            # before this one.
            time.sleep(failures.REPORT_WAIT_S)
        raise
