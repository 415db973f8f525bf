"""What `attach` and `observe` take, and what they refuse in words a user can act on."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn, optim

import primum
from loops import ADAMW, SGD, batch, make, report_of, train
from primum import Reducer

ATTACH = pytest.mark.parametrize("attach", [primum.attach, primum.observe])


def owners(reducer: Reducer) -> dict[str, optim.Optimizer]:
    return reducer._engine.head.optimizers


class TestHead:
    def test_found(self) -> None:
        model, optimizer = make()
        assert primum.attach(model, optimizer).head is model[2]

    def test_given(self) -> None:
        model, optimizer = make()
        with primum.attach(model, optimizer, head=model[0]) as reducer:
            assert reducer.head is model[0]
        with primum.attach(model, optimizer, head="0") as reducer:
            assert reducer.head is model[0]

    def test_exact_names_go_first(self) -> None:
        model = nn.Module()
        model.module, model.fc = nn.Module(), nn.Linear(6, 4)
        model.module.fc = nn.Linear(6, 4)
        optimizer = optim.SGD(model.parameters(), lr=0.1)
        for name in ("fc", "module.fc"):
            with primum.attach(model, optimizer, head=name) as reducer:
                assert reducer.head is model.get_submodule(name)

    @pytest.mark.parametrize("name", ["body.0", "module.body.0", "_orig_mod.module.body.0"])
    def test_named_inside_wrappers(self, name: str) -> None:
        model = nn.Module()
        model.body = nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4))
        optimizer = optim.SGD(model.parameters(), lr=0.1)
        wrapped = torch.compile(nn.DataParallel(model), backend="eager")
        with primum.attach(wrapped, optimizer, head=name) as reducer:
            assert reducer.head is model.body[0]

    def test_given_apart_from_the_model(self) -> None:
        """The model only serves to find the head."""
        body, head = nn.Linear(6, 8).double(), nn.Linear(8, 4).double()
        optimizer = optim.SGD([*body.parameters(), *head.parameters()], **SGD)
        reducer = primum.attach(body, optimizer, head=head)
        inputs, labels = batch(0, 24)
        F.cross_entropy(head(body(inputs)), labels).backward()
        assert report_of(reducer).applied

    @ATTACH
    def test_unknown_name(self, attach: Callable[..., Reducer]) -> None:
        with pytest.raises(ValueError, match=r"no module named 'fc'; pass head= one of: 2 \(8"):
            attach(*make(), head="fc")

    @ATTACH
    @pytest.mark.parametrize("head", ["1", "", nn.ReLU(), nn.Conv2d(3, 3, 1), 3])
    def test_not_linear(self, attach: Callable[..., Reducer], head: Any) -> None:
        with pytest.raises(TypeError, match=r"must be an nn\.Linear, got [\w.]+; pass head="):
            attach(*make(), head=head)

    @ATTACH
    def test_frozen(self, attach: Callable[..., Reducer]) -> None:
        """Also if layers before it are trained, as with LoRA."""
        model, optimizer = make()
        model[2].requires_grad_(False)
        with pytest.raises(ValueError, match=r"seems to be the head is frozen .*or pass head="):
            attach(model, optimizer)

    def test_lazy(self) -> None:
        model = nn.Sequential(nn.Linear(6, 8), nn.LazyLinear(4))
        optimizer = optim.SGD(model.parameters(), lr=0.1)
        with pytest.raises(ValueError, match=r"1\.weight is not initialized yet .*attach after"):
            primum.attach(model, optimizer)
        model(torch.randn(3, 6))
        primum.attach(model, optimizer)

    def test_an_output_of_another_type_is_still_a_linear_layers(self) -> None:
        class Logits(nn.Linear):
            def forward(self, x: Tensor) -> Tensor:
                return super().forward(x).float()

        model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), Logits(8, 4)).bfloat16()
        reducer = primum.attach(model, optim.SGD(model.parameters(), lr=0.1))
        assert reducer.head_name == "2"

    @pytest.mark.filterwarnings("ignore::FutureWarning")
    @pytest.mark.parametrize("by", ["ColwiseParallel", "distribute_tensor"])
    def test_sharded(self, by: str, tmp_path: Any) -> None:
        """Tensor parallelism; of fully_shard see tests/distributed."""
        import torch.distributed as dist
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor import Replicate, distribute_tensor
        from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

        dist.init_process_group(
            "gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1
        )
        try:
            mesh = init_device_mesh("cpu", (1,))
            model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 4))
            if by == "ColwiseParallel":
                parallelize_module(model, mesh, {"1": ColwiseParallel()})
            else:
                weight = distribute_tensor(model[1].weight, mesh, [Replicate()])
                model[1].weight = nn.Parameter(weight)
            optimizer = optim.SGD(model.parameters(), lr=0.1)
            with pytest.raises(ValueError, match=r"1\.weight is a DTensor.*tensor parallelism"):
                primum.attach(model, optimizer)
        finally:
            dist.destroy_process_group()

    def test_data_parallel(self) -> None:
        model, optimizer = make()
        wrapped = nn.DataParallel(model)  # no device, no copies
        with primum.attach(wrapped, optimizer) as reducer:
            train(wrapped, optimizer, 2)
            assert report_of(reducer).applied
        wrapped.device_ids = [0, 1]
        with pytest.raises(ValueError, match=r"copies of the head, one on each of \[0, 1\]"):
            primum.attach(wrapped, optimizer)

    def test_distributed_data_parallel(self, tmp_path: Any) -> None:
        import torch.distributed as dist

        dist.init_process_group(
            "gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1
        )
        try:
            model, optimizer = make()
            wrapped = nn.parallel.DistributedDataParallel(model)
            reducer = primum.attach(wrapped, optimizer)
            train(wrapped, optimizer, 3)
            assert report_of(reducer).applied
            assert report_of(reducer).extra_weights.max() > 0.01
            assert report_of(reducer).fallbacks == 0
        finally:
            dist.destroy_process_group()

    @pytest.mark.parametrize(
        ("first", "second"),
        [
            (primum.attach, primum.attach),
            (primum.observe, primum.attach),
            (primum.attach, primum.observe),
            (primum.observe, primum.observe),
        ],
    )
    def test_again_replaces_the_first(self, first: Any, second: Any) -> None:
        model, optimizer = make()
        old = first(model, optimizer)
        new = second(model, optimizer)
        assert len(model[2]._forward_hooks) == 1
        train(model, optimizer, 1)
        assert old.last is None
        assert "removed" in repr(old)
        assert report_of(new).applied == (second is primum.attach)
        old.remove()  # of no effect on the new one
        assert len(model[2]._forward_hooks) == 1

    def test_observe_takes_what_attach_takes(self) -> None:
        model, optimizer = make()
        with pytest.raises(TypeError, match="unexpected keyword argument 'reach'"):
            primum.observe(model, optimizer, reach=1)

    def test_again_with_wrong_arguments_leaves_the_first(self) -> None:
        model, optimizer = make()
        reducer = primum.attach(model, optimizer)
        with pytest.raises(ValueError, match="does not hold"):
            primum.attach(model, optim.SGD(model[0].parameters(), lr=0.1))
        train(model, optimizer, 1)
        assert report_of(reducer).applied

    def test_detach(self) -> None:
        model, optimizer = make()
        first, second = (primum.attach(model, optimizer, head=each) for each in (model[0], "2"))
        primum.detach(model)
        assert not model[0]._forward_hooks
        assert not model[2]._forward_hooks
        train(model, optimizer, 4)
        assert first.last is second.last is None
        primum.detach(model)  # again is no error

    def test_what_a_user_sees(self) -> None:
        model, optimizer = make()
        reducer = primum.attach(model, optimizer, radius=0.1)
        assert reducer.head is model[2]
        assert reducer.head_name == "2"
        train(model, optimizer, 2)
        assert repr(reducer) == (
            "Reducer(head='2' (8 -> 4), optimizer=SGD, recipe='primum', radius=0.1, "
            "max_extra_weight=2, per='sample', apply=True, attached, steps=2, fallbacks=0)"
        )

    @pytest.mark.parametrize("model", [None, "model", torch.ones(2), make()[1]])
    def test_not_a_model(self, model: Any) -> None:
        with pytest.raises(TypeError, match=r"model must be an nn\.Module, got \w+"):
            primum.attach(model, make()[1])


class Wrapper:
    def __init__(self, optimizer: Any) -> None:
        self.optimizer = optimizer


def generated(*optimizers: optim.Optimizer) -> Iterator[optim.Optimizer]:
    yield from optimizers


class TestOptimizer:
    @pytest.mark.parametrize(
        "passed",
        [
            lambda one, two: [one, two],
            lambda one, two: (two, one),
            lambda one, two: {"body": one, "head": two},
            lambda one, two: generated(one, two),
            lambda one, two: {one, two},
            lambda one, two: Wrapper(two),
            lambda one, two: Wrapper(Wrapper(two)),
            lambda one, two: Wrapper([one, two]),
            lambda one, two: [Wrapper(one), {"x": (two,)}],
            lambda one, two: optim.lr_scheduler.ConstantLR(two),
        ],
    )
    def test_the_owner_is_used(self, passed: Callable[..., Any]) -> None:
        model, _ = make()
        one = optim.SGD(model[0].parameters(), **SGD)
        two = optim.AdamW(model[2].parameters(), **ADAMW)
        reducer = primum.attach(model, passed(one, two))
        assert owners(reducer) == {"weight": two, "bias": two}

    def test_an_optimizer_with_an_attribute_of_that_name(self) -> None:
        model, optimizer = make()
        optimizer.optimizer = "adam"
        assert owners(primum.attach(model, optimizer))["weight"] is optimizer

    def test_weight_and_bias_apart(self) -> None:
        model, _ = make()
        one, two = optim.SGD([model[2].weight], lr=0.1), optim.SGD([model[2].bias], lr=0.1)
        reducer = primum.attach(model, [one, two])
        assert owners(reducer) == {"weight": one, "bias": two}
        reducer.remove()
        assert owners(primum.attach(model, one)) == {"weight": one}  # a bias that nothing moves

    @ATTACH
    @pytest.mark.parametrize("passed", [lambda o: o, lambda o: [o], lambda o: [], lambda o: {}])
    def test_head_in_no_optimizer(
        self, attach: Callable[..., Reducer], passed: Callable[[Any], Any]
    ) -> None:
        model, _ = make()
        optimizer = optim.SGD(model[0].parameters(), lr=0.1)
        with pytest.raises(ValueError, match=r"not hold .*; pass the optimizer that trains it"):
            attach(model, passed(optimizer))

    def test_optimizer_of_another_model(self) -> None:
        with pytest.raises(ValueError, match=r"does not hold 2\.weight"):
            primum.attach(make()[0], make()[1])

    @ATTACH
    @pytest.mark.parametrize(
        "optimizer",
        [
            None,
            "SGD",
            0.1,
            optim.SGD,
            torch.ones(2),
            Wrapper(None),
            [None],
            make()[0],
        ],
    )
    def test_not_an_optimizer(self, attach: Callable[..., Reducer], optimizer: Any) -> None:
        with pytest.raises(TypeError, match=r"optimizer must be .*; got \w+"):
            attach(make()[0], optimizer)

    def test_parameters_instead_of_an_optimizer(self) -> None:
        model, _ = make()
        with pytest.raises(TypeError, match=r"optimizer must be .*; got .*Parameter"):
            primum.attach(model, model.parameters())

    @ATTACH
    def test_lbfgs(self, attach: Callable[..., Reducer]) -> None:
        model, _ = make()
        with pytest.raises(TypeError, match=r"LBFGS is not supported: .*closure.*use SGD or AdamW"):
            attach(model, optim.LBFGS(model.parameters()))

    def test_sparse_adam(self) -> None:
        model, _ = make()
        with pytest.raises(TypeError, match="SparseAdam is not supported"):
            primum.attach(model, optim.SparseAdam(list(model.parameters())))

    def test_nothing_is_left_by_a_refusal(self) -> None:
        model, optimizer = make()
        with pytest.raises(TypeError):
            primum.attach(model, [optimizer, None])
        assert not model[2]._forward_hooks
        assert not optimizer._optimizer_step_post_hooks
        primum.attach(model, optimizer)


class TestRecipe:
    @ATTACH
    @pytest.mark.parametrize("recipe", ["adam", "Primum", "", None, 3])
    def test_unknown(self, attach: Callable[..., Reducer], recipe: Any) -> None:
        with pytest.raises(ValueError, match=r'recipe must be "primum".*, got ' + repr(recipe)):
            attach(*make(), recipe=recipe)


def test_keyword_only() -> None:
    model, optimizer = make()
    with pytest.raises(TypeError):
        primum.attach(model, optimizer, model[2])  # type: ignore[misc]


def test_a_subclass_of_linear_is_linear() -> None:
    class Casted(nn.Linear):
        def forward(self, input: Tensor) -> Tensor:
            return F.linear(input, self.weight.to(input.dtype), self.bias)

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), Casted(8, 4)).double()
    optimizer = optim.SGD(model.parameters(), **SGD)
    reducer = primum.attach(model, optimizer)
    train(model, optimizer, 2)
    assert report_of(reducer).extra_weights.max() > 0.01
