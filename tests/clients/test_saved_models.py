"""Saving, loading and converting a model while primum is attached: all as without it."""

from __future__ import annotations

import copy
import io
import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn, optim
from torch.serialization import get_unsafe_globals_in_checkpoint, safe_globals

import primum
from loops import SGD, batch, report_of

pytestmark = pytest.mark.filterwarnings(
    "ignore:`torch.jit.[a-z_]+` is deprecated:DeprecationWarning",
    "ignore:torch.ao.quantization is deprecated:DeprecationWarning",
    "ignore:torch.quantize_per_tensor, torch.quantize_per_channel:UserWarning",
    "ignore:`isinstance.treespec, LeafSpec.` is deprecated:FutureWarning",
    "ignore:Exporting a model while it is in training mode:UserWarning",
    "ignore:Converting a tensor to a Python boolean",  # nn.LSTM, traced
    "ignore:The tensor attributes self.rnn._flat_weights",  # nn.LSTM, exported
)


class Words(nn.Module):
    """A recurrent language model in the usual shape: embedding, LSTM, dropout, decoder."""

    def __init__(self) -> None:
        super().__init__()
        self.drop = nn.Dropout(0.1)
        self.encoder = nn.Embedding(11, 6)
        self.rnn = nn.LSTM(6, 8, batch_first=True)
        self.decoder = nn.Linear(8, 11)

    def forward(self, words: Tensor) -> Tensor:
        output, _ = self.rnn(self.drop(self.encoder(words)))
        decoded: Tensor = self.decoder(self.drop(output))
        return decoded


WORDS_NEED = [Words, nn.Dropout, nn.Embedding, nn.LSTM, nn.Linear]
DIGITS_NEED = [nn.Sequential, nn.Linear, nn.Tanh]


def digits() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4))


def words() -> Words:
    torch.manual_seed(0)
    return Words()


def inputs_for(model: nn.Module) -> Tensor:
    rng = torch.Generator().manual_seed(5)
    if isinstance(model, Words):
        return torch.randint(11, (4, 7), generator=rng)
    return torch.randn(5, 6, generator=rng)


def attached(model: nn.Module) -> primum.Reducer:
    """Attach and train two steps, so that there is something to remember."""
    optimizer = optim.SGD(model.parameters(), **SGD)
    reducer = primum.attach(model, optimizer)
    step(model, optimizer, 2)
    return reducer


def step(model: nn.Module, optimizer: optim.Optimizer, steps: int = 1) -> None:
    for number in range(steps):
        optimizer.zero_grad()
        if isinstance(model, Words):
            text = torch.randint(11, (8, 5), generator=torch.Generator().manual_seed(number))
            F.cross_entropy(model(text).flatten(0, 1), text.flatten()).backward()
        else:
            inputs, labels = batch(number, 24, dtype=torch.float32)
            F.cross_entropy(model(inputs), labels).backward()
        optimizer.step()


def plain_twin(model: nn.Module) -> nn.Module:
    """A model of the same class and values that primum was never attached to."""
    twin = words() if isinstance(model, Words) else digits()
    twin.load_state_dict(model.state_dict())
    return twin.train(model.training)


def assert_plain(found: nn.Module, model: nn.Module) -> None:
    """Same outputs and gradients as a plain model, and no hooks on any module."""
    twin = plain_twin(model)
    for net in (found, twin):
        net.eval().zero_grad()
    inputs = inputs_for(model)
    outputs = [net(inputs) for net in (found, twin)]
    assert torch.equal(*outputs)
    for output in outputs:
        output.square().mean().backward()
    for one, other in zip(found.parameters(), twin.parameters(), strict=True):
        assert torch.equal(one.grad, other.grad)
    assert not any(module._forward_hooks for module in found.modules())


@pytest.mark.parametrize("make", [digits, words])
class TestLoading:
    def saved(self, model: nn.Module) -> io.BytesIO:
        file = io.BytesIO()
        torch.save(model, file)
        file.seek(0)
        return file

    def test_needs_the_classes_that_a_plain_model_needs(
        self, make: Callable[[], nn.Module]
    ) -> None:
        model = make()
        attached(model)
        found, expected = (
            sorted(get_unsafe_globals_in_checkpoint(self.saved(net)))
            for net in (model, plain_twin(model))
        )
        assert found == expected

    def test_with_weights_only(self, make: Callable[[], nn.Module]) -> None:
        """Under `safe_globals` with the classes that the model is made of, and no others."""
        model = make()
        attached(model)
        with safe_globals(WORDS_NEED if make is words else DIGITS_NEED):
            loaded = torch.load(self.saved(model), weights_only=True)
        assert_plain(loaded, model)

    def test_without_weights_only(self, make: Callable[[], nn.Module]) -> None:
        model = make()
        attached(model)
        assert_plain(torch.load(self.saved(model), weights_only=False), model)

    @pytest.mark.parametrize("protocol", range(2, pickle.HIGHEST_PROTOCOL + 1))
    def test_pickle(self, make: Callable[[], nn.Module], protocol: int) -> None:
        model = make()
        attached(model)
        data = pickle.dumps(model, protocol)
        assert b"primum" not in data
        assert_plain(pickle.loads(data), model)

    @pytest.mark.parametrize("how", [copy.deepcopy, copy.copy])
    def test_copies(
        self, make: Callable[[], nn.Module], how: Callable[[nn.Module], nn.Module]
    ) -> None:
        """A shallow copy shares its modules, and so what is attached to them."""
        model = make()
        reducer = attached(model)
        found = how(model)
        if how is copy.deepcopy:
            assert_plain(found, model)
        report = reducer.last
        found.train()
        step(found, optim.SGD(found.parameters(), **SGD))
        assert (reducer.last is report) == (how is copy.deepcopy)

    def test_the_copies_can_be_attached_to(self, make: Callable[[], nn.Module]) -> None:
        model = make()
        attached(model)
        loaded = torch.load(self.saved(model), weights_only=False).train()
        reducer = attached(loaded)
        assert report_of(reducer).applied

    def test_training_goes_on(self, make: Callable[[], nn.Module]) -> None:
        model = make()
        reducer = attached(model)
        report = reducer.last
        self.saved(model)
        pickle.dumps(model)
        copy.deepcopy(model)
        step(model, reducer.optimizer)
        assert reducer.last is not report
        assert report_of(reducer).applied
        assert report_of(reducer).fallbacks == 0


