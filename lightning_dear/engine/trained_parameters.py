"""The parameters that an optimizer trains: found in the module, checked, compared between ranks."""

from collections import Counter
from collections.abc import Sequence
from itertools import chain, zip_longest
from operator import is_
from typing import Any, NamedTuple

from torch import Tensor, get_num_threads, strided
from torch.nn import Module, Parameter
from torch.optim import AdamW, Optimizer

from lightning_dear import bucket, private_names
from lightning_dear.collectives.streams import Streams
from lightning_dear.collectives.work import Collectives
from lightning_dear.compression.groups import unused_group
from lightning_dear.engine import gate, hooks, notes, read_order
from lightning_dear.engine.module_tree import ModuleTree, ignored_names
from lightning_dear.exchange.options import ExchangeOptions
from lightning_dear.optimizers import pieces, tensorwise

Described = Sequence[tuple[str, str]]
"""(name, layout) of every trained parameter, to be compared between ranks. The layout is a text:
shape, strides, dtype and parameter group."""


class Report(NamedTuple):
    """What a rank tells the others before it trains, for `check_layout`.

    Attributes:
        problem: Why this rank cannot train. None means that it can.
        described: The trained parameters of all optimizers, and those that require gradients, but
            are in no optimizer.
        settings: For each optimizer the options of its parameter groups.
        how: The rank's exchange options as text, see `_how`.
    """

    problem: str | None
    described: Described
    settings: Sequence[notes.OptionValues]
    how: str


class TrainedParameters:
    """The parameters that an optimizer trains under one plan.

    It also checks whether the optimizer still holds them, and whether the module still owns them.

    Args:
        tree: Tree of the parameters' module. `Pipeline.forward` calls its `look`.
        optimizer: The optimizer, whose parameter groups are not mutated.
        streams: Streams of the parameters' device.

    Attributes:
        names: Qualified names, in registration order.
        parameters: The parameters, in the same order. A shared parameter stands there once.
        recorder: Records the first step with these parameters; to be assigned to.
        hooks: Gradient hooks that `watch` has registered. No hooks before the first `watch`.
    """

    def __init__(self, tree: ModuleTree, optimizer: Optimizer, streams: Streams) -> None:
        named = managed_parameters(tree.module, optimizer)
        self.names = [name for name, _ in named]
        self.parameters = [parameter for _, parameter in named]
        self._optimizer = optimizer
        held = [group["params"] for group in optimizer.param_groups]
        # Parameters of all groups, frozen ones too, in one list, and their number in each group.
        self._held, self._lengths = [*chain(*held)], [*map(len, held)]
        known = {id(parameter) for parameter in self.parameters}
        self._untrained = [one for one in self._held if id(one) not in known]
        self._homes = gate.owners(tree.module, self.parameters)
        self._tree, self._version = tree, tree.version
        self._streams = streams
        self.recorder = self.new_recorder()
        self.hooks = hooks.GradientHooks((), lambda *_: None)

    def new_recorder(self) -> read_order.ForwardRecorder:
        """Returns a recorder that has recorded nothing yet."""
        return read_order.ForwardRecorder(self._tree.module, self.parameters, self._streams)

    def watch(self, on_gradient: hooks.OnGradient) -> None:
        """Lets `on_gradient` be called whenever a gradient was accumulated, until `hooks.remove()`.

        Hooks of earlier calls are removed. It must be called again after parameters have moved to
        another device or dtype and back: autograd has dropped the hooks then.
        """
        self.hooks.remove()
        self.hooks = hooks.GradientHooks(self.parameters, on_gradient)

    def have_changed(self, *, counts_thawed: bool = True) -> bool:
        """Whether the optimizer has other parameters than when this object was made. Local.

        It compares the parameters in its groups, frozen ones too, by identity and in their order.

        Args:
            counts_thawed: Whether to return True also if a parameter of the groups was frozen then,
                and requires gradients now.
        """
        held = [group["params"] for group in self._optimizer.param_groups]
        if [*map(len, held)] != self._lengths or not all(map(is_, chain(*held), self._held)):
            return True
        return counts_thawed and any(one.requires_grad and one.numel() for one in self._untrained)

    def check_unchanged(self, *, counts_thawed: bool = True) -> None:
        """Raises if the optimizer has other parameters than when this object was made.

        To be called in a step. A change before the step's forward is allowed: it has led to a new
        `TrainedParameters`.

        Args:
            counts_thawed: Same as in `have_changed`.

        Raises:
            RuntimeError: If `have_changed` returns True. Otherwise nothing happens.
        """
        if self.have_changed(counts_thawed=counts_thawed):
            raise RuntimeError(
                "Parameters began to require gradients, or the optimizer got other parameters,"
                " since the forward of this step. Make such changes before the forward."
            )

    def have_moved(self) -> bool:
        """Puts replaced parameters back; tells whether other modules own parameters now. Local.

        Other modules than at the last call. The user may replace a module by another one with the
        same parameters, such as a fused or a scripted one. A parameter that no module owns any more
        counts, too. If `tree.look` has found no change since the last call, only version numbers
        are compared.

        Raises:
            ValueError: What `_restore_replaced` raises.
        """
        if self._version == self._tree.version:
            return False
        self._restore_replaced()
        before, self._version = self._homes, self._tree.version
        self._homes = gate.owners(self._tree.module, self.parameters)
        return before != self._homes

    def _restore_replaced(self) -> None:
        """Puts the optimizer's parameters back into the module, with values of their replacements.

        `load_state_dict(assign=True)` puts new parameters into the module, which no optimizer
        holds. A parameter is left alone if the optimizer holds the new one, or no longer holds the
        old one, or if the new one is no `Parameter` or differs in `requires_grad`. Local.

        Raises:
            ValueError: If the new parameter has another shape.
        """
        homes = self._homes.items()
        for part, name, index in ((part, *item) for part, own in homes for item in own.items()):
            parameter, other = self.parameters[index], gate.plain_parameters(part).get(name)
            if other is parameter or other is None:
                continue
            # `functional_call` puts tensors of any kind into a module, until it returns. They must
            # stay.
            kinds = {(isinstance(one, Parameter), one.requires_grad) for one in (parameter, other)}
            if len(kinds) > 1 or any(other is known for known in self.parameters):
                continue
            held = {*pieces.parameters_of(self._optimizer)}
            if other in held or parameter not in held:
                continue
            if other.shape != parameter.shape:
                raise ValueError(
                    f"A '{name}' of shape {tuple(parameter.shape)}, which the optimizer trains, was"
                    f" replaced by a parameter of shape {tuple(other.shape)}. Put the new one into"
                    " the optimizer's parameter group, in place of the old one."
                )
            parameter.data = other.data.to(parameter.dtype)
            private_names.PARAMETERS.of(part)[name] = parameter


