"""Scripts of the clients study with several networks or single states: REINFORCE, GAN, DDPG."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch
import torch.nn.functional as F
from torch import Tensor, nn, optim

from lab.bench._clients import Run, Script, digits, shuffled, started

PAUSED = "…, and `with reducer.paused():` around the other's backward"


class CartPole:
    """A pole on a cart, pushed left or right in steps of 20 ms; falls at 12 degrees."""

    def __init__(self, rng: torch.Generator) -> None:
        self.state = (0.1 * torch.rand(4, generator=rng) - 0.05).tolist()

    def push(self, right: bool) -> bool:
        """One step; return whether the pole still stands and the cart is on its track."""
        place, speed, angle, turn = self.state
        force = 10.0 if right else -10.0
        sine, cosine = math.sin(angle), math.cos(angle)
        pushed = (force + 0.05 * turn**2 * sine) / 1.1
        bend = (9.8 * sine - cosine * pushed) / (0.5 * (4 / 3 - 0.1 * cosine**2 / 1.1))
        pull = pushed - 0.05 * bend * cosine / 1.1
        self.state = [
            place + 0.02 * speed,
            speed + 0.02 * pull,
            angle + 0.02 * turn,
            turn + 0.02 * bend,
        ]
        return abs(self.state[0]) < 2.4 and abs(self.state[2]) < 0.2095


def reinforce(run: Run) -> float:
    """The policy sees one state at a time; one step of Adam after each episode."""
    rng = started(run)
    policy = nn.Sequential(nn.Linear(4, 128), nn.Dropout(0.6), nn.ReLU(), nn.Linear(128, 2))
    optimizer = optim.Adam(policy.parameters(), lr=1e-2)
    run.attach(policy, optimizer)
    lengths: list[int] = []
    for _ in range(run.few(150)):
        log_probs: list[Tensor] = []
        pole, standing = CartPole(rng), True
        while standing and len(log_probs) < 200:
            choice = policy(torch.tensor(pole.state)).log_softmax(-1)
            action = int(torch.rand((), generator=rng) < choice[1].exp())
            log_probs.append(choice[action])
            standing = pole.push(bool(action))
        lengths.append(len(log_probs))
        returns = [0.0]
        for _ in log_probs:
            returns.append(1 + 0.99 * returns[-1])
        wanted = torch.tensor(returns[:0:-1])
        wanted = (wanted - wanted.mean()) / (wanted.std() + 1e-6)
        optimizer.zero_grad()
        (-torch.stack(log_probs) * wanted).sum().backward()
        run.units = len(log_probs)
        optimizer.step()
    late = lengths[-50:]
    return sum(late) / len(late)


def apart(player: nn.Module, judge: nn.Module, loss: Callable[..., Tensor]) -> float:
    """Relative distance of the player's gradient from the plain one.

    The plain one is computed on copies, to which primum is not attached.
    """
    twins = copy.deepcopy((player, judge))
    twins[0].zero_grad()
    loss(*twins).backward()
    found, plain = (
        torch.cat([p.grad.flatten() for p in net.parameters() if p.grad is not None])
        for net in (player, twins[0])
    )
    return float((found - plain).norm() / plain.norm())


def block(run: Run) -> AbstractContextManager[object]:
    """Context for the backward pass of the other network."""
    return run.reducer.paused() if run.paused and run.reducer is not None else nullcontext()


def frechet(one: Tensor, other: Tensor) -> float:
    """Fréchet distance between normal distributions fitted to two sets of points."""
    covariances = [each.t().cov().double() for each in (one, other)]
    product = torch.linalg.eigvals(covariances[0] @ covariances[1]).real.clamp_min(0)
    spread = covariances[0].trace() + covariances[1].trace() - 2 * product.sqrt().sum()
    return float((one.mean(0) - other.mean(0)).square().sum() + spread)


def adam_gan(run: Run) -> float:
    return gan(run, lambda params: optim.Adam(params, lr=1e-3, betas=(0.5, 0.999)))


def sgd_gan(run: Run) -> float:
    """Momentum as in Adam's betas: at 0.9 the discriminator wins, and plain training collapses."""
    return gan(run, lambda params: optim.SGD(params, lr=0.02, momentum=0.5))


def momentum_gan(run: Run) -> float:
    """A tenth of the rate, so that it does not collapse; it learns little in this time."""
    return gan(run, lambda params: optim.SGD(params, lr=0.002, momentum=0.9))


