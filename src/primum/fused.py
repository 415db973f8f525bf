"""Head and cross entropy in one, with weights: for heads that are never called.

The loss of `cross_entropy(head(hidden), targets)` without the logits of all tokens in memory. Its
backward pass computes the gradient at the head's output a few outputs at a time (`streamed.py`) and
weighs it as the hook would.
"""

from __future__ import annotations

import time
from dataclasses import replace

import torch
from torch import Tensor, nn

from primum.blockwise import weigh_streamed
from primum.capture import nodes_behind
from primum.compat import eager, executes_in_graph, parameter
from primum.fallback import check_several, guarded
from primum.fused_op import TokenLosses, is_fused
from primum.pipeline import Captured
from primum.positions import Call
from primum.ranks import Ranks
from primum.streamed import Gradients, Streamed, default_width, visit
from primum.weighing_at_output import WeighingAtOutput

Needed = tuple[bool, bool, bool]  # gradients of features, weight, bias


class Fused(WeighingAtOutput):
    """What a `Reducer` does for a loss that is fused with the head."""

    _number: int  # of the listener

    def linear_cross_entropy(
        self,
        hidden: Tensor,
        targets: Tensor,
        *,
        ignore_index: int = -100,
        reduction: str = "mean",
        label_smoothing: float = 0.0,
        chunk_size: int | None = None,
    ) -> Tensor:
        """`cross_entropy(head(hidden), targets)` with weights, without all logits in memory.

        For models that compute the loss without calling the head, so that its hook never runs. The
        returned value is the plain loss; in the backward pass each token's gradient counts `1 + w`
        times, with the same weights as under the hook. Logits are computed for a few outputs at a
        time, and again in the backward pass, so there is no second derivative.

        Args:
            hidden: The head's input. [..., d].
            targets: Class indices. [...], int64.
            ignore_index: Tokens with this target are ignored.
            reduction: "mean" over the tokens that count, "sum", or "none" for a loss per token.
            label_smoothing: Share of the target that is spread evenly over all outputs.
            chunk_size: Number of outputs whose logits are in memory at a time. By default a block
                is a quarter of the size of `hidden`, or all logits if they fit into half a MiB.

        Examples:
            >>> model = nn.ModuleDict({"body": nn.Embedding(50, 16), "head": nn.Linear(16, 50)})
            >>> optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
            >>> reducer = primum.attach(model, optimizer, head="head", per="token")
            >>> words = torch.randint(50, (4, 9))
            >>> hidden = model["body"](words[:, :-1])
            >>> reducer.linear_cross_entropy(hidden, words[:, 1:]).backward()
            >>> reducer.last.extra_weights.shape
            torch.Size([32])
        """
        head = self._head()
        if head is None:
            raise RuntimeError("the model this Reducer was attached to no longer exists")
        if self._outlet is not None:
            raise ValueError(
                "linear_cross_entropy needs a plain, trained nn.Linear as head, and "
                f"{self.output_name!r} is not one ({self.head_name!r} is measured instead); call "
                "the head and compute the loss from its output"
            )
        if self._shards is not None:
            raise ValueError(
                f"linear_cross_entropy does not support sharded heads such as {self.head_name!r}; "
                "call the head and compute the loss from its output"
            )
        if reduction not in ("mean", "sum", "none"):
            raise ValueError(f'reduction must be "mean", "sum" or "none", got {reduction!r}')
        if not 0 <= label_smoothing <= 1:
            raise ValueError(f"label_smoothing must be between 0 and 1, got {label_smoothing}")
        _check(hidden, targets, head)
        leading, inputs = list(hidden.shape[:-1]), hidden.shape[-1]
        tokens, outputs = targets.numel(), len(head.weight)
        if chunk_size is None:
            chunk_size = default_width(tokens, inputs, outputs)
        elif chunk_size < 1:
            raise ValueError(f"chunk_size must be >= 1, got {chunk_size}")
        settings = ignore_index, label_smoothing, chunk_size, _products_in(hidden, head.weight)
        together = torch.compiler.is_dynamo_compiling() or self._meets()
        losses: Tensor = TokenLosses.apply(  # type: ignore[no-untyped-call]
            hidden.reshape(-1, inputs),
            head.weight,
            head.bias,
            targets.reshape(-1),
            settings,
            leading,
            self._number,
            head.training,
            together,
        )
        if reduction == "none":
            return losses.view(targets.shape)
        total = losses.sum()
        return total if reduction == "sum" else total / (targets != ignore_index).sum()

    def _refuse_fused(self, losses: Tensor) -> None:
        """In the explicit form: refuse losses that get their weights in the backward pass."""
        if any(is_fused(node, self._number) for node in nodes_behind(losses, self)):
            raise ValueError(
                f"losses of shape {list(losses.shape)} come from reducer.linear_cross_entropy, "
                "which already applies the weights in the backward pass; call .mean().backward() "
                "on them instead of passing them to reducer(...)"
            )

    def warn_if_bypassed(self, reason: str) -> None:
        """Warn, once, that the loss does not call the head; not if `reason` is empty."""
        if reason:
            self._monitor.warn("bypass", reason)

    def on_fused(
        self,
        source: Streamed,
        leading: list[int],
        training: bool,
        together: bool,
        needed: Needed,
    ) -> Gradients | None:
        """The gradients of a backward pass, weighted; None leaves them plain."""
        # Has the shape of the gradient at the head's output, and no memory.
        like = source.features.new_empty(()).expand(*leading, len(source.weight))
        return self._on_fused(source, like, training, together, needed)

    @guarded
    def _on_fused(
        self, source: Streamed, like: Tensor, training: bool, together: bool, needed: Needed
    ) -> Gradients | None:
        weight = parameter(self._head(), "weight")
        if weight is None or not weight.requires_grad or not executes_in_graph(weight):
            return None  # a gradient for another purpose
        self._monitor.passes += 1
        if not self._active():
            self._rescale.miss(like)
            return None
        self._recipe = self._per.decide("token", like.shape[:-1], self._recipe)
        whole = source.width >= len(source.weight)
        ranks = self._scope.ranks() if together else None
        if ranks is not None and not self._all_whole(ranks, whole):
            ranks = None
        if whole:
            return self._weigh_whole(source, like, training, ranks, needed)
        return self._weigh_in_blocks(source, like, training, needed)

    def _weigh_whole(
        self, source: Streamed, like: Tensor, training: bool, ranks: Ranks | None, needed: Needed
    ) -> Gradients:
        """By the gradient at the output, as the hook does: it is small."""
        everything = slice(0, len(source.weight))
        found = source.gradient(everything).to(source.low)
        features = source.features.view(*like.shape[:-1], source.features.shape[1])
        call = Call(lambda: features, training)
        weighted = self._weigh([found.view(like.shape)], [call], ranks)
        made = Gradients.like(source, needed)
        made.take(source, everything, found if weighted is None else weighted[0].view_as(found))
        return made

    def _weigh_in_blocks(
        self, source: Streamed, like: Tensor, training: bool, needed: Needed
    ) -> Gradients:
        """The same with a few outputs at a time; weighs the tokens of this rank alone."""
        head = self._check(training)
        self._skips.settle()
        self._begin(head)
        sequences = self._per.now == "sample" and like.dim() > 2
        positions = like.shape[1:-1].numel() if sequences else 1
        check_several(len(source.features) // positions)
        unscale = self._rescale.unscale(like)
        nothing = source.features.new_empty((), dtype=source.wide)
        captured = Captured(
            source.features,
            nothing.expand(len(source.features), len(source.weight)),
            unscale=unscale,
            before=unscale,
            factor=self._rescale.factor,
            tokens=self._per.now == "token",
            measure=self.measure_exact,
        )
        weighs = self._apply and getattr(self._recipe, "radius", None) != 0
        # Where weights follow, the features' gradient waits for them, and so does its memory.
        made = Gradients.like(source, (needed[0] and not weighs, *needed[1:]))
        drift, solution, seconds = weigh_streamed(
            head, self._owners, source, captured, self._recipe, positions, made
        )
        began = time.perf_counter()
        if weighs:
            weights = 1 + solution.extra_weights
            weights = weights if positions == 1 else weights.repeat_interleave(positions)
            if needed[0]:
                made = replace(made, features=torch.zeros_like(source.features, dtype=source.wide))
            assert source.rows is not None
            visit(replace(source, rows=source.rows * weights), made)
        if self._backward is not None:
            assert made.weight is not None
            self._rescale.expect_gradient(made.weight, made.bias, unscale)
        if self._rescale.scaler is None:  # with one, such a step is skipped and expected
            self._monitor.not_finite(solution.objective)
        self._report(drift, solution)
        again = 2 / 3 if weighs else 0.0  # of the last pass: a plain one fills features as well
        self._monitor.spend(seconds + again * (time.perf_counter() - began))
        if weighs:
            self._monitor.weighed(solution.objective, drift)
            given = self._per.now, getattr(self._recipe, "radius", None), sequences
            self._monitor.effect.add(solution.extra_weights, drift, *given)
        return made

    # --- over several ranks -----------------------------------------------------------------------

    @eager
    def _meets(self) -> bool:
        """Whether this pass is weighed with other ranks, as far as the forward pass knows."""
        ranks = self._ranks(eager=True)
        if ranks is None and self._scope.name == "auto" and self._scope.wrapped:
            self._monitor.warn(
                "outside",
                "linear_cross_entropy runs outside DistributedDataParallel's forward pass, so each "
                "rank solves for its own tokens; call it inside the model's forward, pass "
                'scope="global" to solve over all ranks, or scope="local" to silence this',
            )
        return ranks is not None

    def _all_whole(self, ranks: Ranks, whole: bool) -> bool:
        """Whether all ranks have the gradient at all outputs; the same answer on every rank."""
        if all(row[0] for row in ranks.exchange([whole])):
            return True
        self._monitor.warn(
            "blocks",
            "each rank solves for its own tokens: linear_cross_entropy computes the gradient at "
            "the head's output in blocks, but solving over all ranks needs all of it; pass "
            'scope="local" to silence this',
        )
        return False


def _check(hidden: Tensor, targets: Tensor, head: nn.Linear) -> None:
    if hidden.shape[-1] != head.in_features or targets.shape != hidden.shape[:-1]:
        raise ValueError(
            f"hidden must be [..., {head.in_features}] and targets of the same leading shape, got "
            f"{list(hidden.shape)} and {list(targets.shape)}"
        )
    if targets.dtype != torch.int64:
        raise TypeError(
            f"targets must be class indices (int64), got {targets.dtype}; for probabilities call "
            "the head"
        )


def _products_in(hidden: Tensor, weight: Tensor) -> torch.dtype:
    """The type in which the head would compute its output."""
    kind = hidden.device.type
    if torch.is_autocast_enabled(kind) and hidden.dtype != torch.float64:
        return torch.get_autocast_dtype(kind)
    if hidden.dtype != weight.dtype:
        raise TypeError(
            f"hidden is {hidden.dtype}, but the head's weight is {weight.dtype}; cast one of them, "
            "or use autocast"
        )
    return hidden.dtype