def managed_parameters(module: Module, optimizer: Optimizer) -> list[tuple[str, Parameter]]:
    """(name, parameter) of each parameter that the optimizer trains now, in registration order.

    Those are the module's parameters in the optimizer's groups, without frozen and empty ones. A
    shared parameter stands there once, under its first name. Waits for gathers if gates are closed.
    """
    trained = {*pieces.parameters_of(optimizer)}
    return [
        (name, parameter)
        for name, parameter in module.named_parameters()
        if parameter in trained and parameter.requires_grad and parameter.numel()
    ]


def why_untrainable(module: Module, optimizer: Optimizer, world_size: int) -> str | None:
    """Why training the optimizer's parameters would give other results than under torch. Local.

    None means that there is no such reason: no parameter stands twice in the groups, shares its
    memory with another tensor, or (with several ranks) is one of `ignored_names`.
    """
    kind, managed = type(optimizer).__name__, dict(managed_parameters(module, optimizer))
    held = Counter(pieces.parameters_of(optimizer))
    if twice := [name for name, parameter in managed.items() if held[parameter] > 1]:
        return (
            f"'{twice[0]}' stands twice in the parameter groups of {kind}. Name each parameter"
            " once, such as by list(dict.fromkeys(parameters)). torch would step it twice."
        )
    if world_size > 1 and (ignored := ignored_names(module).intersection(managed)):
        return (
            f"'{min(ignored)}' stands in _ddp_params_and_buffers_to_ignore, and {kind} trains it."
            " Take the name out of that set, freeze the parameter (requires_grad_(False)), or use"
            " strategy='ddp'. strategy='dear' keeps trained parameters equal on all ranks."
        )
    names_at: dict[Any, str] = {}
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        # The `data_ptr` of other classes of tensors may not be the address of their elements.
        if type(tensor) in (Parameter, Tensor) and tensor.layout is strided and tensor.numel():
            other = names_at.setdefault((tensor.device, tensor.data_ptr() or name), name)
            if other != name and not managed.keys().isdisjoint((name, other)):
                return (
                    f"'{other}' and '{name}' are two tensors in the same memory. To tie weights,"
                    " assign the Parameter itself (b.weight = a.weight), also after"
                    " load_state_dict(assign=True). Otherwise clone one of them. strategy='dear'"
                    " would move only one of the two."
                )
    return None


