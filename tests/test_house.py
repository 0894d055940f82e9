"""Checks on the sources: rooms, levels, who may import whom, one class a name, each room's list of
modules, line length, private names of torch.

docs/architecture.md describes the rules.
"""

from __future__ import annotations

import ast
import io
import re
import subprocess
import sys
import tokenize
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from fsdp.config import FIELDS

ROOT = Path(__file__).parents[1]

LEVELS = {
    0: "base config",
    1: "models distributed rundir tokenize",
    2: "data optim record",
    3: "shard checkpoint watch memory",
    4: "run",
    5: "plan report doctor predict parity launch",
    6: "train shardrun",
}
LEVEL = {name: level for level, names in LEVELS.items() for name in names.split()}
COMMAND_LEVEL = 5
"""The level of a room's __main__.py, which is a command."""
WIDTH = 110
RANK_VARIABLE = re.compile(
    r"^(RANK|WORLD_SIZE|LOCAL_RANK|LOCAL_WORLD_SIZE|GROUP_RANK|GROUP_WORLD_SIZE|NODE_RANK)$"
    r"|^(SLURM|MASTER|OMPI|PMI|MV2)_"
)

LISTED = re.compile(r"^    (\w+(?:, \w+)*) {2,}\S", re.MULTILINE)
"""Names of modules in a line of a room's docstring."""


def files(*places: str) -> list[Path]:
    found = [
        path
        for place in places
        for path in ([ROOT / place] if place.endswith(".py") else sorted((ROOT / place).rglob("*.py")))
    ]
    assert found
    return found


PRODUCT = files("fsdp", "launch", "shardrun", "train.py")
EVERYTHING = [*PRODUCT, *files("tests", "bench", "examples", "setup.py")]


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def spot(path: Path, line: int) -> str:
    return f"{path.relative_to(ROOT)}:{line}"


