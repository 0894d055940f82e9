"""Each function of fsdp/base/torch_private.py on the installed torch. A failure names the torch version, what
changed there, and which of our functions depends on it.

`make test-torch TORCH=2.15.0` runs this file, and the quick tests of the rooms beside it, on another torch.
"""

from __future__ import annotations

import contextlib
import gc
import importlib.util
import inspect
import io
import pickletools
import subprocess
import sys
import traceback
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from fsdp.base import torch_private as private
from fsdp.distributed.env import DistEnv
from fsdp.watch import observe
from tests.support.processes import eventually
from tests.support.world import run_world

ROOT = Path(__file__).parents[2]


def holds(condition: object, function: str, what: str) -> None:
    assert condition, f"torch {torch.__version__}: {what}. Mend {function} of fsdp/base."


# ---------------------------------------------------------------- names


def test_the_name_of_the_backward_function() -> None:
    weight, stacks = torch.ones(2, requires_grad=True), []
    weight.register_hook(lambda _: stacks.append([(f.filename, f.name) for f in traceback.extract_stack()]))
    weight.sum().backward()
    file, name = stacks[0][-2]
    holds(observe.in_backward([(file, 1, name)]), "observe.in_backward", f"it is {file} {name}")


@pytest.mark.parametrize("package", ["_dynamo", "_inductor", "_functorch"])
def test_the_packages_of_the_compiler(package: str) -> None:
    holds(importlib.util.find_spec(f"torch.{package}"), "observe.COMPILER", f"{package} is gone")
    assert observe.COMPILER.search(f"/x/site-packages/torch/{package}/some.py")


@pytest.mark.long
def test_the_threads_that_the_compiler_leaves_behind() -> None:
    from torch._inductor.compile_worker.subproc_pool import SubprocPool

    def waits() -> bool:
        stack = traceback.extract_stack(sys._current_frames()[pool.read_thread.ident or 0])
        return any(observe.COMPILER_HELPERS in frame.filename for frame in stack)

    pool = SubprocPool(1)
    try:
        eventually("a frame of it is in observe.COMPILER_HELPERS", waits, 20)
    finally:
        pool.shutdown()


@pytest.mark.long
def test_names_that_wrappers_add() -> None:
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    compiled: Any = torch.compile(torch.nn.Linear(1, 1))
    wrapped = [*checkpoint_wrapper(torch.nn.Linear(1, 1)).named_modules(), *compiled.named_children()]
    added = {name for name, _ in wrapped if name}
    holds(added == private.WRAPPER_NAMES, "private.WRAPPER_NAMES", f"wrappers add {sorted(added)}")


@pytest.mark.long
def test_what_an_optimizer_imports_in_its_first_step() -> None:
    program = (
        "import sys, torch; p = torch.nn.Parameter(torch.ones(2)); p.grad = torch.ones(2)\n"
        "torch.optim.AdamW([p]).step(); print(*sys.modules)"
    )
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    imported = private.OPTIMIZER_IMPORT in found.stdout.split()
    holds(imported, "private.OPTIMIZER_IMPORT", "it is imported no more")


@pytest.mark.parametrize("name", sorted(private.WRITE_ONLY_OPS))
def test_the_operators_that_only_write(name: str) -> None:
    holds(hasattr(torch.ops.aten, name), "private.WRITE_ONLY_OPS", f"aten::{name} is gone")


