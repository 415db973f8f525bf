"""Private names of torch are in one file but for a few, and each of them may go."""

from __future__ import annotations

import ast
import builtins
import subprocess
import sys
import textwrap
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn, optim
from torch.distributed.fsdp import fully_shard

import primum
from loops import SGD, assert_close, batch, gradients, make, make_like
from primum.hooks import private

SOURCE = Path(primum.__file__).parent
FILES = list(SOURCE.rglob("*.py"))
PRIVATE = SOURCE / "hooks" / "private.py"
ELSEWHERE = {
    "kernel": {"_version", "_parameters", "_init_group"},  # imports no sibling; has fallbacks
    # Imported on demand: no training run depends on them.
    "diagnostics": {"_BatchNorm", "_InstanceNorm", "_pytree", "_orig_mod"},
    "paper": {"_BatchNorm"},
}
NOT_OF_TORCH = {"_getframe", "_hooks", "_fields"}  # of Python; the end of a name
TREES = {path: ast.parse(path.read_text()) for path in FILES}


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def defined(tree: ast.Module) -> set[str]:
    """The names that a file makes itself."""
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            found.add(node.attr)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
    return found


def named(node: ast.AST) -> list[str]:
    """Names that a piece of code takes from elsewhere: attributes, imports, strings."""
    if isinstance(node, ast.Attribute):
        return [node.attr]
    if isinstance(node, ast.Import | ast.ImportFrom):
        modules = [alias.name for alias in node.names] + [getattr(node, "module", None) or ""]
        return [part for module in modules for part in module.split(".")]
    if isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.isidentifier():
        return [node.value]
    return []


OWN = set().union(*(defined(tree) for tree in TREES.values())) | NOT_OF_TORCH


def foreign(tree: ast.Module) -> set[str]:
    found = {name for node in ast.walk(tree) for name in named(node)}
    return {name for name in found if is_private(name)} - OWN


def taken() -> list[str]:
    """What `private.py` looks up: private names, and every name that it asks for by a string."""
    found = foreign(TREES[PRIVATE])
    for node in ast.walk(TREES[PRIVATE]):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            asks = node.func.id in ("getattr", "hasattr", "private")
            if asks and isinstance(node.args[1], ast.Constant):
                found.add(node.args[1].value.partition(".")[0])
    return sorted(found - {"enable", "__code__"})


@pytest.mark.parametrize("room", sorted({p.relative_to(SOURCE).parts[0] for p in FILES}))
def test_no_other_file_uses_a_private_name(room: str) -> None:
    files = [p for p in FILES if p.relative_to(SOURCE).parts[0] == room and p != PRIVATE]
    found = set().union(*(foreign(TREES[path]) for path in files))
    assert found == ELSEWHERE.get(room, set())


def test_the_search_finds_them() -> None:
    assert len(FILES) > 40
    assert {"_will_engine_execute_node", "_version", "_current_graph_task_id"} <= set(taken())
    lines = "import torch\nfrom torch._C import x\ntorch._foo()\nhasattr(torch, '_bar')\n"
    assert foreign(ast.parse(lines)) == {"_C", "_foo", "_bar"}


