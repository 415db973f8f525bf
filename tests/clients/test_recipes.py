"""The recipes of docs/frameworks.md for frameworks without a callback of ours.

With the real package where it is installed. Code that is ours alone runs everywhere.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import primum

SIZE, CLASSES, BATCH = 16, 4, 16
external = pytest.mark.filterwarnings("ignore")  # these packages' own warnings are not ours


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(SIZE, 32), nn.ReLU(), nn.Linear(32, CLASSES))


class Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = network()

    def forward(self, inputs: Tensor) -> Tensor:
        return self.body(inputs)  # type: ignore[no-any-return]


def data(count: int = 64) -> TensorDataset:
    torch.manual_seed(1)
    labels = torch.randint(CLASSES, (count,))
    return TensorDataset(torch.randn(CLASSES, SIZE)[labels] + 2 * torch.randn(count, SIZE), labels)


def check_weighed(
    model: nn.Module, reducer: primum.Reducer, losses: Callable[[nn.Module], Tensor]
) -> None:
    """The gradients are those of mean((1 + w) * losses), and some w is not 0."""
    report = reducer.last
    assert report is not None
    assert report.applied, report.reason
    weights = report.extra_weights
    assert (weights > 0.01).any()
    plain = deepcopy(model)  # copies have no Reducer
    plain.zero_grad()
    ((1 + weights) * losses(plain)).mean().backward()
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-4, atol=1e-6)


# --- skorch: `fit` builds the model anew, so attach when training begins --------------------------


class Attach:
    """The recipe's callback, without skorch's base class."""

    reducer: primum.Reducer

    def on_train_begin(self, net: Any, *args: Any, **kwargs: Any) -> None:
        self.reducer = primum.attach(net.module_, net.optimizer_)

    def on_train_end(self, net: Any, *args: Any, **kwargs: Any) -> None:
        self.last = self.reducer.last
        self.reducer.remove()


class Rebuilds:
    """What skorch's `NeuralNet.fit` does: `initialize`, then `on_train_begin`, then steps."""

    def __init__(self, callbacks: Iterable[Any] = ()) -> None:
        self.callbacks = callbacks

    def initialize(self) -> None:
        self.module_ = Network()
        self.optimizer_ = torch.optim.SGD(self.module_.parameters(), lr=0.1, momentum=0.9)

    def fit(self) -> None:
        self.initialize()
        for callback in self.callbacks:
            callback.on_train_begin(self)
        for inputs, labels in DataLoader(data(), BATCH):
            self.optimizer_.zero_grad()
            F.cross_entropy(self.module_(inputs), labels).backward()
            self.optimizer_.step()
        for callback in self.callbacks:
            callback.on_train_end(self)


def test_a_model_built_anew_needs_the_callback(caplog: pytest.LogCaptureFixture) -> None:
    callback = Attach()
    net = Rebuilds([callback])
    net.initialize()
    reducer = primum.attach(net.module_, net.optimizer_)
    net.fit()
    gc.collect()
    assert reducer.last is None
    assert "the model is gone" in repr(reducer)
    assert caplog.text.count("attach to that one") == 1
    assert callback.last is not None
    assert callback.last.applied


@external
@pytest.mark.parametrize("early", [False, True])
def test_skorch(early: bool, caplog: pytest.LogCaptureFixture) -> None:
    skorch = pytest.importorskip("skorch")

    class Primum(Attach, skorch.callbacks.Callback):  # type: ignore[misc, name-defined]
        pass

    callback = Primum()
    net = skorch.NeuralNetClassifier(
        Network,
        criterion=nn.CrossEntropyLoss,
        optimizer=torch.optim.SGD,
        lr=0.1,
        max_epochs=2,
        batch_size=BATCH,
        train_split=None,
        verbose=0,
        callbacks=[] if early else [callback],
    )
    if early:
        net.initialize()
        primum.attach(net.module_, net.optimizer_)
    net.fit(*(each.numpy() for each in data().tensors))
    gc.collect()
    assert ("attach to that one" in caplog.text) == early
    assert early or callback.last.applied


# --- packages whose optimizers and heads need a word ----------------------------------------------


@external
def test_ignite() -> None:
    engine = pytest.importorskip("ignite.engine")
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    reducer = primum.attach(model, optimizer)
    trainer = engine.create_supervised_trainer(model, optimizer, F.cross_entropy)
    trainer.run(DataLoader(data(), BATCH), max_epochs=2)
    inputs, labels = (each[-BATCH:] for each in data().tensors)
    labels = labels.roll(1)  # not what it has learned, so that some samples are harmed
    optimizer.zero_grad()
    F.cross_entropy(model(inputs), labels).backward()
    check_weighed(model, reducer, lambda m: F.cross_entropy(m(inputs), labels, reduction="none"))


@external
def test_fastai() -> None:
    try:
        from fastai.callback.core import Callback
        from fastai.data.core import DataLoaders
        from fastai.learner import Learner
        from fastai.optimizer import OptimWrapper
    except ImportError as error:
        pytest.skip(str(error))

    class Primum(Callback):  # type: ignore[misc]
        def before_fit(self) -> None:
            self.reducer = primum.attach(self.learn.model, self.learn.opt)

    def learner(callback: Primum, **options: Any) -> Any:
        loaders = DataLoaders(*(DataLoader(data(), BATCH) for _ in range(2)))
        given = {"loss_func": nn.CrossEntropyLoss(), "cbs": [callback], **options}
        return Learner(loaders, network(), **given)

    callback = Primum()
    learner(callback, opt_func=partial(OptimWrapper, opt=torch.optim.AdamW)).fit(2, 1e-3)
    assert callback.reducer.last.applied
    assert type(callback.reducer.optimizer) is torch.optim.AdamW
    with pytest.raises(TypeError, match="OptimWrapper"):
        learner(Primum()).fit(1)


