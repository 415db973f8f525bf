"""Settings in words, and the overview's plot."""

from __future__ import annotations

from dataclasses import replace

import pytest

from lab.results_plots import forest
from lab.settings import RunSettings
from lab.speedrun import tuned
from lab.study_results import Row, in_short, in_words
from lab.tables import group_runs
from laboratory.conftest import record

CNN = RunSettings(train_size=5000)


@pytest.mark.parametrize(
    ("settings", "long", "short"),
    [
        (CNN, "cnn-small, CIFAR-10, SGD, B 128, 5k images, 12 epochs", "small CNN, SGD, 12 epochs"),
        (
            replace(CNN, norm="batch", optimizer="adamw", lr=0.5, clip=1.0, label_noise=0.4),
            "cnn-small, batch norm, CIFAR-10, AdamW, B 128, 5k images, 12 epochs, lr 0.5, "
            "warm-up, clipping, 40% wrong labels",
            "small CNN, batch norm, AdamW, 12 epochs, warm-up, clipping, 40% wrong labels",
        ),
        (
            replace(CNN, model="resnet20", data="cifar100", batch_size=512, lr=0.1),
            "resnet20, CIFAR-100, SGD, B 512, 5k images, 12 epochs, lr 0.1",
            "ResNet-20, SGD, CIFAR-100, B 512, 12 epochs",
        ),
        (
            tuned(8),
            "cnn-whitened, CIFAR-10, SGD, B 512, 50k images, 8 epochs, lr 0.75",
            "speedrun, SGD, 8 epochs",
        ),
    ],
)
def test_settings_in_words(settings: RunSettings, long: str, short: str) -> None:
    assert in_words(settings.shared()) == long
    assert in_short(settings.shared()) == short


def test_the_plot_names_settings_with_bases_accuracy_and_the_recipes_that_were_run() -> None:
    runs = [
        replace(record(arm, seed, 0.4 + gain + 0.01 * seed), settings=CNN.shared())
        for arm, gain in (("base", 0.0), ("primum@radius=0.4", 0.05))
        for seed in range(3)
    ]
    (group,) = group_runs(runs)
    row = Row("", group, True, group.against_base("accuracy"))
    twice = [
        label.get_text() for label in forest([row, row]).axes[0].get_yticklabels()
    ]  # names that two settings share get the learning rate
    assert twice == 2 * ["small CNN, SGD, 12 epochs, lr 0.1: 41%"]
    figure = forest([row])
    (axes,) = figure.axes
    assert [label.get_text() for label in axes.get_yticklabels()] == [
        "small CNN, SGD, 12 epochs: 41%"
    ]
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["primum, radius 0.4"]
    (bar,) = axes.containers
    assert bar.lines[0].get_xdata().tolist() == pytest.approx([5.0])
