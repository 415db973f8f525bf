"""`primum.diagnose`: leaves nothing behind, agrees with loops by hand, says what it knows."""

from __future__ import annotations

import copy
import random
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn, optim
from torch.utils.data import DataLoader, TensorDataset

import primum
from primum.cli import main
from primum.diagnostics.diagnose import HIGH, LOW, SETTINGS, STEPS, Diagnosis, Spread
from primum.diagnostics.self_check import SelfCheck

Batch = tuple[Tensor, Tensor]


def losses_of(model: nn.Module, batch: Batch) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1].squeeze(-1), reduction="none")


def network() -> nn.Sequential:
    torch.manual_seed(0)
    body = [nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Dropout(0.2)]
    return nn.Sequential(*body, nn.Linear(8, 4)).double()


def batches(count: int, size: int = 16) -> list[Batch]:
    torch.manual_seed(1)
    return [
        (torch.randn(size, 6).double(), torch.randint(4, (size,)).view(-1, 1)) for _ in range(count)
    ]


def state(model: nn.Module, optimizer: optim.Optimizer, loader: Any) -> list[Any]:
    hooks = [len(module._forward_hooks) for module in model.modules()]
    grads = [param.grad for param in model.parameters()]
    modes = [module.training for module in model.modules()]
    drawn = [torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()]  # noqa: NPY002
    drawn += [loader.generator.get_state()]
    return copy.deepcopy([model.state_dict(), optimizer.state_dict(), grads, hooks, modes, *drawn])


@pytest.mark.parametrize("steps", [0, 2])
@pytest.mark.parametrize("attached", [False, True])
@pytest.mark.parametrize("training", [False, True])
def test_nothing_of_the_user_changes_bit_for_bit(
    steps: int, attached: bool, training: bool
) -> None:
    model = network()
    optimizer = optim.AdamW(model.parameters(), lr=0.01)
    reducer = primum.attach(model, optimizer) if attached else None
    for batch in batches(steps):
        optimizer.zero_grad()
        losses_of(model, batch).mean().backward()
        optimizer.step()
    model.train(training)
    data = TensorDataset(*(torch.cat(parts) for parts in zip(*batches(3), strict=True)))
    order = torch.Generator().manual_seed(5)
    loader = DataLoader(data, batch_size=16, shuffle=True, generator=order)

    def noisy(model: nn.Module, batch: Batch) -> Tensor:
        drawn = random.random() + np.random.rand()  # noqa: NPY002
        return losses_of(model, batch) * (1 + 0.01 * drawn)

    before, last = state(model, optimizer, loader), reducer and reducer.last
    primum.diagnose(model, optimizer, loader, noisy)
    torch.testing.assert_close(state(model, optimizer, loader), before, rtol=0, atol=0)
    assert (reducer and reducer.last) is last


def test_numbers_of_the_steps_agree_with_a_loop_by_hand() -> None:
    """Without dropout, in double precision; the common shift is summed sample by sample."""
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4)).double()
    optimizer = optim.SGD(model.parameters(), lr=0.3, momentum=0.9)
    given = batches(3)
    found = primum.diagnose(model, optimizer, given, losses_of)

    shares, harmed, removed = [], [], []
    reducer = primum.observe(model, optimizer)
    for number in range(2 * STEPS):
        batch = given[number % 3]
        optimizer.zero_grad()
        logits, losses = model(batch[0]).detach(), losses_of(model, batch)
        losses.mean().backward()
        optimizer.step()
        if number < STEPS:
            continue
        with torch.no_grad():
            moved = (model(batch[0]) - logits).tolist()
            harmed.append(float((losses_of(model, batch) > losses).double().mean()))
        centred = [[each - sum(row) / 4 for each in row] for row in moved]
        middle = [sum(column) / 16 for column in zip(*centred, strict=True)]
        sizes = [sum(each**2 for each in row) for row in centred]
        shares.append(sum(each**2 for each in middle) / (sum(sizes) / 16))
        assert reducer.last is not None
        removed.append(float(1 - reducer.last.harm_after / reducer.last.harm_before))
    for spread, values in (
        (found.common_shift, shares),
        (found.harmed, harmed),
        (found.removed, removed),
    ):
        # common_shift and the weights are computed in float32.
        assert spread.mean == pytest.approx(sum(values) / STEPS, rel=1e-3)
        assert (spread.lowest, spread.highest) == pytest.approx(
            (min(values), max(values)), rel=1e-3
        )
        assert spread.std == pytest.approx(np.std(values), rel=1e-2)
        assert spread.steps == STEPS
    assert found.check.ok
    assert found.per == "sample"
    assert found.time_added > -1


