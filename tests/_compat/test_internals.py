"""Canaries for torch's private names: each missing one is a single line that says what stops working.

The second half hides names from a fresh process: `import lowtide` must still work, and the feature that needs the name
must raise `LowtideError` with that line.
"""

from __future__ import annotations

import subprocess
import sys
import textwrap

import pytest

from lowtide._compat import internals
from lowtide.errors import LowtideError

AT_IMPORT = dict(internals.INTERNALS)

# Looked up when a feature is first used, as their modules take long to import.
COMPILE = "torch.compile cannot run with lowtide's plans"
TRACE = "steps cannot be traced on fake tensors"
ON_USE = {
    "torch._functorch.config": COMPILE,
    "torch._inductor.compile_fx.compile_fx": COMPILE,
    "torch._functorch.partitioners.min_cut_rematerialization_partition": COMPILE,
    "torch._inductor.custom_graph_pass.CustomPartitionerFn": COMPILE,
    "torch._guards.TracingContext": COMPILE,
    "torch._guards.tracing": COMPILE,
    "torch._inductor.list_mode_options": COMPILE,
    "torch._inductor.list_options": COMPILE,
    "torch._subclasses.fake_tensor.FakeTensorMode": TRACE,
    "torch._subclasses.fake_tensor.FakeTensor": TRACE,
    "torch._subclasses.fake_tensor.unset_fake_temporarily": "ops cannot be timed in a compiler pass",
    "torch._meta_registrations._create_grouped_mm_output_tensor": TRACE,
    "torch.optim.optimizer._default_to_fused_or_foreach": "the memory of optimizer steps cannot be predicted",
}

# lowtide has a fallback for each: the consequence is a cost, not an error.
WITH_FALLBACK = {
    "torch._C._set_grad_enabled": "replays switch gradients on through torch.set_grad_enabled, which is slower",
    "torch._disable_dynamo": "import lowtide imports the compiler",
    "torch._C._dynamo.eval_frame": "every hook runs through two more Python calls",
    "torch.nn.modules.module._global_forward_hooks_with_kwargs": "torch.compile may warn of hooks after a trace",
    "torch.utils.checkpoint.CheckpointError": "errors of replays are not caught as torch's CheckpointError",
    "torch.ops.aten._unsafe_view.default": "retained outputs behind reshape may be taken for new tensors",
    "torch.ops.aten._reshape_alias.default": "retained outputs behind reshape may be taken for new tensors",
    "torch.ops.aten._grouped_mm.default": "grouped matmuls cannot be traced without running them",
}


@pytest.mark.filterwarnings("ignore")  # those of importing inductor
@pytest.mark.parametrize("path", {**AT_IMPORT, **ON_USE, **WITH_FALLBACK})
def test_torch_still_has(path: str) -> None:
    consequence = {**AT_IMPORT, **ON_USE, **WITH_FALLBACK}[path]
    assert internals.optional(path, None) is not None, f"{path} is gone: {consequence}"


def test_every_area_of_torch_is_looked_up() -> None:
    """`AT_IMPORT` is what the files of `_compat` look up when they are imported."""
    assert len(AT_IMPORT) >= 25
    assert "torch._C._autograd._push_saved_tensors_default_hooks" in AT_IMPORT


def test_a_placeholder_raises_when_it_is_used() -> None:
    missing = internals.required("torch._C._no_such_function", "nothing works", also=("torch.Tensor.add",))
    del internals.INTERNALS["torch._C._no_such_function"], internals.INTERNALS["torch.Tensor.add"]
    message = r"has no torch\._C\._no_such_function: nothing works"
    with pytest.raises(LowtideError, match=message):
        missing(1)
    with pytest.raises(LowtideError, match=message):
        missing.attribute  # noqa: B018

    class Derived(missing):
        pass

    with pytest.raises(LowtideError, match=message):
        Derived()
    assert not hasattr(missing, "__wrapped__")


def test_what_a_name_needs_besides_is_named() -> None:
    missing = internals.required("torch.Tensor.add", "nothing works", also=("torch.no_such_module.name",))
    del internals.INTERNALS["torch.Tensor.add"], internals.INTERNALS["torch.no_such_module.name"]
    with pytest.raises(LowtideError, match=r"has no torch\.no_such_module\.name"):
        missing()


# Runs in a process that has imported torch and not lowtide: makes `resolve_name` fail for some paths.
HIDING = """
import importlib.machinery, importlib.util, os, sys
import scipy.sparse.csgraph, torch  # once for all forks

def hide(paths):
    class Loader(importlib.machinery.SourceFileLoader):
        def exec_module(self, module):
            super().exec_module(module)
            find = module.resolve_name

            def find_others(path):
                if path in paths:
                    raise AttributeError(path)
                return find(path)

            module.resolve_name = find_others

    class Finder:
        def find_spec(self, name, *_):
            if name == "lowtide._compat.internals":
                return importlib.util.spec_from_loader(name, Loader(name, FILE))

    sys.meta_path.insert(0, Finder())

def raised_by(use, path):
    import lowtide
    try:
        use(lowtide)
    except lowtide.LowtideError as error:
        return error
    raise AssertionError(f"no error without {path}")

layer = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Tanh())

def checkpoint(lowtide):
    lowtide.checkpoint(layer, torch.randn(2, 4, requires_grad=True)).sum().backward()

def trace(lowtide):
    lowtide.trace(layer, lambda x: layer(x).sum(), torch.randn(2, 4))

def store(lowtide):
    lowtide.ActivationStore(device="1GiB").put("x", torch.randn(4))
"""


def run(code: str) -> str:
    """Run code after `HIDING` in a new process; return its output, and its errors if it failed."""
    program = HIDING.replace("FILE", repr(internals.__file__)) + textwrap.dedent(code)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    return done.stdout + (done.stderr if done.returncode else "")


# A feature and a name that it needs.
FEATURES = [
    ("checkpoint", "torch._C._autograd._push_saved_tensors_default_hooks"),
    ("checkpoint", "torch._C._is_any_autocast_enabled"),
    ("trace", "torch.utils._python_dispatch.TorchDispatchMode"),
    ("store", "torch.UntypedStorage._free_weak_ref"),
]


@pytest.mark.skipif(sys.platform == "win32", reason="forks")
def test_lowtide_imports_without_all_of_them_and_a_feature_that_needs_one_says_so() -> None:
    """In one process that imports torch and forks for each name, as importing torch takes seconds."""
    output = run(
        f"""
        child = os.fork()
        if child == 0:
            hide({ {*AT_IMPORT, *WITH_FALLBACK}!r})
            import lowtide
            print(lowtide.LowtideError.__name__, flush=True)
            os._exit(0)
        os.waitpid(child, 0)
        for use, path in {FEATURES!r}:
            child = os.fork()
            if child == 0:
                hide({{path}})
                print(raised_by(globals()[use], path), flush=True)
                os._exit(0)
            os.waitpid(child, 0)
        """
    )
    imported, *raised = output.splitlines()
    assert imported == "LowtideError"
    for line, (_, path) in zip(raised, FEATURES, strict=True):
        assert f"has no {path}: {AT_IMPORT[path]}" in line