@external
def test_keras_is_refused_in_words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KERAS_BACKEND", "torch")
    keras = pytest.importorskip("keras")
    model = keras.Sequential([keras.Input((SIZE,)), keras.layers.Dense(CLASSES)])
    with pytest.raises(TypeError, match=r"got keras\..*\.SGD\. Train with an optimizer of torch"):
        primum.attach(model, keras.optimizers.SGD(0.1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ValueError, match=r"the model has no nn\.Linear, and primum needs one"):
        primum.attach(model, optimizer)
    with pytest.raises(TypeError, match=r"got keras\..*\.Dense"):
        primum.attach(model, optimizer, head=model.layers[-1])


# --- sentence-transformers: the head belongs to the loss ------------------------------------------


class PairLoss(nn.Module):
    """As `SoftmaxLoss`: one encoder for both sentences, the classifier in the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.model = network()
        self.classifier = nn.Linear(3 * CLASSES, 3)

    def forward(self, inputs: list[Tensor], labels: Tensor, reduction: str = "mean") -> Tensor:
        first, second = (self.model(each) for each in inputs)
        features = torch.cat([first, second, (first - second).abs()], 1)
        return F.cross_entropy(self.classifier(features), labels, reduction=reduction)


def test_a_head_inside_the_loss_has_a_row_per_pair() -> None:
    loss = PairLoss()
    optimizer = torch.optim.SGD(loss.parameters(), lr=0.1, momentum=0.9)
    reducer = primum.attach(loss, optimizer, head=loss.classifier)
    inputs, labels = [torch.randn(BATCH, SIZE) for _ in range(2)], torch.randint(3, (BATCH,))
    for _ in range(2):
        optimizer.zero_grad()
        loss(inputs, labels).backward()
        check_weighed(loss, reducer, lambda m: m(inputs, labels, reduction="none"))
        optimizer.step()


@external
def test_sentence_transformers(tmp_path: Path) -> None:
    package = pytest.importorskip("sentence_transformers")
    losses = pytest.importorskip("sentence_transformers.sentence_transformer.losses")
    from transformers import BertConfig, BertModel, BertTokenizerFast

    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *"abcd"]
    (tmp_path / "vocab.txt").write_text("\n".join(words))
    BertTokenizerFast(str(tmp_path / "vocab.txt")).save_pretrained(tmp_path)
    size = {"hidden_size": 16, "num_attention_heads": 2, "intermediate_size": 32}
    plain = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    torch.manual_seed(0)
    config = BertConfig(vocab_size=len(words), num_hidden_layers=1, **size, **plain)
    BertModel(config).save_pretrained(tmp_path)
    model = package.SentenceTransformer(str(tmp_path), device="cpu")
    loss = losses.SoftmaxLoss(model, 16, 3)
    optimizer = torch.optim.SGD(loss.parameters(), lr=0.5, momentum=0.9)
    reducer = primum.attach(loss, optimizer, head=loss.classifier)
    pairs = (["a b", "c d", "a", "b"] * 4, ["c", "a d", "b", "b c"] * 4)
    labels = torch.randint(3, (BATCH,))

    def each(module: nn.Module) -> Tensor:
        module.loss_fct = nn.CrossEntropyLoss(reduction="none")  # type: ignore[assignment]
        found: Tensor = module([model.preprocess(list(side)) for side in pairs], labels)
        return found

    each(loss).mean().backward()
    check_weighed(loss, reducer, each)


# --- CleanRL's PPO: two output layers, one loss per sample ----------------------------------------


class Agent(nn.Module):
    """A policy and a value on one trunk."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(8, 32), nn.Tanh())
        self.actor, self.critic = nn.Linear(32, 4), nn.Linear(32, 1)

    def forward(self, seen: Tensor) -> tuple[Tensor, Tensor]:
        hidden = self.trunk(seen)
        return self.actor(hidden), self.critic(hidden).squeeze(1)


def test_ppo_by_the_explicit_form() -> None:
    """Two epochs over one rollout; weights at the actor, gradients of the whole loss."""
    torch.manual_seed(0)
    agent = Agent()
    optimizer = torch.optim.Adam(agent.parameters(), lr=1e-3, eps=1e-5)
    reducer = primum.attach(agent, optimizer, head=agent.actor)
    seen, returns = torch.randn(64, 8), torch.randn(64)
    with torch.no_grad():
        policy = torch.distributions.Categorical(logits=agent(seen)[0])
        actions = policy.sample()
        before, gain = policy.log_prob(actions), torch.randn(64)

    def losses(agent: nn.Module, rows: Tensor) -> Tensor:
        logits, value = agent(seen[rows])
        policy = torch.distributions.Categorical(logits=logits)
        ratio = (policy.log_prob(actions[rows]) - before[rows]).exp()
        advantage = (gain[rows] - gain[rows].mean()) / (gain[rows].std() + 1e-8)
        surrogate = torch.max(-advantage * ratio, -advantage * ratio.clamp(0.8, 1.2))
        return surrogate - 0.01 * policy.entropy() + 0.25 * (value - returns[rows]) ** 2

    for rows in torch.randperm(64).repeat(2).split(16):
        optimizer.zero_grad()
        reducer(losses(agent, rows)).backward()
        check_weighed(agent, reducer, partial(losses, rows=rows))
        optimizer.step()
    assert reducer.last is not None
    assert reducer.last.fallbacks == 0
