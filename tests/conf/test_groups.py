"""Every file in conf composes, builds what it names, and calls options as the constructor does."""

import inspect
from pathlib import Path

import pytest
import torch
from hydra.utils import get_object, instantiate
from omegaconf import DictConfig, OmegaConf
from torch.nn.parallel import DistributedDataParallel

from lightning_dear.apps.train import train
from lightning_dear.compression import COMPRESSORS, TopK, resolve_compressor
from lightning_dear.paths import conf_dir
from tests.conf.composing import composed, options_of

# Recipes are jobs of their own, and no groups: tests/apps/test_recipe.py.
GROUPS = sorted(
    path.name for path in conf_dir().iterdir() if path.is_dir() and path.name != "recipe"
)
CHOICES = [(group, option) for group in GROUPS for option in options_of(group)]
FILES = sorted(conf_dir().rglob("*.yaml"))
DATA_OF = {"gpt": "source_corpus"}
OPTIONAL_MODULES = {
    "resnet50": "torchvision",
    "densenet201": "torchvision",
    "vgg16": "torchvision",
    "inception_v4": "timm",
    "torchft": "torchft",
    "tensorboard": "tensorboard",
    "wandb": "wandb",
    "mlflow": "mlflow",
}


def needs_installed(option: str) -> None:
    """Skip where the module behind `option` is an extra that is not installed."""
    if option in OPTIONAL_MODULES:
        pytest.importorskip(OPTIONAL_MODULES[option], reason=f"{option}: its extra is missing")


@pytest.mark.parametrize(("group", "option"), CHOICES)
def test_every_choice_composes_and_resolves(group, option, tmp_path):
    data = DATA_OF.get(option, "digits") if group == "model" else None
    pair = [f"data={data}"] if data else []
    with composed(tmp_path, f"{group}={option}", *pair) as config:
        resolved = OmegaConf.to_container(config, resolve=True, throw_on_missing=True)
    assert {"task_name", "seed", "ckpt_path", "model", "data", "trainer"} <= resolved.keys()


@pytest.mark.parametrize("option", options_of("model"))
def test_every_model_is_built(option, tmp_path):
    needs_installed(option)
    data = DATA_OF.get(option, "digits")
    with composed(tmp_path, f"model={option}", f"data={data}") as config, torch.device("meta"):
        model = instantiate(config.model, _convert_="all")
    assert sum(p.numel() for p in model.parameters()) > 500_000


@pytest.mark.parametrize("option", options_of("data"))
def test_every_data_module_is_built(option, tmp_path):
    with composed(tmp_path, f"data={option}") as config:
        data = instantiate(config.data, _convert_="all")
    assert data.batch_size == config.data.batch_size


@pytest.mark.parametrize("option", options_of("optimizer"))
def test_every_optimizer_is_built(option, tmp_path):
    with composed(tmp_path, f"optimizer={option}") as config:
        optimizer = instantiate(config.optimizer, _convert_="all")
    built = optimizer([torch.nn.Parameter(torch.zeros(1))])
    assert built.param_groups[0]["lr"] == config.optimizer.lr


@pytest.mark.parametrize("option", options_of("scheduler"))
def test_every_scheduler_is_built(option, tmp_path):
    with composed(tmp_path, f"scheduler={option}") as config:
        scheduler = instantiate(config.scheduler) if config.scheduler is not None else None
    assert (scheduler is None) is (option == "none")


@pytest.mark.parametrize("option", options_of("strategy"))
@pytest.mark.parametrize("cluster", ["local", "single_process"])
def test_every_strategy_gets_a_trainer(option, cluster, tmp_path):
    needs_installed(option)
    overrides = (f"strategy={option}", f"cluster={cluster}", "callbacks=none", "logger=none")
    with composed(tmp_path, *overrides) as config:
        trainer = train.build_trainer(config)
    is_single = option == "single" or cluster == "single_process"
    assert trainer.num_devices == (1 if is_single else 2)
    # One process starts no others, so it needs nobody to watch them.
    assert (trainer.strategy.launcher is None) is is_single


@pytest.mark.parametrize("option", options_of("fusion"))
def test_every_fusion_reaches_the_strategy(option, tmp_path):
    with composed(tmp_path, f"fusion={option}") as config:
        strategy = instantiate(config.strategy, _convert_="all")
        chosen = instantiate(config.fusion, _convert_="all")
    assert vars(strategy._fusion) == vars(chosen)
    assert type(strategy._fusion) is type(chosen)


@pytest.mark.parametrize("option", options_of("compressor"))
def test_every_compressor_reaches_the_strategy(option, tmp_path):
    with composed(tmp_path, f"compressor={option}") as config:
        strategy = instantiate(config.strategy, _convert_="all")
    assert strategy._options.compressor == resolve_compressor(option)