@pytest.fixture
def without(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """One name that `private.py` does not find, however it asks for it."""
    name: str = request.param

    def lacking(owner: object, key: str, *default: Any) -> Any:
        if key == name and default:
            return default[0]
        if key == name:
            raise AttributeError(key)
        return builtins.getattr(owner, key, *default)

    def has(owner: object, key: str) -> bool:
        return key != name and builtins.hasattr(owner, key)

    monkeypatch.setattr(private, "getattr", lacking, raising=False)
    monkeypatch.setattr(private, "hasattr", has, raising=False)
    private.private.cache_clear()
    yield name
    private.private.cache_clear()


@pytest.mark.filterwarnings("always::RuntimeWarning")
@pytest.mark.parametrize("without", taken(), indirect=True)
def test_training_goes_on_without(without: str) -> None:
    """Steps are weighed as ever, and at most one warning says what is lost."""
    model, optimizer = make()
    before = make_like(model, optimizer)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        reducer = primum.attach(model, optimizer)
        for number in range(3):
            inputs, labels = batch(number, 24)
            optimizer.zero_grad()
            F.cross_entropy(model(inputs), labels).backward()
            assert reducer.last is not None
            assert reducer.last.applied
            nn.utils.clip_grad_norm_(model.parameters(), 1e3)
            optimizer.step()
        assert reducer.last.fallbacks == 0
        assert reducer.last.extra_weights.max() > 0
    ours = [str(each.message) for each in caught if "primum" in str(each.message)]
    assert len(ours) <= 1
    assert all(without in message for message in ours)
    # The same weights as with the name: nothing of this loop needs it.
    builtin = {"getattr": builtins.getattr, "hasattr": builtins.hasattr}
    vars(private).update(builtin)
    private.private.cache_clear()
    twin, stepper = before
    primum.attach(twin, stepper)
    for number in range(3):
        inputs, labels = batch(number, 24)
        stepper.zero_grad()
        F.cross_entropy(twin(inputs), labels).backward()
        stepper.step()
    assert_close(gradients(model), gradients(twin), 1e-9)


@pytest.mark.parametrize(
    "without",
    ["DispatchKeySet", "_ForceDispatchKeyGuard", "_dispatch_tls_local_include_set"],
    indirect=True,
)
def test_a_compiled_model_trains_without(without: str) -> None:
    torch.compiler.reset()
    model, optimizer = make(dtype=torch.float32)
    reducer = primum.attach(model, optimizer)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    inputs, labels = batch(0, 24, dtype=torch.float32)
    F.cross_entropy(compiled(inputs), labels).backward()
    assert reducer.last is not None
    assert reducer.last.applied


def test_import_without_any_of_them() -> None:
    """In a process of its own, where names that are looked up at import are missing for good."""
    program = f"""
        import importlib, sys
        import torch, torch._compile, torch.jit
        names = {taken()!r}
        find = importlib.import_module
        class Lacking:
            def __init__(self, module): self.module = module
            def __getattr__(self, name):
                if name in names: raise AttributeError(name)
                return getattr(self.module, name)
        def lacking(name, package=None):
            found = find(name, package)
            asks = sys._getframe(1).f_globals["__name__"] == "primum.hooks.private"
            return Lacking(found) if asks else found
        importlib.import_module = lacking
        import primum, primum.paper, primum.diagnostics
        from primum.hooks.private import private
        assert private("torch._compile", "_disable_dynamo") is None
        assert private("torch.jit", "is_tracing") is None
        model = torch.nn.Linear(6, 4)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        reducer = primum.attach(model, optimizer)
        for _ in range(3):
            optimizer.zero_grad()
            outputs, labels = model(torch.randn(8, 6)), torch.randint(4, (8,))
            torch.nn.functional.cross_entropy(outputs, labels).backward()
            optimizer.step()
        print(reducer.last.applied, int(reducer.last.fallbacks))
    """
    ran = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.split() == ["True", "0"]
    assert ran.stderr.count("RuntimeWarning: primum: ") == 2  # what `executes` and clipping lose


SHARDED = [
    "_get_module_fsdp_state",
    "_fsdp_param_groups",
    "fsdp_params",
    "_module_info",
    "unsharded_accumulated_grad",
    "_unsharded_param",
    "sharded_param",
    "offload_to_cpu",
    "gradient_divide_factor",
    "shared_modules",
    "_partial_reduce_output",
]


@pytest.mark.filterwarnings("always::RuntimeWarning")
@pytest.mark.parametrize("without", SHARDED, indirect=True)
def test_a_sharded_model_trains_without(without: str, tmp_path: Path) -> None:
    """What is lost is seen with accumulation alone, which is not part of this loop."""
    dist.init_process_group("gloo", f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    try:
        model, optimizer = make()
        twin, stepper = make_like(model, optimizer)
        fully_shard(model)
        optimizer = optim.SGD(model.parameters(), **SGD)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            reducer = primum.attach(model, optimizer)
            primum.attach(twin, stepper)
            for number in range(3):
                inputs, labels = batch(number, 24)
                for net, each in ((model, optimizer), (twin, stepper)):
                    each.zero_grad()
                    F.cross_entropy(net(inputs), labels).backward()
                    each.step()
            assert reducer.last is not None
            assert reducer.last.applied
            assert reducer.last.fallbacks == 0
        ours = [str(each.message) for each in caught if "primum" in str(each.message)]
        assert len(ours) <= 1
        assert all(without in message for message in ours)
        for one, other in zip(model.parameters(), twin.parameters(), strict=True):
            assert (one.full_tensor() - other).norm() <= 1e-9 * other.norm()
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("without", SHARDED, indirect=True)
def test_the_names_of_sharding_are_looked_up(without: str) -> None:
    assert without in taken()
