"""What is shipped, what imports what, and what an import costs."""

from __future__ import annotations

import ast
import email
import re
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from configparser import ConfigParser
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = {"fxfuse": ROOT / "fxfuse", "fxfuse_patterns": ROOT / "patterns" / "fxfuse_patterns"}

# ------------------------------------------------------------------------------------------------ the wheel


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Iterator[zipfile.ZipFile]:
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True, timeout=120)
    with zipfile.ZipFile(next(folder.glob("fxfuse-*.whl"))) as opened:
        yield opened


def read(wheel: zipfile.ZipFile, ending: str) -> str:
    return wheel.read(next(n for n in wheel.namelist() if n.endswith(ending))).decode()


def test_wheel_holds_both_packages_typed_and_nothing_else(wheel: zipfile.ZipFile) -> None:
    shipped = {n for n in wheel.namelist() if ".dist-info/" not in n}
    expected = {f"{p}/{f.relative_to(at)}" for p, at in PACKAGES.items() for f in at.rglob("*.py")}
    assert shipped == expected | {"fxfuse/py.typed", "fxfuse_patterns/py.typed"}


def test_wheel_registers_backend_pack_and_command(wheel: zipfile.ZipFile) -> None:
    points = ConfigParser()
    points.read_string(read(wheel, "entry_points.txt"))
    assert dict(points["torch_dynamo_backends"]) == {"fxfuse": "fxfuse.backend:backend"}
    assert dict(points["fxfuse.patterns"]) == {"builtin": "fxfuse_patterns"}
    assert dict(points["console_scripts"]) == {"fxfuse": "fxfuse.__main__:main"}


def test_wheel_metadata(wheel: zipfile.ZipFile) -> None:
    import fxfuse

    metadata = email.message_from_string(read(wheel, "METADATA"))
    assert metadata["Version"] == fxfuse.__version__
    assert metadata["License-Expression"] == "Apache-2.0"
    assert "Apache License" in read(wheel, "LICENSE")
    always = [r for r in metadata.get_all("Requires-Dist", []) if "extra" not in r]
    assert [re.split(r"\W", r)[0] for r in always] == ["sympy", "torch", "triton"]


# ------------------------------------------------------------------------------------------------ who imports whom

LAYERS = [
    "errors report naming faults source values changes shadow versions",
    "recipe fp8_recipes",
    "ops kernels",
    "compat",
    "config folder experts spellings samples display recorder pattern",
    "registry page trace doctor deferred checkout winners",
    "fusion settings",
    "verification match region nearmiss guess",
    "derived prove replacement splice measure window amax",
    "rewrite",
    "choose",
    "capture",
    "plan",
    "dispatch",
    "backend explanation resetting",
    "testing",
    "__main__ __init__",
]
"""From the bottom up: a module may import those of its own row and of the rows above it in this list."""

WITHOUT_PUBLIC_NAME = ("torch._ops", "torch.utils._pytree", "torch.utils._python_dispatch.TorchDispatchMode")
"""Names that torch's own documents use: the types of a node's target (OpOverload, HigherOrderOperator), pytrees, and modes that
see every operator."""

RANK = {module: rank for rank, row in enumerate(LAYERS) for module in row.split()}


def trees(package: str) -> list[tuple[str, ast.Module]]:
    at = PACKAGES[package]
    return [(file.relative_to(at).as_posix(), ast.parse(file.read_text())) for file in sorted(at.rglob("*.py"))]


def is_typing_only(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test)


def import_time_nodes(tree: ast.Module) -> Iterator[ast.AST]:
    """Statements that run when the module is imported: not those in functions, nor under TYPE_CHECKING."""
    todo: list[ast.AST] = list(tree.body)
    while todo:
        node = todo.pop()
        yield node
        if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and not is_typing_only(node):
            todo += ast.iter_child_nodes(node)


def imported(nodes: Iterator[ast.AST], package: str = "") -> Iterator[str]:
    """Absolute names of the imported modules; ``from a import b`` gives ``a.b``. ``package``: where "." points to."""
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (a.name for a in node.names)
        elif isinstance(node, ast.ImportFrom):
            parts = package.split(".")
            base = ".".join(parts[: len(parts) - node.level + 1]) if node.level else ""
            yield from (".".join(filter(None, (base, node.module, a.name))) for a in node.names)


def package_of(file: str) -> str:
    return ".".join(["fxfuse", *Path(file).parts[:-1]])


def module_of(file: str) -> str:
    """``ops/dense.py`` -> ``ops``, ``values.py`` -> ``values``."""
    return Path(file).parts[0].removesuffix(".py")


@pytest.mark.parametrize("file, tree", trees("fxfuse"), ids=lambda v: v if isinstance(v, str) else "")
def test_imports_point_down(file: str, tree: ast.Module) -> None:
    me = module_of(file)
    assert me in RANK, f"{me} has no place in the list of layers"
    for name in imported(import_time_nodes(tree), package_of(file)):
        other = name.split(".")[1] if name.startswith("fxfuse.") else None
        if other in RANK:
            assert RANK[other] <= RANK[me], f"{me} imports {other}, which lies above it"


@pytest.mark.parametrize("file, tree", trees("fxfuse"), ids=lambda v: v if isinstance(v, str) else "")
def test_only_compat_touches_private_torch(file: str, tree: ast.Module) -> None:
    if file == "compat.py":
        return
    names = {name for name in imported(ast.walk(tree), package_of(file)) if name.startswith("torch.")}
    names |= {ast.unparse(n) for n in ast.walk(tree) if isinstance(n, ast.Attribute) and ast.unparse(n).startswith("torch.")}
    private = {n for n in names if re.search(r"\._(?!_)", n) and not n.startswith(("torch.ops.", *WITHOUT_PUBLIC_NAME))}
    assert not private


@pytest.mark.parametrize("module", ["values", "match", "report", "display"])
def test_module_imports_no_triton(module: str) -> None:
    tree = ast.parse((PACKAGES["fxfuse"] / f"{module}.py").read_text())
    assert not [name for name in imported(ast.walk(tree)) if name.split(".")[0] == "triton"]


def test_builtin_pack_uses_only_public_names() -> None:
    import fxfuse

    public = {"fxfuse", *(f"fxfuse.{name}" for name in fxfuse.__all__)}
    for file, tree in trees("fxfuse_patterns"):
        for name in imported(ast.walk(tree), "fxfuse_patterns"):
            if name.split(".")[0] == "fxfuse":
                assert name in public, f"{file} imports {name}"
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute) and not ast.unparse(node).startswith("aten."):  # an operator's own name
                assert not node.attr.startswith("_") or node.attr.startswith("__"), f"{file}: {ast.unparse(node)}"


# ------------------------------------------------------------------------------------------------ what an import costs


def test_import_is_light() -> None:
    code = (
        "import sys, torch; before = set(sys.modules); import fxfuse; "
        "print([m for m in ('torch._inductor', 'torch._dynamo', 'triton', 'fxfuse_patterns') if m in set(sys.modules) - before])"
    )
    environment = {"PYTHONPATH": f"{ROOT}:{ROOT / 'patterns'}", "PATH": ""}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_backend_is_found_without_importing_fxfuse() -> None:
    """Through the entry point, when fxfuse is installed."""
    from importlib import metadata

    try:
        installed = metadata.distribution("fxfuse").read_text("direct_url.json") is not None
    except metadata.PackageNotFoundError:
        installed = False
    if not installed:
        pytest.skip("fxfuse is not installed here")
    code = "import torch; print('fxfuse' in torch.compiler.list_backends())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd="/")
    assert done.stdout.strip() == "True"
