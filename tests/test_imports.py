"""Who may import whom, read from the sources: same level or lower, wherever in a file the import stands."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

LEVELS = {
    0: "errors config collector",
    1: "models env optim small_states metrics digest torchvision_import phases devices",
    2: "mesh stop state memory loss agree claim console gradients scaler rundir events recorder wandb_sink planned verdict",
    3: "shard comm traffic float8 compile_cache materialize adapters proof data checkpoint watch evaluate job flops preflight "
    "begin",
    4: "loop",
    5: "plan report launch predict doctor parity checkpoints summary",
    6: "train",
}
LEVEL = {name: level for level, names in LEVELS.items() for name in names.split()}
RANK_VARIABLE = re.compile(
    r"^(RANK|WORLD_SIZE|LOCAL_RANK|LOCAL_WORLD_SIZE|GROUP_RANK|GROUP_WORLD_SIZE|NODE_RANK)$|^(SLURM|MASTER)_"
)


def files(*places: str) -> list[Path]:
    found = [p for place in places for p in ([ROOT / place] if place.endswith(".py") else sorted((ROOT / place).rglob("*.py")))]
    assert found
    return found


def imports(path: Path) -> Iterator[tuple[int, str]]:
    """(line, module) of every import, in functions and under TYPE_CHECKING too, and of importlib.import_module("…")."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: a relative import"
            assert node.module is not None
            # `from fsdp import agree` names a module; `from fsdp.dist.mesh import AXES` has one already.
            yield from ((node.lineno, f"{node.module}.{alias.name}") for alias in node.names)
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("import_module") and node.args:
            named = node.args[0]
            first = named.values[0] if isinstance(named, ast.JoinedStr) else named
            if isinstance(first, ast.Constant):
                yield node.lineno, str(first.value).rstrip(".")


def room(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return parts[1] if parts[0] == "fsdp" else parts[0]


def room_of_module(module: str) -> str | None:
    parts = module.split(".")
    if parts[0] in ("launch", "train"):
        return parts[0]
    return parts[1] if parts[0] == "fsdp" and len(parts) > 1 else None


def test_every_room_has_a_level() -> None:
    unknown = {room(path) for path in files("fsdp", "launch", "train.py")} - LEVEL.keys() - {"__init__"}
    assert not unknown, f"say in tests/test_imports.py which level these have: {unknown}"


def test_imports_go_down_or_stay_level() -> None:
    wrong = [
        f"{path.relative_to(ROOT)}:{line}: {room(path)} ({LEVEL[room(path)]}) imports {module} ({LEVEL[target]})"
        for path in files("fsdp", "launch", "train.py")
        if room(path) != "__init__"
        for line, module in imports(path)
        if (target := room_of_module(module)) in LEVEL and LEVEL[target] > LEVEL[room(path)]
    ]
    assert not wrong, "\n".join(wrong)


def importers(places: list[Path], *modules: str) -> list[str]:
    return [
        f"{path.relative_to(ROOT)}:{line}: {module}"
        for path in places
        for line, module in imports(path)
        if any(module == one or module.startswith(one + ".") for one in modules)
    ]


def test_launchers_are_imported_under_launch_alone() -> None:
    assert not importers(files("fsdp", "train.py"), "ray", "submitit")
    assert not importers(files("fsdp"), "launch", "train")


def test_models_know_no_process_group() -> None:
    assert not importers(files("fsdp/models"), "torch.distributed")


def test_the_loop_names_no_collective() -> None:
    assert not importers(files("fsdp/run/loop.py"), "torch.distributed")
    assert "dist." not in (ROOT / "fsdp/run/loop.py").read_text().replace("fsdp.", "")


def test_a_wrong_flag_needs_no_torch() -> None:
    code = "import sys, train; sys.exit('torch' in sys.modules or 'numpy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 0


def test_train_py_imports_a_launcher_where_it_is_chosen() -> None:
    top = [node for node in ast.parse((ROOT / "train.py").read_text()).body if isinstance(node, (ast.Import, ast.ImportFrom))]
    named = {ast.unparse(node) for node in top}
    assert not [text for text in named if re.search(r"torch|fsdp\.(loop|job)|launch", text)], named


def rank_variables(path: Path) -> Iterator[str]:
    """Strings that name a rank variable, outside docstrings."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and RANK_VARIABLE.match(node.value):
            yield f"{path.relative_to(ROOT)}:{node.lineno}: {node.value}"


def test_rank_variables_are_read_in_one_file() -> None:
    found = [text for path in files("fsdp", "train.py") if path.name != "env.py" for text in rank_variables(path)]
    assert not found, "\n".join(found)


@pytest.mark.parametrize("name", ["torchvision", "transformers", "safetensors", "s3fs", "psutil", "matplotlib"])
def test_heavy_things_are_imported_where_they_are_used(name: str) -> None:
    """At the top of no module that a run imports: start-up pays for what it uses."""
    for path in files("fsdp", "train.py"):
        tops = [node for node in ast.parse(path.read_text()).body if isinstance(node, (ast.Import, ast.ImportFrom))]
        named = [a.name for n in tops if isinstance(n, ast.Import) for a in n.names]
        named += [n.module or "" for n in tops if isinstance(n, ast.ImportFrom)]
        assert name not in {module.split(".")[0] for module in named}, path
