"""Batches: every sample once, the same again, from any step on."""

from __future__ import annotations

import doctest
import subprocess
import sys
from multiprocessing import active_children

import pytest
import torch
from torch import Tensor

from lab.augment import AUGMENTATIONS, Augmentation
from lab.epochs import Batch
from lab.images import Batches, DataSettings, ImageData, batches, load_data
from lab.images.batches import first_images


@pytest.fixture(scope="module")
def data() -> ImageData:
    return load_data(DataSettings("generated", train_size=50, image_size=8, label_noise=0.2))


def same(first: Batch, second: Batch) -> bool:
    return all(torch.equal(one, other) for one, other in zip(first, second, strict=True))


@pytest.mark.parametrize(("drop_last", "sizes"), [(True, [16] * 3), (False, [16] * 3 + [2])])
def test_every_sample_at_most_once(data: ImageData, drop_last: bool, sizes: list[int]) -> None:
    batches = Batches(data.train, data, batch_size=16, drop_last=drop_last)
    found = list(batches.epoch(0))
    assert len(batches) == len(found)
    assert [len(batch.ids) for batch in found] == sizes
    ids = torch.cat([batch.ids for batch in found])
    assert len(ids.unique()) == len(ids) == sum(sizes)
    assert int(ids.max()) < 50


def test_a_batch_holds_what_its_ids_say(data: ImageData) -> None:
    assert isinstance(data.train.images, Tensor)
    for images, targets, ids in Batches(data.train, data, batch_size=16).epoch(3):
        assert torch.equal(targets, data.train.labels[ids])  # noisy labels, those to train on
        mean, std = (torch.tensor(each).view(3, 1, 1) for each in (data.mean, data.std))
        expected = (data.train.images[ids].float() / 255 - mean) / std
        torch.testing.assert_close(images, expected, rtol=1e-4, atol=1e-5)


def test_alternating_mirrors_a_random_half_and_then_the_other(data: ImageData) -> None:
    plain = Batches(data.train, data, batch_size=50, seed=3)
    turned = Batches(
        data.train, data, batch_size=50, seed=3, augmentation=Augmentation(alternate=True)
    )
    ids, mirrored = torch.arange(50), []
    for epoch in range(4):
        own, other = (each.make(ids, epoch, 0).inputs for each in (turned, plain))
        mirrored.append((own == other.flip(3)).flatten(1).all(1))
        assert ((own == other).flatten(1).all(1) == ~mirrored[-1]).all()
    assert 10 < int(mirrored[0].sum()) < 40  # 50 throws of a coin
    assert torch.equal(mirrored[1], ~mirrored[0])
    assert torch.equal(mirrored[2], mirrored[0])
    assert torch.equal(mirrored[3], mirrored[1])
    others = Batches(data.train, data, batch_size=50, seed=4, augmentation=turned.augmentation)
    assert not torch.equal(others.make(ids, 0, 0).inputs, turned.make(ids, 0, 0).inputs)


def test_first_images_are_not_augmented(data: ImageData) -> None:
    expected = Batches(data.train, data, batch_size=1).make(torch.arange(7), 0, 0).inputs
    assert torch.equal(first_images(data, 7), expected)
    assert len(first_images(data)) == 50


def test_training_images_are_standardised(data: ImageData) -> None:
    (batch,) = Batches(data.train, data, batch_size=50).epoch(0)
    assert batch.inputs.mean(dim=(0, 2, 3)).abs().max() < 1e-4
    torch.testing.assert_close(
        batch.inputs.var(dim=(0, 2, 3), correction=0), torch.ones(3), rtol=1e-3, atol=0
    )


def test_without_shuffling_the_order_is_the_splits_own(data: ImageData) -> None:
    batches = Batches(data.test, data, batch_size=100, shuffle=False, drop_last=False)
    ids = torch.cat([batch.ids for batch in batches.epoch(0)])
    assert torch.equal(ids, torch.arange(256))


def test_order_depends_on_seed_and_epoch(data: ImageData) -> None:
    orders = [
        Batches(data.train, data, batch_size=16, seed=seed).order(epoch)
        for seed, epoch in ((0, 0), (0, 1), (1, 0), (0, 0))
    ]
    assert torch.equal(orders[0], orders[3])
    assert not torch.equal(orders[0], orders[1])
    assert not torch.equal(orders[0], orders[2])
    assert not torch.equal(orders[1], orders[2])


