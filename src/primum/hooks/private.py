"""The private names of torch that training needs, each with a fallback.

torch may rename or drop these in any release. A missing name costs the feature that its function
describes, and a warning where results change; never the import, and never a training run.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from functools import cache
from importlib import import_module
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node
from torch.optim import Optimizer

from primum.kernel.warn import warn

FORWARD_HOOKS = "_forward_hooks"  # with what else begins so: what a module keeps about each

Function = TypeVar("Function", bound=Callable[..., Any])


@cache
def private(module: str, name: str, without: str = "") -> Any:
    """An attribute of a module of torch, or None. Warns once of what is lost, if anything is."""
    try:
        found = import_module(module)
        for part in name.split("."):
            found = getattr(found, part)
        return found
    except (ImportError, AttributeError):
        if without:
            warn(f"torch {torch.__version__} has no {module}.{name}; {without}")
        return None


# Looked up here: torch.compile traces the calls, and warns of a cached function.
_is_tracing: Any = private("torch.jit", "is_tracing")


def eager(function: Function) -> Function:
    """`function`, excluded from torch.compile. The private form imports dynamo when needed."""
    disable = private("torch._compile", "_disable_dynamo") or torch.compiler.disable
    kept: Function = disable(function)
    return kept


def executes(node: Node) -> bool:
    """Whether the backward pass under way will run `node`. Fallback: yes."""
    ask = private(
        "torch._C",
        "_will_engine_execute_node",
        "gradients taken by torch.autograd.grad for other purposes are reweighted too, unless "
        "inside reducer.paused()",
    )
    try:
        return True if ask is None else bool(ask(node))
    except RuntimeError:  # `torch.autograd.grad` with respect to the weight itself
        return True


def returns(node: Node) -> bool:
    """Whether torch.autograd.grad is under way for the leaf of `node`. Fallback: no."""
    ask = private("torch._C", "_will_engine_execute_node")
    try:
        if ask is not None:
            ask(node)
        return False
    except RuntimeError:  # it refuses to answer
        return True


def executes_in_graph(weight: Tensor) -> bool:
    """Whether the backward pass will add to `weight.grad`, in compiled graphs. Fallback: yes.

    Custom operations run below autograd: the dispatch keys are put back to find the node.
    """
    keys, kinds = private("torch._C", "DispatchKeySet"), private("torch._C", "DispatchKey")
    included = private("torch._C", "_dispatch_tls_local_include_set")
    force = private("torch._C", "_ForceDispatchKeyGuard")
    if None in (keys, kinds, included, force):
        return True
    try:
        with force(included(), keys(kinds.Undefined)), torch.enable_grad():
            node = torch.autograd.graph.get_gradient_edge(weight).node
    except (AttributeError, RuntimeError):
        return True
    return executes(node)


def backward_id() -> int | None:
    """The number of the backward pass under way. Fallback: None, not known."""
    ask = private("torch._C", "_current_graph_task_id")
    return None if ask is None else int(ask())


def inside_functorch() -> bool:
    """Whether a `torch.func` transform runs, which has no backward pass. Fallback: no."""
    ask = private("torch._C", "_are_functorch_transforms_active")
    return False if ask is None else bool(ask())


def exporting() -> bool:
    """Whether the model is exported or traced, so that its hooks must do nothing. Fallback: no."""
    tracing = _is_tracing is not None and bool(_is_tracing())
    return tracing or bool(getattr(torch.compiler, "_is_exporting_flag", False))


def at_end_of_backward(function: Callable[[], None]) -> bool:
    """Call a function when the backward pass under way has accumulated all gradients.

    Queued twice, so that it follows what DistributedDataParallel and fully_shard do at the end.
    Fallback: it is not called, and False is returned.
    """
    queue = private(
        "torch.autograd",
        "Variable._execution_engine.queue_callback",
        "gradient clipping is neither measured nor predicted",
    )
    if queue is None:
        return False
    queue(lambda: queue(function))
    return True


def never_called(module: object) -> bool:
    """Whether a linear layer only holds parameters, as the output projection of attention does."""
    kind = private("torch.nn.modules.linear", "NonDynamicallyQuantizableLinear")
    return kind is not None and isinstance(module, kind)


def version(tensor: Tensor) -> int:
    """A count of the in-place changes of a tensor. Fallback: 0, no change is seen."""
    return getattr(tensor, "_version", 0)


def forward_hooks(module: nn.Module) -> dict[int, Any]:
    """The forward hooks of a module by their ids. Fallback: none are seen."""
    hooks: dict[int, Any] = getattr(module, FORWARD_HOOKS, {})
    return hooks


def runs_hooks(optimizer: Optimizer) -> bool:
    """Whether step hooks see the steps of an optimizer. Fallback: no, steps are not counted."""
    return hasattr(optimizer, "_optimizer_step_post_hooks")


def skip_record(scaler: Any) -> object | None:
    """An object that a GradScaler replaces in each `update()`. Fallback: None, not known."""
    return getattr(scaler, "_per_optimizer_states", None)


def running_wrapper() -> nn.parallel.DistributedDataParallel | None:
    """The DistributedDataParallel whose forward pass is under way. Fallback: None, not known."""
    return getattr(nn.parallel.DistributedDataParallel, "_active_ddp_module", None)


def knows_running_wrapper() -> bool:
    """Whether torch says which DistributedDataParallel runs. Fallback: no."""
    return hasattr(nn.parallel.DistributedDataParallel, "_active_ddp_module")


def joins(wrapper: nn.parallel.DistributedDataParallel) -> bool:
    """Whether ranks without data left skip forward passes (`join()`). Fallback: no."""
    return bool(getattr(getattr(wrapper, "_join_config", None), "enable", False))


def is_sharded(tensor: object) -> bool:
    """Whether a tensor is a DTensor. Importing its module takes long: only if it is there."""
    kind = getattr(sys.modules.get("torch.distributed.tensor"), "DTensor", None)
    return kind is not None and isinstance(tensor, kind)


def fsdp_modules(model: nn.Module) -> Iterator[Any]:
    """The modules that `fully_shard` was called on."""
    kind = getattr(sys.modules.get("torch.distributed.fsdp"), "FSDPModule", None)
    return (each for each in model.modules() if kind is not None and isinstance(each, kind))


def shard_records(model: nn.Module, head: nn.Module) -> dict[str, tuple[Any, Any]]:
    """What `fully_shard` keeps of a layer's parameters: record, group. Fallback: nothing."""
    ask = private(
        "torch.distributed.fsdp._fully_shard._fsdp_state",
        "_get_module_fsdp_state",
        "under fully_shard, gradients accumulated without synchronization are not part of the "
        "predicted step",
    )
    found: dict[str, tuple[Any, Any]] = {}
    for module in model.modules() if ask is not None else ():
        state = ask(module)
        groups = getattr(state, "_fsdp_param_groups", None)
        if groups is None:  # before torch 2.11
            groups = [getattr(state, "_fsdp_param_group", None)]
        for group in groups:
            for record in getattr(group, "fsdp_params", ()):
                info: Any = getattr(record, "_module_info", None)
                modules = [getattr(info, "module", None), *getattr(info, "shared_modules", ())]
                if any(each is head for each in modules):  # a tied weight has several
                    own = [each is head for each in modules].index(True)
                    names = [info.param_name, *getattr(info, "shared_param_names", ())]
                    found[names[own]] = record, group
    return found


def unreduced(record: Any) -> Tensor | None:
    """The gradient of a whole parameter that waits for its reduction. Fallback: None is seen."""
    held: Tensor | None = getattr(record, "unsharded_accumulated_grad", None)
    if held is None:
        held = getattr(getattr(record, "_unsharded_param", None), "grad", None)
    return held


def shard_of(record: Any) -> object | None:
    """The sharded parameter, as the optimizer holds it. Fallback: None, not known."""
    return getattr(record, "sharded_param", None)


def offloads(record: Any) -> bool:
    """Whether a shard is kept on the CPU. Fallback: no; another device than the mesh's tells."""
    return bool(getattr(record, "offload_to_cpu", False))


def divide_factor(group: Any) -> float | None:
    """What summed gradients are divided by, if it was set. Fallback: None, the number of ranks."""
    factor: float | None = getattr(group, "gradient_divide_factor", None)
    return factor


def partly_reduced(group: Any) -> bool:
    """Whether gradients wait for an all-reduce over HSDP's replicas. Fallback: no."""
    return getattr(group, "_partial_reduce_output", None) is not None
