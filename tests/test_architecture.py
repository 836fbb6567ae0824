"""The rules of the house: arrows point down, no cycles, a light front door, short files."""

import ast
import graphlib
import subprocess
import sys
from pathlib import Path

import pytest

import levelhead

ROOT = Path(levelhead.__file__).parent
MODULES = {
    ".".join(["levelhead", *path.relative_to(ROOT).with_suffix("").parts]): path
    for path in ROOT.rglob("*.py")
    if path.name != "__init__.py"
}

PACKAGES = {"levelhead.bench"}
"""Imported as a whole by the command line, which looks for what lies in it."""

LEVELS = {
    0: ("shapes", "terms", "rows", "linalg", "lanczos", "kernels", "sharding", "exits", "modes",
        "fused", "plain_gradients", "score_tiles", "compiled"),
    1: ("stages", "reference", "init", "measure"),
    2: ("steps", "parts", "variants", "sizes", "capped", "visible", "inner", "attention"),
    3: ("sites.sites", "sites.find", "sites.layout", "sites.reading", "sites.own_sites",
        "sites.torch_sites"),
    4: ("sites", "convert", "store", "register", "verify", "initialize", "effects", "capture",
        "clip"),
    5: ("diagnose", "diagnosis", "monitor", "report", "findings", "judge"),
    6: ("harness", "bench"),
    7: ("__main__", "cli", "commands", "options", "compare_command", "list_command",
        "diagnose_command", "report_command", "verify_command", "train_command", "plan_command"),
}  # fmt: skip
"""The level of a module: that of its longest matching prefix."""

OPTIONAL = {
    "timm", "transformers", "torchvision", "pandas", "scipy", "sklearn", "yaml", "pydantic",
    "typer", "rich", "jinja2", "plotly", "accelerate", "datasets", "safetensors",
}  # fmt: skip


def level(module):
    """Return the level of a module of the package."""
    name = module.removeprefix("levelhead.")
    matching = {
        len(prefix): number
        for number, prefixes in LEVELS.items()
        for prefix in prefixes
        if name == prefix or name.startswith((prefix + ".", prefix + "_"))
    }
    assert matching, f"{module} has no level: give it one"
    return matching[max(matching)]


def imports(path):
    """Yield (module, line, is_at_the_top) of every import of a file."""
    tree = ast.parse(path.read_text())
    top = set(map(id, tree.body))
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            yield node.module, node.lineno, id(node) in top
        elif isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name, node.lineno, id(node) in top


@pytest.mark.parametrize("module", MODULES)
def test_arrows_point_down_and_never_through_a_front_door(module):
    for imported, line, _ in imports(MODULES[module]):
        if not imported.startswith("levelhead"):
            continue
        if imported not in MODULES:
            assert imported in PACKAGES, f"{module}:{line} imports through {imported}"
            continue
        assert level(imported) <= level(module), f"{module}:{line} imports upwards: {imported}"


def test_there_are_no_cycles():
    graph = {
        module: {name for name, *_ in imports(path) if name in MODULES}
        for module, path in MODULES.items()
    }
    graphlib.TopologicalSorter(graph).prepare()


def test_stages_do_not_import_each_other():
    for module, path in MODULES.items():
        if module.startswith("levelhead.stages."):
            assert not [n for n, *_ in imports(path) if n.startswith("levelhead.stages.")], module


@pytest.mark.parametrize("module", [m for m in MODULES if level(m) <= 3])
def test_the_core_needs_no_optional_library(module):
    for imported, line, _ in imports(MODULES[module]):
        package = imported.split(".")[0]
        assert package not in OPTIONAL, f"{module}:{line} imports {package}"


def run_fresh(code):
    """Run code in a new process and return what it prints."""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120
    )
    return done.stdout.strip()


def test_importing_levelhead_loads_nothing_heavier_than_torch():
    code = (
        "import sys, torch, numpy, jaxtyping; before = set(sys.modules); import levelhead; "
        "print(sorted({m.split('.')[0] for m in set(sys.modules) - before}))"
    )
    loaded = set(ast.literal_eval(run_fresh(code)))
    assert {name for name in loaded if name in OPTIONAL} == set()
    assert loaded - {"levelhead"} <= set(sys.stdlib_module_names)


def test_the_core_works_where_optional_libraries_are_missing():
    code = (
        "import sys\n"
        f"for name in {sorted(OPTIONAL)!r}: sys.modules[name] = None\n"
        "import torch, levelhead as lh\n"
        "layer = lh.Attention(12, 3, variant='quest + gate')\n"
        "print(layer(torch.randn(1, 5, 12)).shape, len(lh.find_attention(layer)))"
    )
    assert run_fresh(code) == "torch.Size([1, 5, 12]) 1"


def test_importing_changes_no_global_state():
    code = (
        "import torch, random, numpy, warnings, os, logging\n"
        "look = lambda: (torch.get_rng_state().sum().item(), torch.get_default_dtype(),\n"
        "    torch.is_grad_enabled(), len(warnings.filters), dict(os.environ),\n"
        "    torch.get_num_threads(), logging.getLogger().level)\n"
        "before = look(); import levelhead; print(before == look())"
    )
    assert run_fresh(code) == "True"


@pytest.mark.parametrize("module", MODULES)
def test_no_file_branches_on_the_name_of_a_variant(module):
    for node in ast.walk(ast.parse(MODULES[module].read_text())):
        if isinstance(node, ast.Compare) and isinstance(node.left, ast.Name):
            compared = [c for c in node.comparators if isinstance(c, ast.Constant)]
            assert not (node.left.id == "variant" and compared), f"{module}:{node.lineno}"


@pytest.mark.parametrize("module", MODULES)
def test_functions_are_short_enough_to_read(module):
    for node in ast.walk(ast.parse(MODULES[module].read_text())):
        if isinstance(node, ast.FunctionDef):
            body = node.body[1:] if ast.get_docstring(node) else node.body
            length = (body[-1].end_lineno - body[0].lineno + 1) if body else 0
            assert length <= 60, f"{module}.{node.name} has {length} lines"


@pytest.mark.parametrize("module", MODULES)
def test_every_public_function_is_documented(module):
    tree = ast.parse(MODULES[module].read_text())
    assert ast.get_docstring(tree), f"{module} does not say what it is"
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and not node.name.startswith("_"):
            assert ast.get_docstring(node), f"{module}.{node.name} has no docstring"


def test_the_source_is_ascii():
    for module, path in MODULES.items():
        assert path.read_text().isascii(), module