def gan(run: Run, optimizer_of: Callable[..., optim.Optimizer]) -> float:
    """Real and fake batches for the discriminator, one step; then the generator's turn."""
    rng = started(run)
    pixels, _ = digits()
    real = 2 * pixels - 1
    generator = nn.Sequential(
        nn.Linear(16, 32 * 4), nn.Unflatten(1, (32, 2, 2)), nn.ReLU(),
        nn.ConvTranspose2d(32, 16, 4, 2, 1), nn.BatchNorm2d(16), nn.ReLU(),
        nn.ConvTranspose2d(16, 1, 4, 2, 1), nn.Tanh(),
    )  # fmt: skip
    discriminator = nn.Sequential(
        nn.Conv2d(1, 16, 4, 2, 1), nn.LeakyReLU(0.2),
        nn.Conv2d(16, 32, 4, 2, 1), nn.LeakyReLU(0.2), nn.Flatten(), nn.Linear(128, 1),
    )  # fmt: skip
    optimizers = [optimizer_of(net.parameters()) for net in (generator, discriminator)]
    run.attach(discriminator, optimizers[1])
    ones, zeros = torch.ones(64, 1), torch.zeros(64, 1)
    bce = F.binary_cross_entropy_with_logits
    bends = []
    for step, rows in enumerate(shuffled(len(real), 64, run.few(400), rng)):
        discriminator.zero_grad()
        bce(discriminator(real[rows]), ones).backward()
        noise = torch.randn(64, 16, generator=rng)
        fake = generator(noise)
        bce(discriminator(fake.detach()), zeros).backward()
        optimizers[1].step()
        generator.zero_grad()
        loss = bce(discriminator(fake), ones)
        with block(run):
            loss.backward()
        if run.reducer is not None and step % 20 == 0:

            def again(g: nn.Module, d: nn.Module, noise: Tensor = noise) -> Tensor:
                return bce(d(g(noise)), ones)

            bends.append(apart(generator, discriminator, again))
        optimizers[0].step()
    _average(run, bends)
    with torch.no_grad():
        drawn = generator(torch.randn(len(real), 16, generator=rng))
    return frechet(drawn.flatten(1), real.flatten(1))


def _average(run: Run, bends: list[float]) -> None:
    if bends:
        run.extra["other_network_off_by"] = sum(bends) / len(bends)


class Plant:
    """A linear system with noise, to be kept near zero with little force."""

    def __init__(self) -> None:
        rng = torch.Generator().manual_seed(0)
        turn = torch.linalg.qr(torch.randn(4, 4, generator=rng))[0]
        self.keep, self.push = 1.02 * turn, 0.5 * torch.randn(4, 2, generator=rng)

    def step(self, states: Tensor, actions: Tensor, rng: torch.Generator) -> tuple[Tensor, Tensor]:
        noise = 0.1 * torch.randn(states.shape, generator=rng)
        after = states @ self.keep.t() + actions @ self.push.t() + noise
        return after, states.square().sum(1) + 0.1 * actions.square().sum(1)


class Critic(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU())
        self.value = nn.Linear(64, 1)

    def forward(self, states: Tensor, actions: Tensor) -> Tensor:
        values: Tensor = self.value(self.body(torch.cat([states, actions], 1)))
        return values.squeeze(1)


def ddpg(run: Run) -> float:
    """Off-policy, one critic with a slow copy, Adam for both."""
    rng, plant = started(run), Plant()
    actor = nn.Sequential(nn.Linear(4, 64), nn.ReLU(), nn.Linear(64, 2), nn.Tanh())
    critic = Critic()
    slow = copy.deepcopy((actor, critic))
    optimizers = [optim.Adam(net.parameters(), lr=1e-3) for net in (actor, critic)]
    run.attach(critic, optimizers[1])
    bends = []
    for step in range(run.few(600)):
        states = torch.randn(64, 4, generator=rng)
        with torch.no_grad():
            actions = actor(states) + 0.3 * torch.randn(64, 2, generator=rng)
            after, cost = plant.step(states, actions, rng)
            targets = -cost + 0.9 * slow[1](after, slow[0](after))
        optimizers[1].zero_grad()
        F.mse_loss(critic(states, actions), targets).backward()
        optimizers[1].step()
        optimizers[0].zero_grad()
        loss = -critic(states, actor(states)).mean()
        with block(run):
            loss.backward()
        if run.reducer is not None and step % 20 == 0:

            def again(a: nn.Module, c: nn.Module, states: Tensor = states) -> Tensor:
                return -c(states, a(states)).mean()

            bends.append(apart(actor, critic, again))
        optimizers[0].step()
        with torch.no_grad():
            for net, copied in zip((actor, critic), slow, strict=True):
                for p, old in zip(net.parameters(), copied.parameters(), strict=True):
                    old.lerp_(p, 0.02)
    _average(run, bends)
    rng = torch.Generator().manual_seed(0)
    states, total = torch.randn(512, 4, generator=rng), torch.zeros(())
    with torch.no_grad():
        for _ in range(20):
            states, cost = plant.step(states, actor(states), rng)
            total += cost.mean() / 20
    return float(total)


LINE = "reducer = primum.attach({}, {}_optimizer)"
SCRIPTS = [
    Script("policy gradient, one state at a time, Adam", "PyTorch examples: REINFORCE", reinforce,
           {"primum.attach(policy, optimizer)": {}}, figure="steps until the pole falls",
           more_is_better=True),
    *(Script(name, "PyTorch examples: dcgan", play,
             {LINE.format("discriminator", "discriminator"): {}, PAUSED: {"paused": True}},
             figure="distance to real digits")
      for name, play in (("GAN, Adam", adam_gan), ("GAN, SGD", sgd_gan),
                         ("GAN, SGD, momentum 0.9", momentum_gan))),
    Script("actor and critic, Adam", "DDPG", ddpg,
           {LINE.format("critic", "critic"): {}, PAUSED: {"paused": True}},
           figure="cost per step of the plant"),
]  # fmt: skip