def test_dropout_masks_are_the_same_before_and_after_a_step() -> None:
    """At a learning rate of 1e-12 new masks would be all that changes the logits."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Dropout(0.5), nn.Linear(6, 4)).double()
    with torch.no_grad():
        model[1].weight.zero_()
    given = [(torch.ones(16, 6).double(), torch.zeros(16, 1).long())]
    model[0].p = 0.0
    optimizer = optim.SGD(model.parameters(), lr=1e-3)
    without = primum.diagnose(model, optimizer, given, losses_of)
    assert without.common_shift.mean == pytest.approx(1)  # equal inputs move alike
    model[0].p = 0.5
    found = primum.diagnose(model, optimizer, given, losses_of)
    assert 0.5 < found.common_shift.lowest < found.common_shift.highest < 1
    assert found.harmed.mean == 0  # new masks would raise half of the losses


GOOD = SelfCheck("head", 0.0, 0.0, True)


def of(share: float, std: float = 0.01, **changes: Any) -> Diagnosis:
    spread = Spread(share, std, share - 0.1, share + 0.1, STEPS)
    return replace(Diagnosis(spread, spread, spread, 0.1, GOOD, "sample"), **changes)


@pytest.mark.parametrize(
    ("diagnosis", "words"),
    [
        (of(0.9), "Likely to help: above two thirds of a step. There, 10 of our 23"),
        (of(0.9), "gained +0.2 to +11.1 points"),
        (of(0.6), "May help a little: between half and two thirds of a step. There, 3 of our"),
        (of(0.6), "gained +1.8 to +3.6 points"),
        (of(0.3), "Expect little or nothing: below half of a step. There, 10 of our 23"),
        (of(0.3), "gained -0.2 to +2.3 points"),
        (of(0.3), "Not held out"),
        (of(LOW + 0.02, std=0.1), "close to 50%"),
        (of(HIGH - 0.02, std=0.1), "close to 67%"),
        (of(0.9, per="token"), "Cannot say: for language models"),
        (of(0.9, common_shift=Spread.of([float("nan")])), "Cannot say: no step moved"),
        (of(0.9, check=replace(GOOD, ok=False)), "the self-test failed"),
    ],
)
def test_the_verdict(diagnosis: Diagnosis, words: str) -> None:
    assert words in diagnosis.verdict
    lines = str(diagnosis).splitlines()
    assert len(lines) <= 12
    assert max(map(len, lines)) <= 80


def test_the_table_is_that_of_the_study() -> None:
    from pathlib import Path

    page = Path(__file__).parents[2] / "lab/bench/results/early_shift.md"
    rows = [line.split(" | ") for line in page.read_text().splitlines() if line.startswith("| ")]
    found = [(int(row[1]), float(row[4].split()[0]), float(row[4].split()[2])) for row in rows[2:]]
    assert sorted(point for kind in SETTINGS.values() for point in kind) == sorted(found)


def test_the_plot_shows_all_settings_and_this_model(tmp_path: Any) -> None:
    figure = of(0.7).plot(tmp_path / "here.png")
    assert (tmp_path / "here.png").stat().st_size > 0
    (axes,) = figure.axes
    assert len(axes.containers) == len(SETTINGS)
    assert any(line.get_xdata()[0] == pytest.approx(70) for line in axes.lines)


def test_what_cannot_be_measured_says_why() -> None:
    model = network()
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ValueError, match="batches is empty"):
        primum.diagnose(model, optimizer, [], losses_of)
    with pytest.raises(ValueError, match="one loss per sample"):
        primum.diagnose(model, optimizer, batches(1), lambda m, b: losses_of(m, b).mean())


def test_a_learning_rate_of_zero_is_no_answer() -> None:
    model = network()
    optimizer = optim.SGD(model.parameters(), lr=0.0)
    assert "Cannot say" in primum.diagnose(model, optimizer, batches(2), losses_of).verdict


def test_tokens_get_no_verdict() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(5, 8), nn.Linear(8, 5))
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    words = torch.randint(5, (4, 7))

    def losses(model: nn.Module, words: Tensor) -> Tensor:
        return F.cross_entropy(model(words).mT, words, reduction="none")

    found = primum.diagnose(model, optimizer, [words], losses)
    assert found.per == "token"
    assert "Cannot say" in found.verdict


def test_the_command_runs(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["diagnose", "--demo"]) == 0
    said = capsys.readouterr().out
    assert "Likely to help" in said
    assert "self-test of head '11': ok" in said
    assert max(map(len, said.splitlines())) <= 80
