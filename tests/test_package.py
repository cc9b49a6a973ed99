"""The habits of the package: what is exported, who imports whom, and where private torch API may be named."""

from __future__ import annotations

import ast
import copy
import functools
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

import lowtide

PACKAGE = Path(lowtide.__file__).parent
SOURCES = sorted(PACKAGE.rglob("*.py"))

# A layer may import from layers before it. Names are first path components below the package.
TORCH_FREE = ["errors", "units", "policies", "graph", "plans", "simulator", "reports", "solvers"]
ENGINES = ["store", "replay", "split", "snapshot", "distributed", "tracing", "eager", "compiled"]
LAYERS = [*TORCH_FREE, "_compat", *ENGINES, "api", "__init__"]
# What a reader of a plan calls on it, `plan.report()`, is imported when it is called: it sits above the plan.
REPORTED_ON = ["plans"]
PUBLIC_ONLY = ["cli", "hosts"]
PUBLIC_MODULES = ["units", "errors", "plans", "policies", "simulator"]  # beside the names in `lowtide.__all__`
PUBLIC_NAMES = {"lowtide.store.LOSSY_CODECS", "lowtide.eager.Applied", "lowtide.api.estimate.Estimate"}  # likewise
PUBLIC_NAMES |= {"lowtide.api.compile.plan_joint_graph"}  # for trainers that trace a step by themselves
PUBLIC_NAMES |= {"lowtide.api.estimate.ParallelEstimate", "lowtide.store.host_bytes"}


@functools.cache
def tree_of(path: Path) -> ast.AST:
    return ast.parse(path.read_text())


def component(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imported_modules(tree: ast.AST) -> set[str]:
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: relative import"
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


class _WithoutReports(ast.NodeTransformer):
    """Takes out imports for type checkers, and inside of functions those for reports."""

    def visit_If(self, node: ast.If) -> ast.AST | None:
        return None if ast.unparse(node.test) == "TYPE_CHECKING" else self.generic_visit(node)

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        def is_for_reports(line: ast.stmt) -> bool:
            return isinstance(line, ast.ImportFrom) and str(line.module).startswith(("lowtide.reports", "lowtide.api"))

        node.body = [line for line in node.body if not is_for_reports(line)]
        return node


def private_torch_names(tree: ast.AST) -> list[str]:
    """Dotted names and imports under torch with a component that begins with an underscore."""
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            dotted = ast.unparse(node)
            if re.fullmatch(r"torch(\.\w+)*", dotted) and re.search(r"\._[a-z]", dotted, re.IGNORECASE):
                found.append(dotted)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            module = getattr(node, "module", "") or ""
            names = [f"{module}.{alias.name}".strip(".") for alias in node.names]
            found += [name for name in names if re.match(r"torch(\.\w+)*\._", name)]
        if isinstance(node, ast.Attribute) and node.attr in ("_version", "_parameters", "_modules"):
            found.append(node.attr)
    return found


def test_all_is_what_is_exported() -> None:
    public = {name for name in vars(lowtide) if not name.startswith("_")}
    submodules = {component(path) for path in SOURCES}
    assert set(lowtide.__all__) == public - submodules
    assert lowtide.__all__ == sorted(lowtide.__all__)
    assert len(lowtide.__all__) <= 35


def test_every_public_name_is_documented() -> None:
    for name in lowtide.__all__:
        assert getattr(lowtide, name).__doc__, name


def test_imports_go_one_way() -> None:
    wrong = {str(path.relative_to(PACKAGE)): wrong_imports(path) for path in SOURCES}
    assert {path: names for path, names in wrong.items() if names} == {}


def wrong_imports(path: Path) -> list[str]:
    """What a file imports and must not."""
    own, tree = component(path), tree_of(path)
    imported = imported_modules(_WithoutReports().visit(copy.deepcopy(tree)) if own in REPORTED_ON else tree)
    if own in TORCH_FREE and (torchs := [name for name in imported if name.split(".")[0] == "torch"]):
        return torchs
    others = [name for name in imported if name.startswith("lowtide.")]
    if own in PUBLIC_ONLY:
        public = {*PUBLIC_ONLY, *PUBLIC_MODULES, *lowtide.__all__}
        return [name for name in others if name not in PUBLIC_NAMES and name.split(".")[1] not in public]
    assert own in LAYERS, f"{own} has no place in the order of layers"
    known = [name for name in others if name.split(".")[1] in LAYERS]
    return [name for name in known if LAYERS.index(name.split(".")[1]) > LAYERS.index(own)]


def test_private_torch_api_lives_in_compat() -> None:
    named = {path.name: private_torch_names(tree_of(path)) for path in SOURCES if path.parent.name != "_compat"}
    assert {path: names for path, names in named.items() if names} == {}


def test_the_detectors_detect() -> None:
    code = "import torch\nfrom torch._C import _autograd\ntorch._C.x()\nfrom torch.utils import _pytree\nt._version"
    assert len(private_torch_names(ast.parse(code))) >= 4
    for folder, line in (
        ("graph", "import torch"),
        ("store", "from lowtide.eager import x"),
        ("cli", "import lowtide.x"),
    ):
        sample = PACKAGE / folder / "sample.py"
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(sys.modules[__name__], "tree_of", lambda _, line=line: ast.parse(line))
            assert len(wrong_imports(sample)) == 1, folder


def test_files_stay_small() -> None:
    assert [path.name for path in SOURCES if len(path.read_text().splitlines()) > 600] == []


def test_no_two_modules_share_a_stem() -> None:
    paths = [path.relative_to(PACKAGE) for path in SOURCES]
    stems = Counter(path.stem for path in paths if "_compat" not in path.with_suffix("").parts)
    assert [stem for stem, num in stems.items() if num > 1 and stem not in ("__init__", "__main__")] == []


def test_no_two_classes_share_a_name() -> None:
    nodes = [node for path in SOURCES for node in ast.walk(tree_of(path))]
    names = Counter(node.name for node in nodes if isinstance(node, ast.ClassDef))
    assert [name for name, num in names.items() if num > 1] == []


def test_importing_is_light() -> None:
    """The compiler takes longer to import than all of lowtide, and neither it, nor a host, nor an extra is needed."""
    heavy = {"torch._dynamo", "accelerate", "diffusers", "lightning", "transformers", "typer", "rich", "matplotlib"}
    code = (
        f"import sys, lowtide; lowtide.hosts; from lowtide._compat import dynamo; print({heavy} & set(sys.modules)); "
        "sys.exit(dynamo.compiler_is_imported())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.stdout, done.returncode) == ("set()\n", 0), done.stderr