def scripted(model: nn.Module, inputs: Tensor) -> Callable[[Tensor], Tensor]:
    return torch.jit.script(model)


def traced(model: nn.Module, inputs: Tensor) -> Callable[[Tensor], Tensor]:
    return torch.jit.trace(model, inputs)


def symbolic(model: nn.Module, inputs: Tensor) -> Callable[[Tensor], Tensor]:
    return torch.fx.symbolic_trace(model)


def exported(model: nn.Module, inputs: Tensor) -> Callable[[Tensor], Tensor]:
    return torch.export.export(model, (inputs,)).module()


def quantized(model: nn.Module, inputs: Tensor) -> Callable[[Tensor], Tensor]:
    return torch.ao.quantization.quantize_dynamic(model, {nn.Linear}, dtype=torch.qint8)


CONVERSIONS = [scripted, traced, symbolic, exported, quantized]


@pytest.mark.parametrize("training", [False, True], ids=["eval", "train"])
@pytest.mark.parametrize("convert", CONVERSIONS)
@pytest.mark.parametrize("make", [digits, words])
class TestConversions:
    """Whatever is ignored above warns without primum, too."""

    def test_same_as_of_a_plain_model(
        self, make: Callable[[], nn.Module], convert: Callable[..., nn.Module], training: bool
    ) -> None:
        if make is words and convert is symbolic:
            pytest.skip("torch.fx does not trace nn.LSTM, with or without primum")
        if make is words and training:
            pytest.skip("dropout makes two calls differ")
        model = make()
        reducer = attached(model)
        model.train(training)
        inputs = inputs_for(model)
        found = convert(model, inputs)
        expected = convert(plain_twin(model), inputs)
        assert torch.equal(found(inputs), expected(inputs))
        other = inputs.flip(0)
        assert torch.equal(found(other), expected(other))
        model.train()
        step(model, reducer.optimizer)
        assert report_of(reducer).applied
        assert report_of(reducer).fallbacks == 0


def test_onnx(tmp_path: Path) -> None:
    onnx = pytest.importorskip("onnx")
    onnx_reference = pytest.importorskip("onnx.reference")
    pytest.importorskip("onnxscript")
    model = digits()
    reducer = attached(model)
    model.eval()
    inputs = inputs_for(model)
    program = torch.onnx.export(model, (inputs,), dynamo=True, verbose=False)
    assert program is not None
    path = tmp_path / "model.onnx"
    program.save(path)
    evaluator = onnx_reference.ReferenceEvaluator(str(path))
    (found,) = evaluator.run(None, {evaluator.input_names[0]: inputs.numpy()})
    with torch.no_grad():
        torch.testing.assert_close(torch.from_numpy(found), model(inputs))
    # Not in the bytes: nodes carry stack traces with paths, and a clone's folder is called primum.
    saved = onnx.load(path)
    bodies = [saved.graph, *saved.functions]
    kinds = {(node.domain, node.op_type) for body in bodies for node in body.node}
    assert {kind for _, kind in kinds} <= {"Gemm", "Tanh"}
    assert {domain for domain, _ in kinds} <= {"", "ai.onnx"}
    assert {each.domain for each in saved.opset_import} <= {"", "ai.onnx"}
    model.train()
    step(model, reducer.optimizer)
    assert report_of(reducer).applied


ELSEWHERE = """
import sys
import warnings

sys.modules["primum"] = None  # any import of it fails
warnings.simplefilter("ignore")
import torch

inputs, expected = torch.load("expected.pt")
programs = {
    "saved": torch.load("saved.pt", weights_only=False),
    "scripted": torch.jit.load("scripted.pt"),
    "traced": torch.jit.load("traced.pt"),
    "exported": torch.export.load("exported.pt2").module(),
}
for name, program in programs.items():
    torch.testing.assert_close(program(inputs), expected, msg=name)
print(*programs)
"""


def test_files_work_where_there_is_no_primum(tmp_path: Path) -> None:
    model = digits()
    attached(model)
    model.eval()
    inputs = inputs_for(model)
    with torch.no_grad():
        torch.save((inputs, model(inputs)), tmp_path / "expected.pt")
    torch.save(model, tmp_path / "saved.pt")
    torch.jit.save(torch.jit.script(model), tmp_path / "scripted.pt")
    torch.jit.save(torch.jit.trace(model, inputs), tmp_path / "traced.pt")
    torch.export.save(torch.export.export(model, (inputs,)), tmp_path / "exported.pt2")
    done = subprocess.run(
        [sys.executable, "-c", ELSEWHERE], cwd=tmp_path, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["saved", "scripted", "traced", "exported"]