@cache
def imports(path: Path) -> tuple[tuple[int, str], ...]:
    """(line, module) of every import, in functions too, and of importlib.import_module("…").

    Imports under TYPE_CHECKING count too.
    """
    found: list[tuple[int, str]] = []
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Import):
            found += [(node.lineno, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{spot(path, node.lineno)}: a relative import"
            assert node.module is not None
            # `from fsdp.base import errors` names a module; `from fsdp.base.errors import ConfigError` too
            found += [(node.lineno, f"{node.module}.{alias.name}") for alias in node.names]
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("import_module") and node.args:
            named = node.args[0]
            first = named.values[0] if isinstance(named, ast.JoinedStr) else named
            if isinstance(first, ast.Constant):
                found.append((node.lineno, str(first.value).rstrip(".")))
    return tuple(found)


def room(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return parts[1] if parts[0] == "fsdp" else parts[0]


def level(path: Path) -> int:
    return max(LEVEL[room(path)], COMMAND_LEVEL if path.name == "__main__.py" else 0)


def room_of_module(module: str) -> str | None:
    parts = module.split(".")
    if parts[0] in ("launch", "train"):
        return parts[0]
    return parts[1] if parts[0] == "fsdp" and len(parts) > 1 else None


def file_of_module(module: str) -> Path | None:
    """The file of `module`, or of the module that contains this name."""
    parts = module.split(".")
    for count in (len(parts), len(parts) - 1):
        place = ROOT.joinpath(*parts[:count])
        if count and place.with_suffix(".py").is_file():
            return place.with_suffix(".py")
    package = ROOT.joinpath(*parts) / "__init__.py"
    return package if package.is_file() else None


def test_fsdp_has_rooms_and_no_loose_module() -> None:
    loose = [path.name for path in (ROOT / "fsdp").glob("*.py") if path.name != "__init__.py"]
    assert not loose, f"move these into a room (docs/architecture.md): {loose}"


def test_every_room_has_a_level_and_a_docstring() -> None:
    rooms = {path.parent for path in files("fsdp") if path.parent != ROOT / "fsdp"}
    unknown = {room(path) for path in PRODUCT} - LEVEL.keys() - {"__init__"}
    assert not unknown, f"add the level of these to tests/test_house.py: {unknown}"
    assert not [place for place in rooms if not ast.get_docstring(tree_of(place / "__init__.py"))]


def test_every_room_lists_its_modules() -> None:
    """Lines `    name, other_name    what they hold` of the docstring: every module, and no other."""
    wrong = []
    for about in [path for path in files("fsdp") if path.name == "__init__.py" and room(path) != "__init__"]:
        listed = LISTED.findall(ast.get_docstring(tree_of(about), clean=False) or "")
        names = {name for line in listed for name in line.split(", ")}
        held = {one.stem for one in about.parent.glob("*.py") if one != about}
        held |= {one.parent.name for one in about.parent.glob("*/__init__.py")}
        if names != held:
            place = about.relative_to(ROOT)
            wrong.append(f"{place}: add {sorted(held - names)}, remove {sorted(names - held)}")
    assert not wrong, "\n".join(wrong)


def test_every_module_has_a_docstring() -> None:
    silent = [path for path in PRODUCT if path.stat().st_size and not ast.get_docstring(tree_of(path))]
    assert not silent


def test_rooms_import_their_own_level_and_those_below() -> None:
    wrong = [
        f"{spot(path, line)}: {room(path)} ({level(path)}) imports {module} ({LEVEL[target]})"
        for path in PRODUCT
        if room(path) != "__init__"
        for line, module in imports(path)
        if (target := room_of_module(module)) in LEVEL and LEVEL[target] > level(path)
    ]
    assert not wrong, "\n".join(wrong)


def test_no_two_rooms_import_each_other() -> None:
    edges: dict[tuple[str, str], str] = {}
    for path in PRODUCT:
        if path.name == "__main__.py":
            continue
        for line, module in imports(path):
            target = room_of_module(module)
            if target in LEVEL and target != room(path):
                edges[room(path), str(target)] = spot(path, line)
    mutual = [f"{at} and {edges[b, a]}" for (a, b), at in edges.items() if a < b and (b, a) in edges]
    assert not mutual, "\n".join(mutual)


def test_no_file_imports_one_that_imports_it() -> None:
    """Through any number of files in between."""
    graph = {
        path: {
            found
            for _, module in imports(path)
            if (found := file_of_module(module)) and found != path and found.name != "__init__.py"
        }
        for path in EVERYTHING
        if path.name != "__init__.py"
    }
    assert not [" → ".join(str(path.relative_to(ROOT)) for path in cycle) for cycle in cycles(graph)]


def cycles(graph: dict[Path, set[Path]]) -> Iterator[list[Path]]:
    done: set[Path] = set()
    way: list[Path] = []

    def visit(path: Path) -> Iterator[list[Path]]:
        if path in way:
            yield [*way[way.index(path) :], path]
            return
        if path in done:
            return
        way.append(path)
        for other in sorted(graph.get(path, ())):
            yield from visit(other)
        way.pop()
        done.add(path)

    for path in graph:
        yield from visit(path)


def importers(places: list[Path], *modules: str) -> list[str]:
    return [
        f"{spot(path, line)}: {module}"
        for path in places
        for line, module in imports(path)
        if any(module == one or module.startswith(one + ".") for one in modules)
    ]


def test_launchers_are_imported_under_launch_only() -> None:
    assert not importers(files("fsdp", "train.py"), "ray", "submitit")
    assert not importers(files("fsdp"), "launch", "train")


def test_models_import_no_process_group() -> None:
    assert not importers(files("fsdp/models"), "torch.distributed")


def test_the_loop_names_no_collective() -> None:
    both = files("fsdp/run/loop.py", "fsdp/run/training_loop.py")
    assert not importers(both, "torch.distributed")
    assert not [path for path in both if re.search(r"(?<!fsdp\.)\bdist\.", path.read_text())]


def test_a_wrong_flag_needs_no_torch() -> None:
    code = "import sys, train; sys.exit('torch' in sys.modules or 'numpy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 0


def top_imports(path: Path) -> list[ast.Import | ast.ImportFrom]:
    return [node for node in tree_of(path).body if isinstance(node, (ast.Import, ast.ImportFrom))]


def test_train_py_imports_a_launcher_where_it_is_chosen() -> None:
    named = {ast.unparse(node) for node in top_imports(ROOT / "train.py")}
    assert not [text for text in named if re.search(r"torch|fsdp\.run|launch", text)], named


def test_rank_variables_are_read_in_one_file() -> None:
    found = [
        f"{spot(path, node.lineno)}: {node.value}"
        for path in files("fsdp", "train.py")
        if path != ROOT / "fsdp/distributed/env.py"
        for node in ast.walk(tree_of(path))
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and RANK_VARIABLE.match(node.value)
    ]
    assert not found, "\n".join(found)


HEAVY = {
    "torchvision", "transformers", "timm", "tokenizers", "pyarrow", "zstandard", "datasets", "fsspec",
    "safetensors", "s3fs", "psutil", "matplotlib",
}  # fmt: skip


def test_heavy_packages_are_imported_where_they_are_used() -> None:
    """At the top of no module that a run imports: start-up pays for what it uses."""
    for path in files("fsdp", "train.py"):
        named = [a.name for n in top_imports(path) if isinstance(n, ast.Import) for a in n.names]
        named += [n.module or "" for n in top_imports(path) if isinstance(n, ast.ImportFrom)]
        assert not HEAVY & {module.split(".")[0] for module in named}, path


def test_a_run_starts_without_the_compiler() -> None:
    """torch._dynamo is loaded where a step is compiled."""
    loaded = "import sys, fsdp.run.loop; sys.exit('torch._dynamo' in sys.modules)"
    subprocess.run([sys.executable, "-c", loaded], cwd=ROOT, check=True)


def test_a_class_name_means_one_thing() -> None:
    places: dict[str, list[str]] = defaultdict(list)
    for path in PRODUCT:
        for node in ast.walk(tree_of(path)):
            if isinstance(node, ast.ClassDef):
                places[node.name].append(spot(path, node.lineno))
    twice = {name: where for name, where in places.items() if len(where) > 1}
    assert not twice, twice


# ---------------------------------------------------------------- private names of torch

TORCH_PRIVATE = ROOT / "fsdp/base/torch_private.py"
NOT_TORCH = {
    "_exit": "os", "_current_frames": "sys", "_call_s3": "s3fs", "_base_exc": "ray", "_executor": "submitit",
    "_make_submission_file_text": "submitit", "_submitit_command_str": "submitit", "_usr_sig": "submitit",
    "_init_weights": "transformers", "_adjust_missing_and_unexpected_keys": "transformers",
    "_is_hf_initialized": "transformers", "_experts_implementation": "transformers",
    "_attn_implementation": "transformers",
    "_encode_plus": "transformers", "_batch_encode_plus": "transformers",
    "_hybrid_shard_zero2": "a word that people type for --mesh.strategy",
}  # fmt: skip
"""Private names of others, and whose they are."""


def is_private(name: str) -> bool:
    return name.strip("_") != "" and name.startswith("_") and not name.endswith("__")


@cache
def defined_in(path: Path) -> frozenset[str]:
    """Private names that a file gives to functions, classes, variables and its objects' attributes."""
    found: set[str] = set()
    for node in ast.walk(tree_of(path)):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            found.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            found |= {node.attr} if ast.unparse(node.value) in ("self", "cls") else set()
    return frozenset(name for name in found if is_private(name))


def private_uses(path: Path, ours: frozenset[str]) -> Iterator[tuple[int, str]]:
    """(line, name) of each private name that none of our files defines: imported, or an attribute."""
    for line, module in imports(path):
        if module.split(".")[0] == "torch" and any(map(is_private, module.split("."))):
            yield line, module
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Attribute) and is_private(node.attr):
            owner = ast.unparse(node.value)
            if owner.split(".")[0] == "torch" or owner == "super()" or node.attr not in ours:
                yield node.lineno, f"{owner}.{node.attr}"


def test_private_names_of_torch_are_used_in_one_place() -> None:
    ours = frozenset(name for path in PRODUCT for name in defined_in(path))
    found = [
        f"{spot(path, line)}: {name}"
        for path in PRODUCT
        if path != TORCH_PRIVATE
        for line, name in private_uses(path, ours)
        if name.strip("'").rpartition(".")[2] not in NOT_TORCH
    ]
    assert not found, "move into fsdp/base/torch_private.py, with a test:\n" + "\n".join(found)


def test_each_way_to_use_a_private_name_is_found(tmp_path: Path) -> None:
    path = tmp_path / "some.py"
    path.write_text("import torch._dynamo\ntorch._foreach_norm([])\nprint(a._all_gather_result, a._ours)")
    uses = {name for _, name in private_uses(path, frozenset({"_ours"}))}
    assert uses == {"torch._dynamo", "torch._foreach_norm", "a._all_gather_result"}


# ---------------------------------------------------------------- size

SKIPPED = {
    tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENCODING,
    tokenize.ENDMARKER,
}  # fmt: skip
CEILINGS = {
    "lines in fsdp": 25_600, "tokens in fsdp": 256_000, "files in fsdp": 132, "lines in launch": 2_300,
    "lines in tests": 27_000, "lines in bench": 4_900, "lines of slurm": 320, "words of docs": 25_500,
    "words of CHANGELOG.md": 1_500, "words of CONTRIBUTING.md": 1_800, "words of README.md": 900,
    "flags": 148, "largest file in fsdp": 340, "files in fsdp under 35 lines": 16, "fmt: skip": 18,
}  # fmt: skip
"""The budget: who needs more lines takes some away."""


@cache
def code_of(path: Path) -> tuple[int, int]:
    """Lines and tokens of code: without blank lines, comments and docstrings."""
    docs: set[int] = set()
    for node in ast.walk(tree_of(path)):
        body = getattr(node, "body", None)
        for part in body if isinstance(body, list) else ():
            if isinstance(part, ast.Expr) and isinstance(getattr(part.value, "value", None), str):
                docs |= set(range(part.lineno, (part.end_lineno or 0) + 1))
    text = io.StringIO(path.read_text(encoding="utf-8"))
    tokens = [t for t in tokenize.generate_tokens(text.readline) if t.type not in SKIPPED]
    lines = {n for t in tokens for n in range(t.start[0], t.end[0] + 1)} - docs
    return len(lines), sum(bool(lines & {*range(t.start[0], t.end[0] + 1)}) for t in tokens)


def words_of(*paths: Path) -> int:
    return sum(len(path.read_text(encoding="utf-8").split()) for path in paths)


def test_the_house_grows_no_more() -> None:
    sizes = {
        place: [code_of(path) for path in files(place)] for place in ("fsdp", "launch", "tests", "bench")
    }
    figures = {f"lines in {place}": sum(lines for lines, _ in of) for place, of in sizes.items()}
    modules = [code_of(path)[0] for path in files("fsdp") if path.name != "__init__.py"]
    own = [path.read_text(encoding="utf-8") for path in files("fsdp", "launch")]
    figures |= {
        "tokens in fsdp": sum(tokens for _, tokens in sizes["fsdp"]),
        "files in fsdp": len(sizes["fsdp"]),
        "lines of slurm": sum(len(path.read_text().splitlines()) for path in (ROOT / "slurm").iterdir()),
        "words of docs": words_of(*(ROOT / "docs").rglob("*.md")),
        **{
            f"words of {name}": words_of(ROOT / name)
            for name in ("CHANGELOG.md", "CONTRIBUTING.md", "README.md")
        },
        "flags": len([name for name in FIELDS if "." in name]),
        "largest file in fsdp": max(modules),
        "files in fsdp under 35 lines": sum(lines < 35 for lines in modules),
        "fmt: skip": sum(text.count("# fmt: skip") for text in own),
    }
    grown = {name: (figure, CEILINGS[name]) for name, figure in figures.items() if figure > CEILINGS[name]}
    assert not grown