def check_layout(
    module: Module,
    optimizers: Sequence[Optimizer],
    unknown: Sequence[Optimizer],
    collectives: Collectives,
    options: ExchangeOptions,
    or_else: ExchangeOptions | None = None,
) -> tuple[ExchangeOptions, str | None]:
    """Checks models, optimizers and options, and compares them between ranks. Collective, blocks.

    Every rank raises if any rank finds a problem. Values of weights are not compared: the strategy
    has broadcast rank 0's weights before.

    Args:
        module: Module whose parameters are trained.
        optimizers: All optimizers of the module, which are compared between ranks.
        unknown: Optimizers of these that were not checked before, or have other parameters since.
            Only they are checked on this rank.
        collectives: Collectives over all ranks.
        options: Which values travel in the reduce half and in the gather half, and their
            compressor.
        or_else: Options to fall back to if `unknown` cannot be stepped with `options`. None means
            no fallback.

    Returns:
        `options` or `or_else`, the same on all ranks, and a sentence for the user about the choice.
        None in the place of the sentence means that there is nothing to say.

    Raises:
        ValueError: If a rank finds a problem, or if models, options of the optimizers or exchange
            options differ between ranks. Says what is wrong and what to change.
    """
    options, problem, remark = tensorwise.choose_options(unknown, options, or_else)
    # Frozen ones, too: a compressor's group may name parameters that are trained later.
    named = [(name, one.ndim) for name, one in module.named_parameters()]
    problems = (
        problem,
        *(_local_problem(module, one, options) for one in unknown),
        *(why_untrainable(module, one, collectives.world.size) for one in unknown),
        _shared_problem(optimizers),
        unused_group(options.groups, named),
    )
    problem = next(filter(None, problems), None)
    described = [
        (name, f"{what}, {type(optimizer).__name__} {number}")
        for number, optimizer in enumerate(optimizers)
        for name, what in _describe(module, optimizer)
    ]
    unheld = unheld_parameters(module, optimizers)
    described += [(name, "in no optimizer") for name, one in unheld if one.requires_grad]
    settings = [notes.options_of(optimizer) for optimizer in optimizers]
    own = Report(problem, described, settings, _how(options, collectives))
    reports = collectives.all_gather_object(own)
    if problem is not None:
        raise ValueError(problem)
    _compare(reports)
    for number, optimizer in enumerate(optimizers):
        what = f"set up different optimizers: {type(optimizer).__name__} {number}"
        notes.check_options(what, [report.settings[number] for report in reports])
    return options, remark


def _compare(reports: Sequence[Report]) -> None:
    """Raises if any rank has a problem, or models or exchange options differ between ranks. Local.

    Args:
        reports: Reports of all ranks, by rank.

    Raises:
        ValueError: On all ranks, since all have the same reports.
    """
    for rank, report in enumerate(reports):
        if report.problem is not None:
            raise ValueError(f"{report.problem} (found on rank {rank})")
    first = reports[0]
    for rank, report in enumerate(reports):
        if report.described != first.described:
            raise ValueError(_difference(rank, first.described, report.described))
        if report.how != first.how:
            raise ValueError(
                f"Ranks exchange in different ways: {first.how} on rank 0 and {report.how} on"
                f" rank {rank}. Give all the same compressor, gather and number of threads"
                " (OMP_NUM_THREADS). If it draws on devices,"
                " they must be of one model, or use compressor='randomk', which draws on the CPU."
            )


def _how(options: ExchangeOptions, collectives: Collectives) -> str:
    """Text of the exchange options, which must be equal on all ranks.

    It names the model of the device if all ranks must draw the same random numbers there: these
    depend on the model. It names the number of threads if all ranks compute the same on CPUs: sums,
    products of matrices and QR depend on it.
    """
    codecs = [options.compressor, *(compressor for _, compressor in options.groups)]
    draws = any(getattr(one, "randomness", None) == "shared" for one in codecs)
    draws_on = f", which draws on {collectives.streams.model}" if draws else ""
    # PowerSGD begins with a QR on the CPU, also for devices.
    factorizes = any(one is not None and one.all_reduces for one in codecs)
    steps_whole = options.is_of_gradients and not collectives.streams.model
    threads = f", with {get_num_threads()} threads" if factorizes or steps_whole else ""
    return f"{options!r}{draws_on}{threads}"


def _describe(module: Module, optimizer: Optimizer) -> Described:
    """Name and layout of each trained parameter, to be compared between ranks."""
    group_of = pieces.group_numbers(optimizer)
    return [
        (
            name,
            f"shape {tuple(parameter.shape)}, strides {bucket.storage_strides(parameter)},"
            f" {parameter.dtype}, parameter group {group_of[parameter]}",
        )
        for name, parameter in managed_parameters(module, optimizer)
    ]


def _shared_problem(optimizers: Sequence[Optimizer]) -> str | None:
    """Why the optimizers cannot train together: two hold one parameter. None means they can."""
    seen: dict[int, int] = {}
    for number, optimizer in enumerate(optimizers):
        for parameter in {*pieces.parameters_of(optimizer)}:
            other = seen.setdefault(id(parameter), number)
            if other != number:
                return (
                    f"A parameter of shape {tuple(parameter.shape)} stands in optimizer {other} and"
                    f" in optimizer {number}. Give each parameter to one optimizer only."
                )
    return None


