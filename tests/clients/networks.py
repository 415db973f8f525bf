"""Networks that are trained through one another, and one update of each, as public scripts do it.

`Pair` is the common shape of actor and critic and of generator and discriminator: `judge` has the
head that primum is attached to, and `player` is trained by a backward pass through it.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn, optim

import primum
from primum import Reducer

ROWS = 32
Clear = Callable[[optim.Optimizer], None]


def drop(optimizer: optim.Optimizer) -> None:
    """Gradients discarded by hand, as loops without `zero_grad` do it."""
    for group in optimizer.param_groups:
        for param in group["params"]:
            param.grad = None


CLEARS: dict[str, Clear] = {
    "zero_grad": lambda optimizer: optimizer.zero_grad(),
    "zero_grad in place": lambda optimizer: optimizer.zero_grad(set_to_none=False),
    "grad = None": drop,
}


class Critic(nn.Module):
    """The value of an action in a state."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(7, 16), nn.Tanh())
        self.value = nn.Linear(16, 1)

    def forward(self, states: Tensor, actions: Tensor) -> Tensor:
        values: Tensor = self.value(self.body(torch.cat([states, actions], 1)))
        return values.squeeze(1)


@dataclass
class Pair:
    """Two networks, their optimizers, and how the loop discards gradients."""

    player: nn.Module
    judge: nn.Module
    player_optimizer: optim.Optimizer
    judge_optimizer: optim.Optimizer
    clear: Clear
    reducer: Reducer | None = None

    def attach(self, **settings: Any) -> Reducer:
        self.reducer = primum.attach(self.judge, self.judge_optimizer, **settings)
        return self.reducer


def numbers(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


class ActorCritic(Pair):
    """One critic, one actor, off-policy: the critic learns values, the actor climbs them."""

    def judge_loss(self, judge: nn.Module, number: int) -> Tensor:
        states, actions = numbers(number, ROWS, 5), numbers(100 + number, ROWS, 2)
        return F.mse_loss(judge(states, actions), states.sum(1) * actions.prod(1))

    def player_loss(self, player: nn.Module, judge: nn.Module, number: int) -> Tensor:
        states = numbers(200 + number, ROWS, 5)
        return -judge(states, player(states)).mean()

    def update_judge(self, number: int) -> None:
        self.clear(self.judge_optimizer)
        self.judge_loss(self.judge, number).backward()
        self.judge_optimizer.step()

    def update_player(self, number: int, *, paused: bool) -> None:
        self.clear(self.player_optimizer)
        assert self.reducer is not None or not paused
        loss = self.player_loss(self.player, self.judge, number)
        with self.reducer.paused() if paused and self.reducer else nullcontext():
            loss.backward()
        self.player_optimizer.step()

    def train(self, count: int) -> None:
        """Both in turn; nothing is paused."""
        for number in range(count):
            self.update_judge(number)
            self.update_player(number, paused=False)


class Gan(ActorCritic):
    """DCGAN's order: real and fake batches for the discriminator, then the generator."""

    def judge_loss(self, judge: nn.Module, number: int) -> Tensor:
        real = 0.5 * numbers(number, ROWS, 6) + 1
        output = judge(real)
        return F.binary_cross_entropy_with_logits(output, torch.ones_like(output))

    def player_loss(self, player: nn.Module, judge: nn.Module, number: int) -> Tensor:
        output = judge(player(numbers(200 + number, ROWS, 4)))
        return F.binary_cross_entropy_with_logits(output, torch.ones_like(output))

    def update_judge(self, number: int) -> None:
        self.clear(self.judge_optimizer)
        self.judge_loss(self.judge, number).backward()
        output = self.judge(self.player(numbers(200 + number, ROWS, 4)).detach())
        F.binary_cross_entropy_with_logits(output, torch.zeros_like(output)).backward()
        self.judge_optimizer.step()


def optimizers(
    player: nn.Module, judge: nn.Module, kind: str
) -> tuple[optim.Optimizer, optim.Optimizer]:
    def make(net: nn.Module) -> optim.Optimizer:
        if kind == "Adam":
            return optim.Adam(net.parameters(), lr=0.01)
        return optim.SGD(net.parameters(), lr=0.05, momentum=0.9)

    return make(player), make(judge)


def actor_critic(kind: str = "Adam", clear: str = "zero_grad") -> ActorCritic:
    torch.manual_seed(0)
    actor = nn.Sequential(nn.Linear(5, 16), nn.Tanh(), nn.Linear(16, 2), nn.Tanh()).double()
    critic = Critic().double()
    return ActorCritic(actor, critic, *optimizers(actor, critic, kind), CLEARS[clear])


def gan(kind: str = "SGD", clear: str = "zero_grad") -> Gan:
    torch.manual_seed(0)
    generator = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 6)).double()
    discriminator = nn.Sequential(nn.Linear(6, 16), nn.LeakyReLU(0.2), nn.Linear(16, 1)).double()
    made = optimizers(generator, discriminator, kind)
    return Gan(generator, discriminator, *made, CLEARS[clear])


PAIRS: dict[str, Callable[..., ActorCritic]] = {"actor-critic": actor_critic, "GAN": gan}


def plain_gradients(pair: ActorCritic, number: int) -> list[Tensor]:
    """What the player's update gives its parameters without primum: on copies, which are inert."""
    player, judge = copy.deepcopy((pair.player, pair.judge))
    player.zero_grad()
    pair.player_loss(player, judge, number).backward()
    return [p.grad for p in player.parameters() if p.grad is not None]