@pytest.mark.parametrize("name", AUGMENTATIONS)
def test_going_on_in_the_middle_of_an_epoch_is_exact(data: ImageData, name: str) -> None:
    def batches() -> Batches:
        return Batches(data.train, data, batch_size=16, seed=5, augmentation=AUGMENTATIONS[name])

    whole = list(batches().epoch(2))
    torch.manual_seed(99)  # what the rest of a program draws does not matter
    rest = list(batches().epoch(2, first_step=1))
    assert len(rest) == 2
    assert all(same(*pair) for pair in zip(whole[1:], rest, strict=True))
    assert not list(batches().epoch(2, first_step=3))


@pytest.mark.parametrize("name", AUGMENTATIONS)
def test_workers_change_no_bit(data: ImageData, name: str) -> None:
    def batches(workers: int) -> Batches:
        made = AUGMENTATIONS[name]
        return Batches(data.train, data, batch_size=16, seed=5, augmentation=made, workers=workers)

    alone = list(batches(0).epoch(2))
    drawn = torch.get_rng_state()
    assert all(same(*pair) for pair in zip(alone, batches(2).epoch(2), strict=True))
    rest = batches(1).epoch(2, first_step=1)
    assert all(same(*pair) for pair in zip(alone[1:], rest, strict=True))
    assert torch.equal(torch.get_rng_state(), drawn)  # dropout will draw the same
    assert not list(batches(2).epoch(2, first_step=3))


def test_workers_end_with_the_epoch_or_before(data: ImageData) -> None:
    others = set(active_children())
    batches = Batches(data.train, data, batch_size=16, workers=2)
    epoch = batches.epoch(0)
    next(epoch)
    assert len(set(active_children()) - others) == 2
    epoch.close()
    assert set(active_children()) <= others
    list(batches.epoch(0))
    assert set(active_children()) <= others


def test_augmentations_differ_from_step_to_step_and_epoch_to_epoch(data: ImageData) -> None:
    batches = Batches(data.train, data, batch_size=16, augmentation=Augmentation(padding=2))
    ids = torch.arange(16)
    made = [batches.make(ids, epoch, step).inputs for epoch, step in ((0, 0), (0, 1), (1, 0))]
    assert not torch.equal(made[0], made[1])
    assert not torch.equal(made[0], made[2])
    assert not torch.equal(made[1], made[2])


def test_the_same_in_another_process(data: ImageData) -> None:
    """Seeds are mixed without Python's hash, which differs from process to process."""
    script = """
from lab.images import Batches, DataSettings, load_data
data = load_data(DataSettings("generated", train_size=50, image_size=8, label_noise=0.2))
print(*Batches(data.train, data, batch_size=16, seed=4).order(7).tolist())
"""
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    order = Batches(data.train, data, batch_size=16, seed=4).order(7)
    assert [int(each) for each in done.stdout.split()] == order.tolist()


def test_ranks_share_each_batch(data: ImageData) -> None:
    whole = Batches(data.train, data, batch_size=16)
    parts = [Batches(data.train, data, batch_size=16, rank=rank, ranks=3) for rank in range(3)]
    for batch, *shares in zip(whole.epoch(0), *(part.epoch(0) for part in parts), strict=True):
        assert sorted(len(share.ids) for share in shares) == [5, 5, 6]
        ids = torch.cat([share.ids for share in shares])
        assert sorted(ids.tolist()) == sorted(batch.ids.tolist())


def test_ranks_augment_differently(data: ImageData) -> None:
    crop, ids = Augmentation(padding=2), torch.arange(16)
    first, second = (
        Batches(data.train, data, batch_size=16, augmentation=crop, rank=rank, ranks=2)
        for rank in (0, 1)
    )
    assert not torch.equal(first.make(ids, 0, 0).inputs, second.make(ids, 0, 0).inputs)


def test_the_example_runs() -> None:
    assert doctest.testmod(batches) == doctest.TestResults(failed=0, attempted=4)


def test_impossible_batches(data: ImageData) -> None:
    with pytest.raises(ValueError, match="batch_size is 64, but there are 50 samples"):
        Batches(data.train, data, batch_size=64)
    assert len(Batches(data.train, data, batch_size=64, drop_last=False)) == 1


def test_a_stream_draws_all_orders_from_one_generator() -> None:
    data = load_data(DataSettings("generated", train_size=12, image_size=8))
    batches = Batches(data.train, data, batch_size=4, seed=3, stream=True)
    generator = torch.Generator().manual_seed(3)
    orders = [torch.randperm(12, generator=generator) for _ in range(3)]
    assert all(torch.equal(batches.order(epoch), orders[epoch]) for epoch in (2, 0, 1))
