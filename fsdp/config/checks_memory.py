"""Checks for fields that save memory or time: activations, offload, float8, LoRA, hooks, prefetch.

Called by fsdp/config/checks.py, in its order.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

from fsdp.base.errors import ConfigError
from fsdp.config.sections import ADAMS, FUSED, IN_PARTS, Config, DataSection, LoraSection


def check_memory(config: Config) -> None:
    if config.memory.cpu_offload and config.mesh.strategy == "ddp":
        raise ConfigError(
            "--memory.cpu_offload moves shards, and --mesh.strategy ddp has none.", "--mesh.strategy fsdp"
        )
    _check_activations(config)
    _check_loss(config)
    _check_nvme(config)
    _check_optimizer_offload(config)


def _check_activations(config: Config) -> None:
    memory = config.memory
    if memory.activation_budget < 1 and memory.activation_checkpointing != "none":
        raise ConfigError(
            f"--memory.activation_budget {memory.activation_budget:g} and --memory.activation_checkpointing "
            f"{memory.activation_checkpointing} both select what is kept.",
            "--memory.activation_checkpointing none",
        )
    for flag, value, wrong in (
        ("memory.activation_checkpointing", "ops", memory.activation_checkpointing == "ops"),
        ("memory.activation_budget", f"{memory.activation_budget:g}", memory.activation_budget < 1),
    ):
        if memory.activation_offload and wrong:
            raise ConfigError(
                f"--memory.activation_offload true and --{flag} {value} do not go together: "
                "torch passes what the latter keeps to no hook.",
                "--memory.activation_checkpointing full",
            )
    if memory.activation_checkpointing_every > 1 and memory.activation_checkpointing == "none":
        raise ConfigError(
            f"--memory.activation_checkpointing_every {memory.activation_checkpointing_every} "
            "has no effect under --memory.activation_checkpointing none.",
            "--memory.activation_checkpointing full",
        )


def _check_loss(config: Config) -> None:
    if config.memory.loss_chunk:
        others = (
            ("train.loss", config.train.loss, bool(config.train.loss)),
            ("precision.output", config.precision.output, config.precision.output != "auto"),
        )
        refuse_beside(f"memory.loss_chunk {config.memory.loss_chunk}", others, "--memory.loss_chunk 0")
    if config.train.z_loss:
        own = (("train.loss", config.train.loss, bool(config.train.loss)),)
        refuse_beside(f"train.z_loss {config.train.z_loss:g}", own, "--train.z_loss 0")


def _check_nvme(config: Config) -> None:
    memory = config.memory
    if memory.nvme == "off" and memory.nvme_dir:
        raise ConfigError(
            f"--memory.nvme_dir {memory.nvme_dir} has no effect alone.", "--memory.nvme optimizer"
        )
    if memory.nvme != "off" and not memory.nvme_dir:
        raise ConfigError(
            f"--memory.nvme {memory.nvme} needs a folder for its files.", "--memory.nvme_dir /tmp/nvme"
        )
    if memory.nvme == "all" and config.mesh.strategy == "ddp":
        raise ConfigError(
            "--memory.nvme all moves shards, and --mesh.strategy ddp has none.", "--memory.nvme optimizer"
        )
    if memory.nvme == "optimizer" and config.optim.name == "sgd" and not config.optim.momentum:
        raise ConfigError(
            "--memory.nvme optimizer: --optim.name sgd has no states without momentum.", "--memory.nvme off"
        )
    refuse_beside(
        f"optim.ema {config.optim.ema:g}",
        [("memory.nvme", memory.nvme, bool(config.optim.ema) and memory.nvme != "off")],
        "--memory.nvme off",
    )


def _check_optimizer_offload(config: Config) -> None:
    """The update goes part by part; an average of the weights follows whole updates."""
    memory, optim = config.memory, config.optim
    if not memory.optimizer_offload:
        return
    if optim.name == "sgd" and not optim.momentum:
        raise ConfigError(
            "--memory.optimizer_offload true: --optim.name sgd has no states without momentum.",
            "--memory.optimizer_offload false",
        )
    others = (
        ("memory.cpu_offload", "true", memory.cpu_offload),
        ("memory.nvme", memory.nvme, memory.nvme != "off"),
        ("optim.name", optim.name, optim.name not in IN_PARTS),
        ("optim.state", optim.state, optim.state == "8bit"),
        ("optim.ema", f"{optim.ema:g}", bool(optim.ema)),
    )
    refuse_beside("memory.optimizer_offload true", others, "--memory.optimizer_offload false")


def check_comm(config: Config) -> None:
    if config.optim.name == "sgd" and config.optim.fused == "true" and config.mesh.strategy != "ddp":
        raise ConfigError(
            "--optim.fused true: torch has no fused SGD for sharded parameters "
            f"(--mesh.strategy {config.mesh.strategy}).",
            "--optim.fused auto",
        )
    for name in ("all_gather", "reduce_scatter"):
        if config.comm.allocate_from_group and getattr(config.comm, name):
            raise ConfigError(
                f"--comm.allocate_from_group true and --comm.{name} {getattr(config.comm, name)} do not go "
                "together: your own collective allocates its buffers.",
                "--comm.allocate_from_group false",
            )
    if config.mesh.strategy != "ddp":
        return
    for name in ("all_reduce_hook", "all_gather", "reduce_scatter", "divide_by", "allocate_from_group"):
        if value := getattr(config.comm, name):
            raise ConfigError(
                f"--comm.{name} {value} applies to FSDP, not to --mesh.strategy ddp.", "--mesh.strategy fsdp"
            )
    if config.mesh.accumulate == "shard":
        raise ConfigError(
            "--mesh.accumulate shard scatters gradients, and --mesh.strategy ddp has no shards.",
            "--mesh.accumulate every",
        )


def check_float8(config: Config) -> None:
    speed, precision, reshard = config.speed, config.precision, config.mesh.reshard_after_forward
    if speed.float8 == "off":
        if speed.float8_emulate:
            raise ConfigError("--speed.float8_emulate true has no effect alone.", "--speed.float8 tensorwise")
        return
    others = (
        ("lora.rank", config.lora.rank, bool(config.lora.rank)),
        ("memory.cpu_offload", "true", config.memory.cpu_offload),
        ("memory.nvme", "all", config.memory.nvme == "all"),
        ("precision.master", "fp64", precision.master == "fp64"),
        ("precision.param", "fp16", precision.param == "fp16"),
        # torch gathers a float8 weight again only from all of its shards
        (
            "mesh.reshard_after_forward",
            reshard,
            speed.float8 == "tensorwise" and reshard.isdigit() and int(reshard) > 1,
        ),
    )
    refuse_beside(f"speed.float8 {speed.float8}", others, "--speed.float8 off")


def check_ahead(config: Config) -> None:
    """Prefetching needs gathers, or reader threads."""
    for way in ("prefetch_forward", "prefetch_backward"):
        if config.mesh.strategy == "ddp" and (count := getattr(config.speed, way)) > 1:
            raise ConfigError(
                f"--speed.{way} {count} gathers ahead, but --mesh.strategy ddp gathers nothing.",
                f"--speed.{way} 1",
            )
    if not config.data.workers and config.data.prefetch != DataSection().prefetch:
        raise ConfigError(
            f"--data.prefetch {config.data.prefetch} is read by threads, but --data.workers is 0.",
            "--data.workers 1",
        )


def check_optimizer(config: Config) -> None:
    """A user's optimizer keeps states of its own, and has the kernels that its factory selects. Muon's update
    is not elementwise: it cannot go part by part.
    """
    optim, memory = config.optim, config.memory
    others = (
        ("memory.nvme", memory.nvme, memory.nvme != "off" and optim.name not in IN_PARTS),
        ("optim.fused", optim.fused, optim.fused != "auto" and optim.name not in FUSED),
    )
    refuse_beside(f"optim.name {optim.name}", others, "--optim.name adamw")


def check_states(config: Config) -> None:
    optim = config.optim
    if optim.state == "master":
        return
    others = (
        ("optim.name", optim.name, optim.name not in ADAMS),
        ("optim.fused", "true", optim.fused == "true"),
        ("precision.master", "fp64", config.precision.master == "fp64"),
        ("memory.nvme", config.memory.nvme, optim.state == "8bit" and config.memory.nvme != "off"),
    )
    refuse_beside(f"optim.state {optim.state}", others, "--optim.state master")


def check_lora(config: Config) -> None:
    lora, model = config.lora, config.model
    if not lora.rank and lora != LoraSection():
        field = next(
            f.name
            for f in dataclasses.fields(lora)
            if getattr(lora, f.name) != getattr(LoraSection(), f.name)
        )
        raise ConfigError(
            f"--lora.{field} {getattr(lora, field)} has no effect without adapters.", "--lora.rank 8"
        )
    if lora.rank and model.frozen:
        raise ConfigError(
            f"--model.frozen {model.frozen} has no effect beside --lora.rank {lora.rank}: "
            "LoRA freezes the whole model.",
            "give one of the two",
        )


def check_frozen(config: Config) -> None:
    frozen, mesh, memory = config.precision.frozen, config.mesh, config.memory
    if frozen == "auto":
        return
    if not config.lora.rank and not config.model.frozen:
        raise ConfigError(
            f"--precision.frozen {frozen} has no effect: every parameter is trained.", "--lora.rank 8"
        )
    others = (
        # DDP has no policy that would cast them
        ("mesh.strategy", "ddp", mesh.strategy == "ddp"),
        ("memory.nvme", "all", memory.nvme == "all"),
        ("speed.float8", config.speed.float8, config.speed.float8 != "off"),
    )
    refuse_beside(f"precision.frozen {frozen}", others, "--precision.frozen auto")


def check_masters(config: Config) -> None:
    """bf16 masters need an update that rounds stochastically: Adam's."""
    precision, optim, memory = config.precision, config.optim, config.memory
    if precision.master != "bf16":
        return
    others = (
        ("optim.name", optim.name, optim.name not in ADAMS),
        ("optim.fused", "true", optim.fused == "true"),
        ("optim.ema", optim.ema, bool(optim.ema)),
        ("precision.param", "fp16", precision.param == "fp16"),
        # DDP reduces gradients in the dtype of the parameters
        ("mesh.strategy", "ddp", config.mesh.strategy == "ddp"),
        ("memory.nvme", "all", memory.nvme == "all"),
        ("speed.float8", config.speed.float8, config.speed.float8 != "off"),
    )
    refuse_beside("precision.master bf16", others, "--precision.master fp32")


def refuse_beside(flag: str, others: Iterable[tuple[str, object, bool]], hint: str) -> None:
    """Raises ConfigError for the first of `others`, (flag, value, whether it conflicts), that conflicts."""
    for other, value, wrong in others:
        if wrong:
            raise ConfigError(f"--{flag} and --{other} {value} do not go together.", hint)


MEMORY_CHECKS = (
    check_memory,
    check_optimizer,
    check_frozen,
    check_masters,
    check_lora,
    check_comm,
    check_float8,
    check_states,
    check_ahead,
)