@pytest.mark.parametrize("density", [0.01, 0.05])
def test_options_of_a_compressor_reach_the_strategy(density, tmp_path):
    with composed(tmp_path, "compressor=topk", f"compressor.density={density}") as config:
        strategy = instantiate(config.strategy, _convert_="all")
    assert strategy._options.compressor == TopK(density=density)


def test_every_compressor_has_a_config():
    assert set(options_of("compressor")) == set(COMPRESSORS)


@pytest.mark.parametrize("option", options_of("callbacks"))
def test_every_callback_is_built(option, tmp_path):
    with composed(tmp_path, f"callbacks={option}") as config:
        callbacks = train.build_all(config.get("callbacks"))
    assert len(callbacks) == {"none": 0, "default": 3, "early_stopping": 4}.get(option, 1)


@pytest.mark.parametrize("option", options_of("logger"))
def test_every_logger_is_built(option, tmp_path):
    needs_installed(option)
    with composed(tmp_path, f"logger={option}") as config:
        loggers = train.build_all(config.get("logger"))
    assert len(loggers) == (0 if option == "none" else 1)


@pytest.mark.parametrize("option", options_of("cluster"))
def test_a_cluster_is_launch_and_network(option):
    cluster = OmegaConf.load(conf_dir() / "cluster" / f"{option}.yaml")
    if "defaults" in cluster:
        # The rest is another one's.
        assert set(cluster) <= {"defaults", "num_hosts", "ranks_per_host", "rate_mbit"}
        return
    counts = ["num_hosts", "ranks_per_host"]
    hosts = [*counts, "rate_mbit", "mtu"]
    hosts += ["congestion_control", "socket_buffer_bytes", "delay_ms", "loss"]
    is_planned = "source" in cluster
    is_of_one_collective = "algorithm" in cluster
    # Ranks of an emulated host share its namespace, and nothing is shaped there.
    has_link_within = is_planned and not is_of_one_collective and option != "emulated"
    assert list(cluster) == [
        *(hosts if option == "emulated" else []),
        *(["source"] if is_planned else []),
        *(counts if option != "emulated" else []),
        "num_nodes",
        "devices",
        "accelerator",
        "interface",
        *(["algorithm", "only_world_size"] if is_of_one_collective else []),
        "alpha_s",
        "beta_s_per_byte",
        *(["within"] if has_link_within else []),
    ]
    # Hosts and ranks have these names in all programs. Lightning's follow.
    assert (cluster.num_nodes, cluster.devices) == (cluster.num_hosts, cluster.ranks_per_host)
    if "within" in cluster:
        assert list(cluster.within) == ["alpha_s", "beta_s_per_byte"]


@pytest.mark.parametrize(
    ("option", "variables"),
    [
        ("torchrun", {"GROUP_WORLD_SIZE": "3", "LOCAL_WORLD_SIZE": "4"}),
        ("slurm", {"SLURM_NNODES": "3", "SLURM_NTASKS_PER_NODE": "4"}),
    ],
)
def test_a_launcher_outside_says_how_many_there_are(option, variables, tmp_path, monkeypatch):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with composed(tmp_path, f"cluster={option}") as config:
        assert (config.trainer.num_nodes, config.trainer.devices) == (3, 4)


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(conf_dir())))
def test_options_are_named_as_the_constructor_names_them(file: Path):
    for node in targets(OmegaConf.load(file)):
        needs_installed(file.stem)
        names = {str(name) for name in node if not str(name).startswith("_")}
        assert names <= keywords(node._target_), node._target_


def targets(node: object) -> list[DictConfig]:
    """Return the nodes at and below `node` that name something to call."""
    if not isinstance(node, DictConfig):
        return []
    below = [found for key in node for found in targets(node._get_node(key))]
    return [node, *below] if "_target_" in node else below


def keywords(target: str) -> set[str]:
    """Return the keywords that `target` accepts."""
    names = set(inspect.signature(get_object(target)).parameters)
    if target.endswith("DDPStrategy"):
        # The strategy's **kwargs go to torch's wrapper.
        names |= set(inspect.signature(DistributedDataParallel).parameters)
    if target in ("torchvision.models.get_model", "timm.create_model"):
        # Their **kwargs go to the network.
        names.add("num_classes")
    if target == "torchvision.models.get_model":
        names.add("weights")
    return names


def test_the_check_of_names_sees_a_wrong_one():
    node = OmegaConf.create({"_target_": "torch.optim.SGD", "learning_rate": 1.0})
    assert [found._target_ for found in targets(OmegaConf.create({"a": node}))] == [
        "torch.optim.SGD"
    ]
    assert "learning_rate" not in keywords("torch.optim.SGD")
    assert "lr" in keywords("torch.optim.SGD")