def _local_problem(module: Module, optimizer: Optimizer, options: ExchangeOptions) -> str | None:
    """Why the engine cannot train the optimizer's parameters. None means that it can. Local.

    Reasons: momentum beside a compressor that keeps momentum, parameters of another module, no
    trained parameter, several devices, and complex parameters with a compressor.
    """
    own = {id(parameter) for parameter in module.parameters()}
    try:
        check_momentum(optimizer, options)
    except ValueError as error:
        return str(error)
    for number, group in enumerate(optimizer.param_groups):
        foreign = [p for p in group["params"] if id(p) not in own and p.requires_grad]
        if foreign:
            return (
                f"{type(optimizer).__name__}'s parameter group {number} holds {len(foreign)}"
                f" parameter(s) that are not the module's (first shape:"
                f" {tuple(foreign[0].shape)}). Build the optimizer from self.parameters()."
            )
    managed = managed_parameters(module, optimizer)
    if not managed:
        return "The optimizer holds no parameter of the module that requires a gradient. Add one."
    devices = {str(parameter.device) for _, parameter in managed}
    if len(devices) > 1:
        return f"Trained parameters lie on several devices ({', '.join(sorted(devices))}). Use one."
    others = [(name, one.dtype) for name, one in managed if not one.is_floating_point()]
    if others and options.compressor is not None:
        name, dtype = others[0]
        return (
            f"'{name}' has dtype {dtype}, and compressor={options.compressor.name!r} encodes only"
            " real numbers. Keep the real and imaginary part as two parameters, or use"
            " compressor='none'."
        )
    return None


def check_momentum(optimizer: Optimizer, options: ExchangeOptions) -> None:
    """Refuses an optimizer's momentum or weight decay if the compressor keeps momentum itself.

    Does nothing with other compressors. Weight decay is not refused if it is decoupled (AdamW) or
    if the compressor allows it (`takes_weight_decay`). To be called in every step, since a schedule
    may set momentum at any time.

    Raises:
        ValueError: Naming the parameter group, and what to use instead.
    """
    compressor = options.compressor
    if compressor is None or not compressor.brings_momentum:
        return
    for number, group in enumerate(optimizer.param_groups):
        if group.get("momentum") or group.get("beta1") or any(group.get("betas", ())[:1]):
            raise ValueError(
                f"compressor={compressor.name!r} keeps momentum itself, and parameter group"
                f" {number} of {type(optimizer).__name__} has momentum, too. Use an optimizer"
                " without momentum, such as SGD(momentum=0), with schedules that leave it so"
                " (OneCycleLR(cycle_momentum=False)), or another compressor. Otherwise gradients"
                " would be averaged twice."
            )
        is_decoupled = isinstance(optimizer, AdamW) or group.get("decoupled_weight_decay")
        if group.get("weight_decay") and not (compressor.takes_weight_decay or is_decoupled):
            raise ValueError(
                f"compressor={compressor.name!r} keeps momentum itself, and parameter group"
                f" {number} of {type(optimizer).__name__} has"
                f" weight_decay={group['weight_decay']:g}. Set weight_decay=0 and add this to the"
                " loss, so that decay passes through momentum: weight_decay / 2 *"
                " sum(p.square().sum() for p in parameters). Outside of momentum, decay would be"
                " (1 - momentum) times as strong as in an SGD with momentum."
            )


def _difference(rank: int, first: Described, other: Described) -> str:
    """Message about the first parameter that differs between rank 0 and `rank`.

    Args:
        rank: A rank whose description differs from rank 0's.
        first: Rank 0's description.
        other: Description of `rank`.
    """
    pairs = zip_longest(first, other, fillvalue=("", f"only {min(len(first), len(other))}"))
    left, right = next((left, right) for left, right in pairs if left != right)
    return (
        f"Ranks hold different models: rank 0 has '{left[0]}' ({left[1]}), rank {rank} has"
        f" '{right[0]}' ({right[1]}). Build the same model on every rank."
    )


def unheld_parameters(
    module: Module, optimizers: Sequence[Optimizer]
) -> list[tuple[str, Parameter]]:
    """(name, parameter) of each parameter of the module that none of `optimizers` holds. Local.

    Frozen ones, too, but not those in `ignored_names`. Waits for gathers if gates are closed.
    """
    held, ignored = {*pieces.parameters_of(*optimizers)}, ignored_names(module)
    named = module.named_parameters()
    return [(name, one) for name, one in named if one not in held and name not in ignored]