class Operators(private.TorchDispatchMode):
    """The operators that run inside it, with their outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Any] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(func)
        return func(*args, **(kwargs or {}))


def operators_of_collectives(env: DistEnv) -> list[set[str]]:
    part, whole = torch.ones(2), torch.ones(2 * env.world_size)
    found = []
    for collective in (
        lambda: dist.all_gather_into_tensor(whole, part),
        lambda: dist.all_gather([torch.empty(2) for _ in range(env.world_size)], part),
        lambda: dist.reduce_scatter_tensor(part, whole),
        lambda: dist.all_reduce(part),
        lambda: dist.broadcast(part, 0),
    ):
        with Operators() as mode:
            collective()
        found.append({op.name().partition("::")[2] for op in mode.seen if op.namespace == "c10d"})
    return found


@pytest.mark.long
def test_the_operators_of_collectives() -> None:
    expected = ("all_gather", "all_gather", "reduce_scatter", "all_reduce", "all_reduce")
    for operators, collective in zip(run_world(2, operators_of_collectives)[0], expected, strict=True):
        known = {private.COLLECTIVE_OPS.get(name) for name in operators}
        holds(collective in known, "private.COLLECTIVE_OPS", f"{collective} runs {operators}")


# ---------------------------------------------------------------- FSDP2


def sharded() -> Any:
    """Two linear layers, each a unit; the root holds a scale of its own."""
    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 3))
    model.scale = nn.Parameter(torch.ones(4))
    model.register_forward_hook(lambda module, _, output: output * module.scale.sum())
    mesh = dist.init_device_mesh("cpu", (dist.get_world_size(),))
    for unit in (*model, model):
        fully_shard(unit, mesh=mesh)
    return model


def step(model: nn.Module) -> Tensor:
    loss: Tensor = model(torch.ones(2, 3)).square().sum()
    loss.backward()
    return loss.detach()


def what_groups_hold(env: DistEnv) -> dict[str, Any]:
    model = sharded()
    groups = list(private.parameter_groups(model))
    found: dict[str, Any] = {"groups": len(groups), "before": kinds(groups)}
    late: list[Any] = []
    loss = model(torch.ones(2, 3)).square().sum()
    found["names"] = [private.group_name(group) for group in groups]
    found["parameters"] = [private.parameter_name(one) for group in groups for one in group.fsdp_params]
    found["order"] = [private.group_name(group) for group in private.forward_order(groups[0])]
    found["frees"] = [private.frees_after_forward(group) for group in groups]
    loss.register_hook(
        lambda _: private.at_end_of_backward(lambda: late.extend(private.unreduced_groups(groups)))
    )
    loss.backward()
    found["late"], found["after"] = late, kinds(groups)
    gradients = [private.sharded_gradient(one) for group in groups for one in group.fsdp_params]
    found["gradients"] = [isinstance(gradient, DTensor) for gradient in gradients]
    model.zero_grad()
    model.set_requires_gradient_sync(False)
    step(model)
    found["kept"] = [
        private.accumulated_gradient(one) is not None or private.gathered_gradient(one) is not None
        for group in groups
        for one in group.fsdp_params
    ]
    return found


def kinds(groups: list[Any]) -> set[str]:
    held = (pair for group in groups for pair in private.tensors_by_kind(group))
    return {kind for kind, tensor in held if tensor is not None and tensor.numel()}


def test_what_the_groups_of_fsdp_hold() -> None:
    found = run_world(2, what_groups_hold)[0]
    holds(found["groups"] == 3, "private.parameter_groups", f"{found['groups']} groups of 3 are found")
    holds(found["before"] == {"parameters"}, "private.tensors_by_kind", f"at rest it finds {found['before']}")
    holds("gradients" in found["after"], "private.tensors_by_kind", "gradients are not found")
    holds(found["names"] == ["", "0", "1"], "private.group_name", f"groups are named {found['names']}")
    expected = ["scale", "0.weight", "0.bias", "1.weight", "1.bias"]
    holds(found["parameters"] == expected, "private.parameter_name", f"names are {found['parameters']}")
    holds(found["order"] == ["0", "1", ""], "private.forward_order", f"the order is {found['order']}")
    holds(found["frees"] == [False, True, True], "private.frees_after_forward", f"it is {found['frees']}")
    late = found["late"] == [(0, [True]), (1, [True, True])]
    holds(late, "private.unreduced_groups", f"it finds {found['late']}")
    holds(all(found["gradients"]), "private.sharded_gradient", "a reduced gradient is not found")
    holds(all(found["kept"]), "private.accumulated_gradient", "an unreduced gradient is not found")


def order_of_methods(env: DistEnv) -> list[tuple[str, str, bool, bool]]:
    model, seen = sharded(), []

    def noted(name: str) -> private.AroundMethod:
        def around(group: Any, run: private.Run) -> Any:
            seen.append((name, private.group_name(group), private.gathers(group), private.reduces(group)))
            return run()

        return around

    methods = ("unshard", "wait_for_unshard", "post_backward", "finalize_backward")
    step(model)
    before = [vars(private.FSDPParamGroup)[name] for name in methods]
    with private.around_methods({name: noted(name) for name in methods}):
        step(model)
    assert [vars(private.FSDPParamGroup)[name] for name in methods] == before
    return seen


def test_the_methods_of_fsdp_are_wrapped_and_restored() -> None:
    seen = run_world(2, order_of_methods)[0]
    called = {(name, group) for name, group, _, _ in seen}
    for name in ("unshard", "wait_for_unshard", "post_backward", "finalize_backward"):
        groups = {group for method, group in called if method == name}
        holds(groups == {"", "0", "1"}, "private.around_methods", f"{name} is called for {groups} alone")
    waits = [gathers for name, _, gathers, _ in seen if name == "wait_for_unshard"]
    holds(any(waits), "private.gathers", "no wait finds an all-gather under way")
    reductions = [reduces for name, _, _, reduces in seen if name == "post_backward"]
    holds(reductions[0] is False, "private.reduces", "the first reduction finds another under way")
    holds(any(reductions[1:]), "private.reduces", "no later reduction finds the one before it")


def what_patches_see(env: DistEnv) -> dict[str, Any]:
    model = sharded()
    found: dict[str, Any] = {"collectives": 0, "gradients": [], "reduced": [], "resized": set()}
    step(model)

    def around(run: private.Run, gradients: Any) -> Any:
        found["collectives"] += 1
        found["gradients"] += [tuple(g.shape) for g in gradients]
        return run()

    with (
        private.around_collectives(around),
        private.before_reductions(
            lambda some: found["reduced"].append([private.parameter_name(one) for one in some])
        ),
        private.after_resizes(lambda storage: found["resized"].add(storage.nbytes())),
    ):
        step(model)
    module: Any = private._fsdp_param_group
    found["restored"] = [getattr(module, name).__module__ for name in private.COLLECTIVE_FUNCTIONS]
    found["resize_"] = "resize_" in vars(torch.UntypedStorage)
    return found


def test_collectives_reductions_and_resizes_of_fsdp_are_seen() -> None:
    found = run_world(2, what_patches_see)[0]
    # A gather and its copy for three groups, forward; for one of them again, backward; three reductions.
    holds(found["collectives"] >= 9, "private.around_collectives", f"it sees {found['collectives']} calls")
    expected = {(5, 3), (5,), (3, 5), (3,), (4,)}
    shapes = set(found["gradients"])
    holds(shapes == expected, "private.around_collectives", f"gradients: {shapes}")
    # The root's and the first unit's last: their inputs need no gradient.
    reduced = [["1.weight", "1.bias"], ["scale"], ["0.weight", "0.bias"]]
    holds(found["reduced"] == reduced, "private.before_reductions", f"it sees {found['reduced']}")
    holds({0, 5 * 3 * 4 + 4 * 3} & found["resized"], "private.after_resizes", f"it sees {found['resized']}")
    restored = all(name.startswith("torch.") for name in found["restored"]) and not found["resize_"]
    holds(restored, "private._wrapped", "a patch stays behind")


def cut_by_another(env: DistEnv) -> tuple[int, bool]:
    cuts: list[int] = []

    def cut(tensor: Tensor, count: int, dim: int) -> list[Tensor]:
        cuts.append(count)
        pieces = list(torch.chunk(tensor, count, dim))
        return pieces + [tensor.narrow(dim, 0, 0)] * (count - len(pieces))

    plain = sharded()
    with private.chunks_by(cut):
        other = sharded()
    pairs = zip(plain.parameters(), other.parameters(), strict=True)
    return len(cuts), all(torch.equal(a.to_local(), b.to_local()) for a, b in pairs)


def test_fsdp_cuts_parameters_by_another_function() -> None:
    used, equal = run_world(2, cut_by_another)[0]
    holds(used >= 5, "chunks_by", f"FSDP calls it {used} times for 5 parameters")
    holds(equal, "chunks_by", "FSDP reads other chunks")


def moved_shards(env: DistEnv) -> tuple[bool, bool]:
    model = sharded()
    expected = step(model)
    model.zero_grad()
    rooms: list[Tensor] = []

    def make(data: Tensor) -> Tensor:
        rooms.append(data.clone())
        return rooms[-1]

    for group in private.parameter_groups(model):
        for one in group.fsdp_params:
            private.move_padded_shard(one, make)
    held = {id(room.untyped_storage()) for room in rooms}
    inside = {id(p.to_local().untyped_storage()) for p in model.parameters()} == held
    return inside, torch.equal(step(model), expected)


def gathered_together(env: DistEnv) -> bool:
    model = nn.Linear(3, 5)
    fully_shard(model)
    model(torch.ones(2, 3)).sum().backward()
    private.gather_together(groups := private.whole_groups(model))
    return bool(groups) and groups[0].is_unsharded and type(model.weight) is nn.Parameter


def test_whole_shards_are_gathered_together() -> None:
    holds(run_world(1, gathered_together) == [True], "gather_together", "groups are not gathered by it")


def test_the_memory_under_sharded_parameters_is_replaced() -> None:
    inside, equal = run_world(2, moved_shards)[0]
    holds(inside, "private.move_padded_shard", "parameters lie elsewhere")
    holds(equal, "private.move_padded_shard", "FSDP gathers other numbers")


def test_fsdp_sees_the_tensors_of_containers_alone() -> None:
    tensor = torch.ones(2, requires_grad=True)
    seen = private.seen_tensors((tensor, {"more": [tensor, tensor.detach(), 3]}))
    holds([one is tensor for one in seen] == [True, True], "private.seen_tensors", f"it finds {seen}")
    holds(not private.seen_tensors({tensor}), "private.seen_tensors", "it finds those of a set")


def writes_of_forwards(env: DistEnv) -> list[dict[str, bool]]:
    """What each forward wrote into: nothing, values in place, other memory."""
    model = sharded()
    found: list[dict[str, bool]] = []

    def look(module: nn.Module, inputs: Any, output: Any) -> None:
        groups = [group for group in private.parameter_groups(model) if module in group.modules]
        found[-1] |= {
            private.parameter_name(one): private.is_written(one)
            for group in groups
            for one in group.fsdp_params
        }

    def write(module: Any, inputs: Any) -> None:
        if len(found) == 2:
            module.weight.data.mul_(2)
        elif len(found) == 3:
            module.weight.data = module.weight.data.clone()

    for module in (*model, model):
        module.register_forward_hook(look, prepend=True)
    model[1].register_forward_pre_hook(write)
    for _ in range(3):
        found.append({})
        model(torch.ones(2, 3))
    return found


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_forward_that_writes_into_a_gathered_parameter_is_found(ranks: int) -> None:
    plain, *written = run_world(ranks, writes_of_forwards)[0]
    holds(not any(plain.values()), "private.is_written", f"it finds writes in {plain}")
    for one in written:
        holds([n for n, seen in one.items() if seen] == ["1.weight"], "private.is_written", f"it finds {one}")


def replaced_in_forwards(env: DistEnv) -> list[tuple[str, list[bool]]]:
    """Each module, and which of its groups have a replaced parameter before its forward: in a call of its own
    weights, of others, and of its own again.
    """
    model = sharded()
    found: list[tuple[str, list[bool]]] = []

    def look(module: nn.Module, inputs: Any) -> None:
        groups = [group for group in private.parameter_groups(model) if module in group.modules]
        seen = [private.replaced_parameter(group) is not None for group in groups]
        found.append((next(n for n, one in model.named_modules() if one is module), seen))

    for module in (*model, model):
        module.register_forward_pre_hook(look, prepend=True)
    others = {"1.weight": torch.zeros(2, 3)}
    model(torch.ones(2, 3))
    found.clear()
    torch.func.functional_call(model, others, torch.ones(2, 3))
    model(torch.ones(2, 3))
    return found


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_weight_that_functional_call_replaces_is_found(ranks: int) -> None:
    found = run_world(ranks, replaced_in_forwards)[0]
    seen = [name for name, some in found if any(some)]
    holds(seen == ["1"], "private.replaced_parameter", f"it finds {found}")


def test_the_key_of_a_modules_extra_state() -> None:
    class Stateful(nn.Module):
        def get_extra_state(self) -> int:
            return 3

    keys = list(nn.ModuleDict({"one": Stateful()}).state_dict())
    holds(keys == [f"one.{private.EXTRA_STATE}"], "private.EXTRA_STATE", f"the keys are {keys}")


# ---------------------------------------------------------------- process groups, DDP, autograd


def alone(code: str, **environment: str) -> str:
    """Runs code in a process of its own; its output."""
    setup = "import torch.distributed as dist; from fsdp.base import torch_private as private\n"
    env = {"PATH": "", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", **environment}
    done = subprocess.run(
        [sys.executable, "-c", setup + code], cwd=ROOT, env=env, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, f"torch {torch.__version__}: {done.stderr[-1500:]}"
    return done.stdout.strip()


ONE_RANK = "dist.init_process_group('gloo', rank=0, world_size=1, store=dist.HashStore())\n"


@pytest.mark.long
def test_all_groups_are_aborted() -> None:
    said = alone(ONE_RANK + "dist.new_group([0])\nprivate.abort_all_groups()\nprint(dist.is_initialized())")
    holds(said == "False", "private.abort_all_groups", "a process group is left")


@pytest.mark.long
def test_all_groups_are_listed() -> None:
    said = alone(ONE_RANK + "dist.new_group([0])\nprint(len(private.all_groups()))")
    holds(said == "2", "private.all_groups", f"it lists {said} of two groups")


@pytest.mark.long
def test_functional_collectives_are_waited_for_by_one_attribute() -> None:
    said = alone(
        ONE_RANK
        + "import torch\nmodule = private.functional_collectives()\nwait, waits = module.wait_tensor, []\n"
        "module.wait_tensor = lambda tensor: waits.append(1) or wait(tensor)\n"
        "ones = torch.ones(2)\nmodule.all_to_all_single_autograd(ones, [2], [2], dist.group.WORLD).sum()\n"
        "print(len(waits))"
    )
    # Of a forward: torch 2.11 waits for the exchange of its backward in C++.
    holds(said == "1", "private.functional_collectives", f"{said} waits of an exchange")


@pytest.mark.long
def test_the_fake_group_has_any_size() -> None:
    said = alone(
        "import torch\nprivate.init_fake_group(5, 4096)\nx = torch.ones(3)\ndist.all_reduce(x)\n"
        "print(dist.get_rank(), dist.get_world_size(), x.tolist())"
    )
    holds(said == "5 4096 [1.0, 1.0, 1.0]", "private.init_fake_group", f"it gives {said}")


@pytest.mark.long
def test_the_flight_recorder_is_found() -> None:
    found = alone(
        ONE_RANK + "from torch._C import _distributed_c10d as c\nprint(private.flight_recorder_entries(), "
        "hasattr(c, '_dump_fr_trace_json') or hasattr(c, '_dump_nccl_trace_json'))"
    )
    holds(found.endswith("] True"), "private.flight_recorder_entries", f"no recorder is found: {found}")


def missed_by_ddp(env: DistEnv) -> str:
    model = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])
    model.forward = lambda x: model[0](x)  # type: ignore[method-assign, assignment]
    runs = nn.parallel.DistributedDataParallel(model)
    runs(torch.ones(1, 2)).sum().backward()
    try:
        private.check_buckets_reduced(runs)
    except RuntimeError as error:
        return str(error)
    return ""


def test_ddp_finds_buckets_that_are_not_reduced() -> None:
    said = run_world(2, missed_by_ddp)[0]
    holds(said, "private.check_buckets_reduced", "a parameter without a gradient is not found")


def test_a_callback_runs_when_all_gradients_are_computed() -> None:
    first, last, seen = torch.ones(2, requires_grad=True), torch.ones(2, requires_grad=True), []
    loss = (first * 2 * last).sum()
    loss.register_hook(lambda _: private.at_end_of_backward(lambda: seen.append((first.grad, last.grad))))
    loss.backward()
    after = len(seen) == 1 and None not in seen[0]
    holds(after, "private.at_end_of_backward", "it runs before the gradients")


# ---------------------------------------------------------------- fake tensors, tensors, modules, optimizers


def test_attention_runs_a_known_operator() -> None:
    query = torch.ones(1, 1, 4, 8, requires_grad=True)
    with Operators() as mode:
        nn.functional.scaled_dot_product_attention(query, query, query, is_causal=True)
    known = private.product_operators() & set(mode.seen)
    holds(known, "private.product_operators", f"attention runs {mode.seen}")


def test_a_float8_product_runs_the_known_operator() -> None:
    ones, scale = torch.ones(16, 16).to(torch.float8_e4m3fn), torch.tensor(1.0)
    # not every processor has kernels
    with Operators() as mode, contextlib.suppress(RuntimeError, NotImplementedError):
        torch._scaled_mm(ones, ones.t(), scale, scale, out_dtype=torch.bfloat16)
    known = private.product_operators() & set(mode.seen)
    holds(known, "private.product_operators", f"a product runs {mode.seen}")


def test_varlen_attention_runs_a_known_operator() -> None:
    varlen = pytest.importorskip("torch.nn.attention.varlen").varlen_attn
    query = torch.ones(4, 1, 8, dtype=torch.bfloat16, device="meta", requires_grad=True)
    bounds = torch.empty(2, dtype=torch.int32, device="meta")
    with Operators() as mode:
        varlen(query, query, query, bounds, bounds, 4, 4)
    known = private.product_operators() & set(mode.seen)
    holds(known, "private.product_operators", f"varlen attention runs {mode.seen}")


def test_writes_views_and_schemas() -> None:
    tensor = torch.ones(4)
    before = private.writes(tensor)
    tensor[1:].add_(1)
    holds(private.writes(tensor) == before + 1, "private.writes", "a write is not counted")
    holds(private.viewed(tensor[1:]) is tensor, "private.viewed", "a view's base is another tensor")
    holds(private.viewed(tensor) is None, "private.viewed", "a tensor of its own has a base")
    found = private.schema(torch.ops.aten.add_.Tensor)
    holds(found.name == "aten::add_" and found.is_mutable, "private.schema", f"it is {found}")
    holds(found.arguments[0].alias_info.is_write, "private.schema", "arguments have no aliases")
    holds(not private.schema(torch.ops.aten.add.Tensor).is_mutable, "private.schema", "add writes")


def test_foreach_kernels() -> None:
    some = [torch.full((4,), 3.0), torch.ones(9)]
    holds([float(n) for n in private.foreach_norm(some)] == [6.0, 3.0], "private.foreach_norm", "other norms")
    private.foreach_multiply_(some, torch.tensor(0.5))
    holds(some[0].tolist() == [1.5] * 4, "private.foreach_multiply_", "other products")


class Tables(private.ConvertedModule):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))
        self.register_buffer("table", torch.ones(2))

    def after_conversion(self) -> None:
        self.table = torch.full((2,), 7.0)


def test_modules_are_converted_with_a_hook() -> None:
    model: Any = nn.Sequential(Tables())
    model.to(torch.bfloat16)
    hooked = model[0].table.tolist() == [7.0, 7.0]
    holds(hooked, "private.ConvertedModule", "Module.to does not call the hook")
    holds(model[0].weight.dtype == torch.bfloat16, "private.ConvertedModule", "Module.to converts nothing")
    parameter = model[0].weight
    private.convert_tensors(model, lambda tensor: tensor.double())
    holds(model[0].weight is parameter, "private.convert_tensors", "a parameter becomes another object")
    holds(parameter.dtype == torch.float64, "private.convert_tensors", "a parameter is not converted")


def adam_on_shards(env: DistEnv) -> bool:
    mesh = dist.init_device_mesh("cpu", (env.world_size,))
    start, gradient = torch.arange(6.0).view(3, 2), torch.linspace(-1, 1, 6).view(3, 2)
    whole = nn.Parameter(start.clone())
    part: Any = nn.Parameter(distribute_tensor(start, mesh, [Shard(0)]))
    whole.grad, part.grad = gradient, distribute_tensor(gradient, mesh, [Shard(0)])
    torch.optim.Adam([whole]).step()
    private.LocalShardAdam([part], foreach=True).step()
    return torch.equal(part.full_tensor(), whole.detach())


def test_gradient_hooks_of_a_parameter_are_found() -> None:
    for how in ("register_hook", "register_post_accumulate_grad_hook"):
        parameter = nn.Parameter(torch.ones(2))
        assert not private.gradient_hooks(parameter)
        handle = getattr(parameter, how)(lambda gradient: None)
        holds(private.gradient_hooks(parameter), "private.gradient_hooks", f"{how} is not seen")
        handle.remove()
        assert not private.gradient_hooks(parameter)


@pytest.mark.parametrize("how", ["forward", "forward_pre", "full_backward"])
def test_hooks_of_a_module_are_found(how: str) -> None:
    getattr(module := nn.Linear(1, 1), f"register_{how}_hook")(lambda *_: None)
    holds(private.module_hooks(module), "private.module_hooks", f"a {how} hook is not seen")


def test_adam_updates_local_shards() -> None:
    equal = run_world(2, adam_on_shards)[0]
    holds(equal, "private.LocalShardAdam", "the update is another")
    given = list(inspect.signature(torch.optim.Adam._init_group).parameters)
    expected = ["params_with_grad", "grads", "exp_avgs", "exp_avg_sqs", "max_exp_avg_sqs", "state_steps"]
    holds(given[2:] == expected, "private.LocalShardAdam", f"the lists of a group are {given[2:]}")


def a_shard_elsewhere(env: DistEnv) -> tuple[bool, bool, bool]:
    mesh = dist.init_device_mesh("cpu", (2,))
    shard = distribute_tensor(torch.arange(8.0).reshape(4, 2), mesh, [Shard(0)])
    made = private.like_shard(shard, torch.empty(2, 2, dtype=torch.bfloat16, device="meta"))
    same = private.like_shard(shard, shard.to_local() + 1)
    fits = isinstance(made, DTensor) and made.shape == shard.shape and made.dtype == torch.bfloat16
    whole = isinstance(same, DTensor) and torch.equal(same.full_tensor(), shard.full_tensor() + 1)
    wider = private.like_shard(shard, torch.full((2, 3), env.rank), torch.Size((4, 3)))
    wide = isinstance(wider, DTensor) and wider.full_tensor()[:, 2].tolist() == [0, 0, 1, 1]
    return fits and made.device.type == "meta", whole, wide


def test_a_shard_in_other_memory() -> None:
    stays, whole, wide = run_world(2, a_shard_elsewhere)[0]
    holds(stays, "private.like_shard", "the shard moves to the mesh's device")
    holds(whole and wide, "private.like_shard", "the whole tensor is another")


def test_the_compiled_call_is_replaced() -> None:
    module = nn.Linear(2, 2)
    holds(private.compiled_call(module) is None, "private.compiled_call", "it is there before compile")
    module.compile(backend="eager")
    before = private.compiled_call(module)
    holds(callable(before), "private.compiled_call", "Module.compile keeps its function elsewhere")
    calls: list[Any] = []

    def call(*args: Any) -> Any:
        calls.append(args)
        return module.forward(*args)

    private.set_compiled_call(module, call)
    module(torch.ones(1, 2))
    holds(len(calls) == 1, "private.set_compiled_call", "a call does not go through it")


def frees_a_mesh(env: DistEnv) -> bool:
    mesh = init_device_mesh("cpu", (env.world_size,))
    sharded = distribute_tensor(torch.ones(4, 3), mesh, [Shard(0)])
    float((sharded * 2).sum() + 1)
    sharded.redistribute(placements=[Shard(1)]).full_tensor()
    kept = weakref.ref(mesh)
    dist.destroy_process_group()
    del mesh, sharded
    private.forget_meshes()
    gc.collect()
    return kept() is None


@pytest.mark.skipif(torch.__version__ < "2.12", reason="torch 2.11 keeps some meshes in C++")
def test_a_mesh_is_freed() -> None:
    freed = run_world(2, frees_a_mesh)
    holds(all(freed), "private.forget_meshes", "a mesh that was used stays in a cache of DTensor")


# ---------------------------------------------------------------- files


def test_dcp_writes_the_same_names(tmp_path: Path) -> None:
    import torch.distributed.checkpoint as dcp

    dcp.save({"weight": torch.ones(2)}, checkpoint_id=str(tmp_path / "dcp"), no_dist=True)
    data = (tmp_path / "dcp" / ".metadata").read_bytes()
    strings = [
        argument for _, argument, _ in pickletools.genops(io.BytesIO(data)) if isinstance(argument, str)
    ]
    for module, name in (private.DCP_PLACE, *private.DCP_UNREAD):
        held = {module, name} <= set(strings)
        holds(held, "private.DCP_PLACE or DCP_UNREAD", f"no {module}.{name} in .metadata")
    place = vars(private.storage_info("a", 1, 2))
    fits = (place["relative_path"], place["offset"], place["length"]) == ("a", 1, 2)
    holds(fits, "private.storage_info", f"its fields are {place}")


# ---------------------------------------------------------------- CUDA


@pytest.mark.parametrize(
    ("private", "ours", "parameters"),
    [
        ("_dump_snapshot", private.write_allocator_snapshot, ["filename"]),
        (
            "_record_memory_history_impl",
            private.start_allocator_history,
            ["enabled", "stacks", "max_entries"],
        ),
    ],
)
def test_the_allocator_s_history_has_the_same_names(
    private: str, ours: Callable[..., Any], parameters: list[str]
) -> None:
    function = getattr(torch.cuda.memory, private, None)
    holds(function, f"private.{ours.__name__}", f"torch.cuda.memory.{private} is gone")
    assert function is not None
    given = inspect.signature(function).parameters
    holds(set(parameters) <= set(given), f"private.{ours.__name__}", f"{private} takes {list(given)}")
